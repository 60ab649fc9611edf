"""Weights in fewer bits: what is stored, what is computed with it, and what it costs."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.stored_weights import HALVES, INTEGERS, encode_weights
from tfopt.graph import freeze
from tfopt.quantization import WeightOnlyConfig, quantize
from tfopt.quantization.weight_only import quantize_matrix

WEIGHT_ONLY = [*HALVES, *INTEGERS]
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(16, 12, 12, 3)).astype("float32")
TOKENS = GENERATOR.integers(0, 300, (6, 12)).astype("int32")


@pytest.fixture(scope="module")
def images():
    """Sizes that leave groups, bytes and pieces incomplete: 3 * 3 * 3 inputs, 5 * 41 values, over 24 * 1024 of them."""
    return keras.Sequential(
        [
            keras.Input((12, 12, 3), name="image"),
            layers.Conv2D(41, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.DepthwiseConv2D(3, depth_multiplier=2),
            layers.Conv2DTranspose(7, 3),
            layers.Flatten(),
            layers.Dense(33, activation="relu", name="hidden"),
            layers.Dense(5),
        ],
        name="images",
    )


@pytest.fixture(scope="module")
def words():
    """An embedding, a loop and a tied projection: rows of a table, and the same table transposed."""
    tokens = keras.Input((12,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(300, 21)
    return keras.Model(
        tokens, embedding(layers.LSTM(21)(layers.Embedding(300, 21)(tokens)), reverse=True), name="words"
    )


def reference(graph, precision, config):
    """The graph with the weights rounded in NumPy, written out anew, in place."""
    nodes = {node.name: node for node in graph.graph_def.node}
    readers = {}
    for node in nodes.values():
        for place, tensor in enumerate(node.input):
            readers.setdefault(tensor.split(":")[0], []).append((node.op, place, node))
    for name, node in nodes.items():
        if node.op != "Const":
            continue
        value = tf.make_ndarray(node.attr["value"].tensor)
        taken = [r for r in readers.get(name, ()) if r[0] in OPS and (r[0] == "StatelessWhile" or r[1] == OPS[r[0]])]
        if value.dtype != np.float32 or value.size < config.minimum_size or not taken:
            continue
        if precision in HALVES:
            rounded = value.astype(HALVES[precision]).astype(np.float32)
        elif value.ndim < 2:
            continue
        else:
            op, _, reader = taken[0]
            rows = op in ("GatherV2", "Conv2DBackpropInput") or (
                "transpose_b" in reader.attr and reader.attr["transpose_b"].b
            )
            columns = value.shape[-1] * (value.shape[-2] if op == "DepthwiseConv2dNative" else 1)
            matrix = value.reshape(-1, columns)
            rounded = (
                round_rows(matrix, precision, config) if rows else round_rows(matrix.T, precision, config).T
            ).reshape(value.shape)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(rounded))
    return graph


OPS = {
    "Conv2D": 1,
    "DepthwiseConv2dNative": 1,
    "Conv2DBackpropInput": 1,
    "MatMul": 1,
    "GatherV2": 0,
    "StatelessWhile": None,
}


def round_rows(matrix, precision, config):
    result = np.zeros_like(matrix)
    for row in range(len(matrix)):
        if precision == "int8_weight_only":
            scale = np.abs(matrix[row]).max() / 127
            result[row] = np.rint(matrix[row] / scale) * scale
            continue
        for start in range(0, matrix.shape[1], config.group_size):
            group = matrix[row, start : start + config.group_size]
            outermost = group[np.abs(group).argmax()]
            tried = []
            for shrink in (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
                scale = np.float32(
                    tf.bfloat16.as_numpy_dtype(np.float32(outermost * np.float32(shrink)) / np.float32(-8))
                )
                tried.append(np.clip(np.rint(group / scale), -8, 7) * scale)
            result[row, start : start + config.group_size] = min(tried, key=lambda one: np.sum((one - group) ** 2))
    return result


# Each model in each precision, each precision decoded in both ways.
WAYS = [
    (("images", "words")[(place + other) % 2], precision, decode)
    for place, precision in enumerate(WEIGHT_ONLY)
    for other, decode in enumerate(("load", "call"))
] + [("images", "int4_weight_only", "load")]  # convolutions in pieces
# Each precision of either kind, each decoding, and each model.
FAST = [("images", "float16", "load"), ("words", "int8_weight_only", "call"), ("images", "int4_weight_only", "load")]


@pytest.mark.parametrize(
    ("name", "precision", "decode"),
    [way if way in FAST else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS],
)
def test_computes_with_the_rounded_weights(name, precision, decode, request):
    model, inputs = request.getfixturevalue(name), X if name == "images" else TOKENS
    config = WeightOnlyConfig(decode=decode, group_size=16, minimum_size=256)
    graph = freeze(model)
    encoded, report = encode_weights(graph, precision, config)
    found = encoded.predict(inputs)["output_0"]
    expected = reference(graph, precision, config).predict(inputs)["output_0"]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    assert len(report.changed) == 4
    below = 1 if name == "images" else 0  # its last Dense
    assert [skip.reason.split(":")[0] for skip in report.skipped] == ["fewer values than minimum_size=256"] * below


@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        pytest.param("float16", 0.52, marks=pytest.mark.slow),
        pytest.param("int8_weight_only", 0.28, marks=pytest.mark.slow),
        pytest.param("int4_weight_only", 0.17, marks=pytest.mark.slow),
    ],
)
def test_small_on_disk_and_as_declared_in_fresh_process(precision, limit, tmp_path):
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(512, activation="relu"), layers.Dense(512)])
    x = GENERATOR.normal(size=(8, 256)).astype("float32")
    full = export(model, tmp_path / "float32", calibration_data=x)
    artifact = export(model, tmp_path / "a", ExportConfig(precision=precision), calibration_data=x, baseline=full.path)
    assert artifact.bytes_on_disk <= limit * full.bytes_on_disk
    bits = {"float16": 16, "int8_weight_only": 8, "int4_weight_only": 4.25}[precision]
    assert artifact.report.metrics["bits_per_weight"] == pytest.approx(bits, abs=0.1)
    manifest = json.loads(Path(artifact.path, "manifest.json").read_text())
    assert (manifest["precision"], manifest["requires"]) == (precision, "TensorFlow")
    assert manifest["signature"] == json.loads(Path(full.path, "manifest.json").read_text())["signature"]
    receipt = verify(artifact.path, seconds=0.01)
    assert receipt.ok
    assert receipt.kernels == {"MatMul": 2}
    assert receipt.weight_count == 256 * 512 + 512 * 512
    assert (
        receipt.parity_relative_error < {"float16": 1e-3, "int8_weight_only": 2e-2, "int4_weight_only": 0.2}[precision]
    )


def test_tensorflow_decodes_it_once():
    """What runs after TensorFlow's own optimizer is the product with a constant, and nothing that decodes."""
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(512, use_bias=False)])
    encoded, _ = encode_weights(freeze(model), "int8_weight_only", WeightOnlyConfig())
    options, metadata = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        tf.graph_util.import_graph_def(encoded.graph_def, name="")
        (tensor, _), (spec,) = encoded.outputs["output_0"], encoded.inputs.values()
        feed = {f"{spec.name}:0": np.ones((2, 256), np.float32)}
        session.run(f"{tensor}:0", feed, options=options, run_metadata=metadata)
    run = [node.op for graph in metadata.partition_graphs for node in graph.node]
    assert sum("MatMul" in op for op in run) == 1
    assert not {"Cast", "Mul", "ConcatV2"}.intersection(run)
    assert {"Cast", "Mul", "ConcatV2"} <= {node.op for node in encoded.graph_def.node}


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.slow), "int4_weight_only"])
def test_decoded_at_every_call_the_weights_are_variables(precision, tmp_path):
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(512, use_bias=False)])
    x = GENERATOR.normal(size=(8, 256)).astype("float32")
    config = ExportConfig(precision=precision, weight_only=WeightOnlyConfig(decode="call"))
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    loaded = tf.saved_model.load(artifact.path)
    variables = loaded.signatures["serving_default"].variables
    assert sum(variable.numpy().nbytes for variable in variables) <= 256 * 512 * 2
    assert artifact.bytes_on_disk < 256 * 512 * 2.2
    receipt = verify(artifact.path, seconds=0.01)
    assert receipt.ok
    assert receipt.weight_count == 256 * 512


def test_rows_of_a_table_are_never_decoded_as_a_whole(words):
    graph = freeze(words)
    for precision in WEIGHT_ONLY:
        encoded, _ = encode_weights(graph, precision, WeightOnlyConfig())
        gathers = [node for node in encoded.graph_def.node if node.op == "GatherV2"]
        kinds = {tf.as_dtype(node.attr["Tparams"].type).name for node in gathers}
        assert kinds & {"int8", "float16", "bfloat16"}


def test_what_stays_float32_is_listed(images):
    config = WeightOnlyConfig(exclude=("*/hidden/*",), minimum_size=100)
    _, report = encode_weights(freeze(images), "int8_weight_only", config)
    assert [skip.reason for skip in report.skipped] == ["excluded by the configuration"]
    with pytest.raises(ConfigError, match="matches none"):
        encode_weights(freeze(images), "int8_weight_only", WeightOnlyConfig(exclude=("nothing",)))


@pytest.mark.parametrize(
    ("value", "precision", "reason"),
    [(np.nan, "int4_weight_only", "NaN"), (1e5, "float16", "exceed"), (1e-8, "float16", "below")],
)
def test_values_that_do_not_fit(value, precision, reason):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(32)])
    model.layers[0].kernel.assign(np.full((64, 32), value))
    _, report = encode_weights(freeze(model), precision, WeightOnlyConfig())
    assert report.changed == []
    with pytest.warns(TfoptWarning, match=reason):
        report.warn_if_unchanged()


@pytest.mark.parametrize("factor", [2.0**-95, 2.0**80])
def test_four_bits_suit_weights_whose_squares_are_no_float32(factor):
    matrix = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    usual, other = (
        quantize_matrix(each, bits=4, group_size=16, channel_axis=1) for each in (matrix, matrix * np.float32(factor))
    )
    np.testing.assert_array_equal(other.steps, usual.steps)


def test_exported_anew(tmp_path):
    """Half precision is a float model; what is quantized is not exported anew."""
    model = keras.Sequential([keras.Input((64,), name="x"), layers.Dense(32)])
    x = GENERATOR.normal(size=(8, 64)).astype("float32")
    export(model, tmp_path / "half", ExportConfig(precision="float16"))
    export(tmp_path / "half", tmp_path / "full")
    np.testing.assert_allclose(freeze(tmp_path / "full").predict(x)["output_0"], np.asarray(model(x)), atol=1e-2)
    export(model, tmp_path / "int4", ExportConfig(precision="int4_weight_only"))
    with pytest.raises(ConfigError, match="whose precision is int4_weight_only"):
        export(tmp_path / "int4", tmp_path / "again")
    with pytest.raises(ConfigError, match="QuantizedModel is exported in int8"):
        export(quantize(model, calibration_data=x), tmp_path / "b", ExportConfig(precision="float16"))


@pytest.mark.slow
def test_pruned_weights_stay_zero(tmp_path):
    model = keras.Sequential([keras.Input((64,), name="x"), layers.Dense(64)])
    kernel = model.layers[0].kernel
    kernel.assign(kernel.numpy() * (np.arange(64 * 64).reshape(64, 64) % 4 == 0))
    for precision in ("bfloat16", "int4_weight_only"):
        export(model, tmp_path / precision, ExportConfig(precision=precision))
        with SavedModelProcess(tmp_path / precision) as process:
            counted = process.count_weights()
        assert counted["weights"] == 64 * 64
        assert counted["zeros"] >= 0.75 * 64 * 64


def test_what_keras_quantized_stays_small(tmp_path):
    """Folding its constants would decode them."""
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(256), layers.Dense(256)])
    model.quantize("int4")
    x = GENERATOR.normal(size=(4, 256)).astype("float32")
    artifact = export(model, tmp_path / "a", calibration_data=x)
    assert artifact.bytes_on_disk < 256 * 256 * 2
    outputs = tf.saved_model.load(artifact.path).signatures["serving_default"](x=tf.constant(x))["output_0"]
    np.testing.assert_allclose(outputs, np.asarray(model(x)), atol=1e-5)


def test_weights_below_the_minimum_size_are_listed_with_the_remedy():
    inputs = keras.Input((8,))
    graph = freeze(keras.Model(inputs, layers.Dense(3)(layers.Dense(20, activation="relu")(inputs))))
    _, report = encode_weights(graph, "int8_weight_only", WeightOnlyConfig())
    with pytest.warns(TfoptWarning, match="changed nothing: fewer values than minimum_size=1024: lower minimum_size"):
        report.warn_if_unchanged()
    assert [skip.kind for skip in report.skipped] == ["MatMul", "MatMul"]  # and no bias
    _, report = encode_weights(graph, "int8_weight_only", WeightOnlyConfig(minimum_size=100))
    assert (len(report.changed), len(report.skipped)) == (1, 1)
    _, report = encode_weights(graph, "float16", WeightOnlyConfig(minimum_size=60))
    assert (len(report.changed), report.skipped) == (2, [])
