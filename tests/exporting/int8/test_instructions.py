"""Which int8 kernels are right without VNNI, by running them so; and what reduce_range makes of a model."""

import pickle
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from test_kernels import convolve, graph_of

import tfopt
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.weights import kernels_that_need_vnni
from tfopt.exporting.manifest import CheckRecord, Manifest, SignatureRecord, read_manifest
from tfopt.exporting.verification.measured import missing_instructions
from tfopt.graph import GraphEditor
from tfopt.hardware import has_vnni
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.annotate import annotate
from tfopt.quantization.annotation.fusion import find_fusions, int8_weights
from tfopt.quantization.annotation.grids import Range, WeightGrid

WITHOUT_VNNI = ("AVX512_CORE", "AVX2", "SSE41")
GENERATOR = np.random.default_rng(0)
RUN = """
import os, pickle, sys
import tensorflow as tf
import tfopt.graph
path, *limits = sys.argv[1:]
for limit in limits:
    if os.fork() == 0:  # before any kernel has run, which is when oneDNN reads its limit
        os.environ["ONEDNN_MAX_CPU_ISA"] = limit
        with open(path, "rb") as file:
            cases = pickle.load(file)
        outputs = {name: next(iter(graph.predict(x).values())) for name, (graph, x) in cases.items()}
        with open(f"{path}.{limit}", "wb") as file:
            pickle.dump(outputs, file)
        os._exit(0)
for _ in limits:
    assert os.wait()[1] == 0
"""


def outputs_under(limits, cases, directory, fresh_python):
    """Returns what lowered graphs compute under each instruction set, by limit and name."""
    path = directory / "cases"
    path.write_bytes(pickle.dumps(cases))
    fresh_python("-c", RUN, path, *limits, check=True)
    return {limit: pickle.loads(path.with_name(f"cases.{limit}").read_bytes()) for limit in limits}


def convolution(x, weights):
    return tf.nn.conv2d(x, weights, 1, "VALID")


def depthwise(x, weights):
    return tf.raw_ops.DepthwiseConv2dNative(input=x, filter=weights, strides=[1, 1, 1, 1], padding="VALID")


KERNELS = {
    "convolution": (convolution, (2, 8, 8, 33), (3, 3, 33, 20)),
    "1x1 convolution": (convolution, (2, 8, 8, 64), (1, 1, 64, 64)),
    "grouped convolution": (convolution, (2, 8, 8, 32), (3, 3, 4, 40)),
    "depthwise": (depthwise, (2, 8, 8, 24), (3, 3, 24, 1)),
    "depthwise, one channel": (depthwise, (2, 8, 8, 1), (3, 3, 1, 1)),
    "product": (tf.matmul, (5, 70), (70, 30)),
}


def kernel(name, signed, values, bits):
    """Returns a lowered graph of one kernel on the largest values there are, its inputs and the exact sums.

    Args:
        name: One of KERNELS.
        signed: Whether the activations are signed.
        values: "top": all as large as can be; "ends": largest and smallest at random.
        bits: Of the weights; None for those that reduce_range takes.
    """
    function, shape, weight_shape = KERNELS[name]
    grid = WeightGrid(reduce_range=True) if bits is None else WeightGrid(bits=bits)
    x = np.full(shape, 127 if signed else 255)
    signs = np.ones(weight_shape, int)
    if values == "ends":
        x = x * GENERATOR.choice([-1, 1] if signed else [0, 1], shape)
        signs = GENERATOR.choice([-1, 1], weight_shape)
    graph = graph_of(lambda x: function(x, signs.astype("float32")), (None, *shape[1:]))
    editor = GraphEditor(graph.graph_def)
    (fusion,), _ = find_fusions(graph, editor)
    span = Range(limit=float(x.max()), signed=signed)
    top = grid.qmax_of(editor, fusion, {fusion.input: span})
    if function is tf.matmul:
        sums = x @ (signs * top)
    elif function is convolution:
        groups = shape[3] // weight_shape[2]
        parts = zip(np.split(x, groups, -1), np.split(signs * top, groups, -1), strict=True)
        sums = np.concatenate([convolve(*part, (1, 1), [(0, 0)] * 2, (1, 1)) for part in parts], axis=-1)
    else:
        each = [
            convolve(x[..., [i]], (signs * top)[:, :, i, None], (1, 1), [(0, 0)] * 2, (1, 1)) for i in range(shape[3])
        ]
        sums = np.concatenate(each, axis=-1)
    result = Range(limit=float(np.abs(sums).max()) / top, signed=bool(sums.min() < 0))
    annotated = annotate(graph, [fusion], {fusion.input: span, fusion.output: result}, weight_grid=grid)
    return lower_to_int8(annotated), x.astype("float32"), sums / top, result


CASES = [(name, signed, values) for name in KERNELS for signed in (False, True) for values in ("top", "ends")]
NEVER_WRONG = {("depthwise", False)}  # it adds no pairs; and weights of 7 bits would cost accuracy for nothing


@pytest.fixture(scope="module")
def kernels():
    return {(*case, bits): kernel(*case, bits) for case in CASES for bits in (None, 8, 4)}


@pytest.fixture(scope="module")
def results(kernels, tmp_path_factory, fresh_python):
    cases = {key: (graph, x) for key, (graph, x, _, _) in kernels.items()}
    return outputs_under(WITHOUT_VNNI, cases, tmp_path_factory.mktemp("kernels"), fresh_python)


def wrong_by(output, exact, span):
    """Returns the largest difference in steps of the result."""
    return float(np.abs(output - np.clip(exact, span.low, span.limit)).max() / span.scale)


@pytest.mark.parametrize("limit", WITHOUT_VNNI)
def test_reduced_weights_are_exact_without_vnni_and_full_ones_are_not(kernels, results, limit):
    """Weights of 7 or 4 bits in every kernel; and of 8 where reduce_range leaves them."""
    for key, (graph, _, exact, span) in kernels.items():
        *case, bits = key
        error = wrong_by(results[limit][key], exact, span)
        needs = bool(kernels_that_need_vnni(graph))
        assert needs == (bits == 8 and tuple(case[:2]) not in NEVER_WRONG), key
        if not needs:
            assert error <= 0.51, (limit, key)
    worst = {
        case[:2]: max(wrong_by(results[limit][*case[:2], v, 8], *kernels[*case[:2], v, 8][2:]) for v in ("top", "ends"))
        for case in CASES
    }
    for name in ("convolution", "1x1 convolution", "product"):
        for signed in (False, True):
            assert worst[name, signed] > 0.9, (limit, name, signed)


def test_a_depthwise_convolution_keeps_eight_bits_where_its_input_is_never_negative(kernels):
    def top(name, signed):
        node = next(node for node in kernels[name, signed, "top", None][0].graph_def.node if node.op.startswith("_"))
        weights = GraphEditor(kernels[name, signed, "top", None][0].graph_def).value(node.input[1])
        return int(np.abs(weights.view(np.int8)).max())

    assert top("depthwise", signed=False) == 127
    assert top("depthwise, one channel", signed=False) == top("convolution", signed=False) == 63
    assert top("product", signed=True) == 63
    assert top("depthwise", signed=True) == top("convolution", signed=True) == 126  # doubled: the kernel halves them


X = GENERATOR.normal(size=(24, 8, 8, 6)).astype("float32")


def residual():
    """Signed and unsigned activations, a signed sum that is computed with an offset, and every kind of kernel."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 6), name="image")
    x = layers.Conv2D(8, 3, padding="same", name="stem")(inputs)
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same", name="branch")(layers.ReLU()(x))])
    x = layers.Conv2D(8, 1, activation="relu", name="mix")(x)
    x = layers.DepthwiseConv2D(3, activation="relu", name="unsigned")(x)
    x = layers.Conv2D(8, 1, name="linear")(x)
    x = layers.DepthwiseConv2D(3, name="signed")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(x)))


def trained_with(**settings):
    model = quantize(residual(), QuantizationConfig(training=True, **settings), calibration_data=X)
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((len(X), 4)), verbose=0)
    return quantize(model)


WAYS = {
    "default": lambda: quantize(residual(), calibration_data=X),
    "adaptive rounding": lambda: quantize(residual(), QuantizationConfig(rounding="adaptive"), calibration_data=X),
    "4 bits": lambda: quantize(residual(), QuantizationConfig(weight_bits=4), calibration_data=X),
    "trained": lambda: trained_with(),
    "trained, learned ranges": lambda: trained_with(learned_ranges=True),
    "full": lambda: quantize(residual(), QuantizationConfig(reduce_range=False), calibration_data=X),
}


@pytest.mark.parametrize(
    "ways",
    [
        ("default", "4 bits", "full"),
        pytest.param(("adaptive rounding", "trained", "trained, learned ranges"), marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_however_a_model_is_quantized_its_kernels_compute_the_annotated_graph_without_vnni(
    ways, tmp_path, fresh_python
):
    quantized = {name: WAYS[name]() for name in ways}
    lowered = {name: lower_to_int8(model.graph) for name, model in quantized.items()}
    assert {name for name, graph in lowered.items() if kernels_that_need_vnni(graph)} == {"full"}.intersection(ways)
    for name, model in quantized.items():
        assert len(model.report.changed) == 7, name
        assert tops(model) == ({7} if name == "4 bits" else {127} if name == "full" else {63, 127}), name
    cases = {name: (graph, X) for name, graph in lowered.items()}
    outputs = outputs_under(["AVX512_CORE", "AVX2"], cases, tmp_path, fresh_python)
    errors = {}
    for name, model in quantized.items():
        expected = model.predict(X)
        found = [lowered[name].predict(X)["output_0"], *(outputs[limit][name] for limit in outputs)]
        errors[name] = [float(np.linalg.norm(each - expected) / np.linalg.norm(expected)) for each in found]
    for name in ways:
        assert (errors[name][0] < 0.01) == (name != "full" or has_vnni() is not False), errors
        assert (max(errors[name][1:]) < 0.01) == (name != "full"), errors


def tops(model):
    """Returns how many steps the largest weight of each node lies above zero."""
    editor = GraphEditor(model.graph.graph_def)
    nodes = [node for node in editor.nodes.values() if node.op == "FakeQuantWithMinMaxVarsPerChannel"]
    return {int(np.abs(int8_weights(editor, node.name)[0]).max()) for node in nodes}


@pytest.mark.parametrize(
    ("limit", "has"),
    [
        *(("SSE41", ()), ("avx2", ()), ("AVX512_CORE", ())),
        *(("AVX2_VNNI", ("avx_vnni",)), ("AVX512_CORE_VNNI", ("avx512_vnni",))),
        *(("AVX512_CORE_AMX", ("avx512_vnni", "avx_vnni")), ("", ("avx512_vnni", "avx_vnni")), ("what", ("avx_vnni",))),
    ],
)
@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_vnni_is_the_processors_and_what_the_environment_leaves_of_it(monkeypatch, name, limit, has):
    for each in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, limit)
    for feature in ("avx512_vnni", "avx_vnni"):
        monkeypatch.setattr("tfopt.hardware.machine._cpu", lambda feature=feature: ("", ("avx2", feature), {}))
        assert has_vnni() == (feature in has or limit == "what")
    monkeypatch.setattr("tfopt.hardware.machine._cpu", lambda: ("", ("avx2", "avx512f"), {}))
    assert has_vnni() is False
    monkeypatch.setattr("tfopt.hardware.machine._cpu", lambda: ("", (), {"cpu_features": "none of avx2"}))
    assert has_vnni() is False
    monkeypatch.setattr(
        "tfopt.hardware.machine._cpu", lambda: ("", (), {"cpu_features": "the system does not list them"})
    )
    assert has_vnni() is None


def test_the_instructions_an_artifact_needs(monkeypatch):
    old = Manifest(
        format=2,
        tfopt="0.1.0",
        tensorflow="2.21.0",
        model="model",
        precision="int8",
        requires="TensorFlow",
        signature=SignatureRecord(inputs={}, outputs={}),
        files={},
        check=CheckRecord(ranges={}, shapes={}, outputs={}),
    )
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "Serve it on such a machine" in missing_instructions(old, "serving_default")
    with_fallback = replace(old, needs_vnni=True, signatures=("serving_default", "serving_float"))
    assert "Call the signature 'serving_float'" in missing_instructions(with_fallback, "serving_default")
    assert missing_instructions(with_fallback, "serving_float") is None
    assert missing_instructions(replace(old, needs_vnni=False), "serving_default") is None
    assert missing_instructions(replace(old, precision="float32"), "serving_default") is None
    monkeypatch.setattr("tfopt.hardware.machine._cpu", lambda: ("", ("avx_vnni",), {}))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    assert missing_instructions(old, "serving_default") is None


def test_verify_refuses_by_the_instructions_however_small_the_difference(tmp_path, monkeypatch):
    """Weights that reach 127 once in each channel saturate nowhere on these inputs; on others they may."""
    model = keras.Sequential([keras.Input((16,), name="x"), layers.Dense(4)])
    model.layers[0].kernel.assign(np.where(np.arange(16) == 0, 1.0, 0.01)[:, None] * np.ones((1, 4)))
    x = np.random.default_rng(0).random((32, 16), dtype="float32")
    config = tfopt.ExportConfig(precision="int8", int8_nodes="all")
    tfopt.export(model, tmp_path / "reduced", config, calibration_data=x)
    full = replace(config, quantization=QuantizationConfig(reduce_range=False))
    tfopt.export(model, tmp_path / "full", full, calibration_data=x)
    manifests = {name: read_manifest(tmp_path / name) for name in ("full", "reduced")}
    assert "(VNNI, AMX) for right results" in manifests["full"].requires
    assert "(VNNI, AMX) for speed" in manifests["reduced"].requires
    assert [manifests[name].needs_vnni for name in ("full", "reduced")] == [True, False]
    monkeypatch.setattr("tfopt.hardware.machine._cpu", lambda: ("", ("avx2",), {}))
    assert missing_instructions(manifests["reduced"], "serving_default") is None
    receipt = tfopt.verify(tmp_path / "full", seconds=0.01)
    assert len(receipt.problems) == 1
    assert "needs VNNI or AMX" in receipt.problems[0]
