"""Artifacts that compute in half precision: what is written, refused and measured."""

import json
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.compat.tensorflow import uses_onednn
from tfopt.errors import ArtifactError, ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, lowering, verify
from tfopt.exporting.half import choice
from tfopt.exporting.half.rewrite import compute_in_half
from tfopt.exporting.int8.selection import stay_float
from tfopt.exporting.lowering import lower
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.verification.measured import remedy
from tfopt.graph import fold_constants, freeze
from tfopt.hardware import Gpu, Hardware, multiplies_bfloat16, writes_bfloat16
from tfopt.quantization import QuantizationConfig, quantize

X = np.random.default_rng(0).random((8, 12, 12, 3), np.float32)


@pytest.fixture(scope="module")
def images():
    return keras.Sequential(
        [
            keras.Input((12, 12, 3), name="image"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="scores"),
        ],
        name="images",
    )


@pytest.fixture(scope="module")
def bfloat16(images, tmp_path_factory):
    config = ExportConfig(compute="bfloat16", xla_signature=True)
    return export(images, tmp_path_factory.mktemp("half") / "bfloat16", config, calibration_data=X)


def test_a_fresh_process_without_tfopt_computes_it_and_the_receipt_says_what_it_needs(images, bfloat16):
    receipt = verify(bfloat16.path, seconds=0)
    assert receipt.ok, receipt.problems
    assert receipt.computes == "bfloat16"
    assert 0 < receipt.parity_relative_error < 0.02
    assert any(note.startswith("machine: bfloat16 products") and "AVX512_BF16" in note for note in receipt.notes)
    manifest = json.loads(Path(bfloat16.path, "manifest.json").read_text())
    assert (manifest["compute"], manifest["precision"]) == ("bfloat16", "float32")
    assert "AMX" in manifest["requires"]
    with SavedModelProcess(bfloat16.path) as process:
        (found,) = process.predict({"image": X}).values()
        assert process.loaded["imported"] == []
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.asarray(images(X)), atol=0.02)


def test_the_products_of_the_file_are_half_and_its_weights_stored_so(bfloat16):
    serve = tf.saved_model.load(bfloat16.path).signatures["serving_default"]
    types = {
        node.op: tf.as_dtype(node.attr["T"].type)
        for function in serve.graph.as_graph_def().library.function
        for node in function.node_def
        if node.attr["T"].type
    }
    assert (types["Conv2D"], types["MatMul"], types["Mean"]) == (tf.bfloat16, tf.bfloat16, tf.float32)


def test_an_overflow_of_float16_is_refused_with_its_node(images, tmp_path):
    loud = keras.models.clone_model(images)
    loud.layers[0].kernel.assign(np.full((3, 3, 3, 16), 1e4))
    loud.layers[-1].kernel.assign(np.full((16, 4), 1e-3))
    with pytest.raises(
        ConfigError, match=r"'images[^']*conv2d[^']*' \(Conv2D\) exceeds 65,504. Use compute='bfloat16'"
    ):
        export(loud, tmp_path / "refused", ExportConfig(compute="float16"), calibration_data=X)
    assert not (tmp_path / "refused").exists()
    # The values are hidden behind a sigmoid, and the outputs are finite.
    bounded = keras.Sequential([keras.Input((12, 12, 3)), loud, layers.Activation("sigmoid")])
    with pytest.raises(ConfigError, match="exceeds 65,504"):
        export(bounded, tmp_path / "refused", ExportConfig(compute="float16"), calibration_data=X)


def test_settings_that_contradict_each_other_are_refused(images, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="compute='bfloat16' belongs to precision='float32', 'bfloat16' or 'int8'"):
        ExportConfig(compute="bfloat16", precision="int8_weight_only")
    with pytest.raises(ConfigError, match="Received: precision='bfloat16'"):
        ExportConfig(compute="float16", precision="bfloat16")
    with pytest.raises(ConfigError, match="Received: precision='int8'"):
        ExportConfig(compute="float16", precision="int8")
    quantized = quantize(images, calibration_data=X)
    with pytest.raises(ConfigError, match="compute in int8, bfloat16 or float32"):
        export(quantized, tmp_path / "int8", ExportConfig(compute="float16"))
    with pytest.raises(ConfigError, match="float_weights must be 'float32' where products compute in bfloat16"):
        export(quantized, tmp_path / "int8", ExportConfig(compute="bfloat16", float_weights="int8"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(ConfigError, match="ends a process that multiplies bfloat16"):
        export(images, tmp_path / "avx2", ExportConfig(compute="bfloat16"))


def test_an_artifact_with_rounded_weights_is_exported_again_with_a_warning(bfloat16, tmp_path):
    assert bfloat16.computes == "bfloat16"
    with pytest.warns(TfoptWarning, match="computes in bfloat16, so its weights are rounded to it already"):
        again = export(bfloat16.path, tmp_path / "again")
    assert again.computes == "float32"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"precision": "int8"}, "Calibrate on other data"),
        ({"compute": "float16"}, "compute='bfloat16'"),
        ({"compute": "bfloat16"}, "Export with compute='float32'"),
        ({"precision": "int4_weight_only"}, "Store the weights in more bits"),
    ],
)
def test_the_remedy_for_inexact_outputs_is_that_of_the_precision(settings, advice, bfloat16):
    manifest = read_manifest(Path(bfloat16.path))
    assert advice in remedy(replace(manifest, **{"precision": "float32", "compute": "float32", **settings}))


def test_verify_refuses_to_run_what_would_end_the_process(bfloat16, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(ArtifactError, match="must be able to multiply bfloat16"):
        verify(bfloat16.path, seconds=0)


@pytest.mark.parametrize(
    ("ratios", "multiplies", "chosen", "reason"),
    [
        ([0.7, 0.5], True, "bfloat16", "takes 0.70x at batch size 1 and 0.50x at batch size 8"),
        ([1.1, 0.5], True, "float32", "takes 1.10x at batch size 1"),
        ([0.7, 0.5], False, "float32", "does not multiply bfloat16"),
    ],
)
def test_auto_asks_the_machine_and_the_clock(images, tmp_path, monkeypatch, ratios, multiplies, chosen, reason):
    monkeypatch.setattr(choice, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(choice, "time_ratios", lambda single, graphs, feeds: [ratios])
    artifact = export(images, tmp_path / "auto", ExportConfig(compute="auto"))
    (step,) = artifact.report.steps
    assert step.detail.startswith(f"{chosen}: ")
    assert reason in step.detail
    manifest = json.loads((tmp_path / "auto" / "manifest.json").read_text())
    assert manifest["compute"] == chosen


def test_the_machine_multiplies_what_its_instructions_and_the_limit_leave(monkeypatch):
    monkeypatch.setenv("TFOPT_PRETEND_HARDWARE", "amx")
    assert multiplies_bfloat16()
    for limit, left in (("AVX512_CORE", False), ("AVX512_CORE_BF16", True), ("AVX2", False), ("ALL", True)):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert multiplies_bfloat16() is left
    monkeypatch.setenv("TFOPT_PRETEND_HARDWARE", "vnni")
    assert not multiplies_bfloat16()


def test_a_gpu_multiplies_what_its_tensor_cores_do():
    def machine(capability):
        gpus = (Gpu(name="GPU", compute_capability=capability),)
        return Hardware(logical_cores=2, memory_bytes=1, tensorflow_version="2.21.0", gpus=gpus)

    assert choice._drawback("bfloat16", machine((8, 0))) == choice._drawback("float16", machine((7, 5))) == ""
    assert "no bfloat16 tensor cores" in choice._drawback("bfloat16", machine((7, 5)))


def test_both_the_products_and_the_other_weights_are_stored_in_half(tmp_path):
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Add()([layers.Embedding(300, 16)(tokens), layers.Embedding(300, 16)(tokens)])
    words = keras.Model(tokens, layers.Dense(200)(layers.LayerNormalization()(x)))
    both = ExportConfig(compute="bfloat16", precision="bfloat16")
    artifact = export(words, tmp_path / "both", both)
    assert [change.kind for change in artifact.report.changed] == ["MatMul"]
    assert sum("stored in bfloat16" in step.detail for step in artifact.report.steps) == 2
    assert verify(artifact.path, seconds=0).computes == "bfloat16"


def test_swish_between_products_needs_no_conversion():
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="swish")(inputs)
    network = freeze(keras.Model(inputs, layers.Conv2D(4, 3)(x)))
    half, report = compute_in_half(fold_constants(network), "bfloat16")
    assert report.metrics["conversions"] == 2  # of the input and of the output
    (exact,), (found,) = network.predict(X).values(), half.predict(X).values()
    np.testing.assert_allclose(found, exact, atol=2**-5 * np.abs(exact).max())


TOKENS = np.random.default_rng(1).normal(size=(32, 16, 32)).astype("float32")


def attention_model():
    inputs = keras.Input((16, 32), name="tokens")
    x = layers.MultiHeadAttention(2, 16)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(8, name="scores")(x))


@pytest.fixture(scope="module")
def attention():
    return quantize(attention_model(), calibration_data=TOKENS)


def test_what_int8_leaves_in_float32_computes_in_bfloat16(attention, tmp_path):
    tokens = np.random.default_rng(2).normal(size=(8, 16, 32)).astype("float32")
    int8, config = ExportConfig(int8_nodes="all"), ExportConfig(int8_nodes="all", compute="bfloat16")
    artifact = export(attention, tmp_path / "both", config)
    products = [step for step in artifact.report.steps if step.detail == "bfloat16"]
    assert [step.kind for step in products] == ["BatchMatMulV2, not in int8"] * 2
    receipt = verify(artifact.path, seconds=0)
    assert receipt.ok, receipt.problems
    assert receipt.computes == "int8 in 5 of 7 products, and bfloat16"
    # Softmax and the result; kernels write queries, keys and values where they can.
    assert artifact.report.metrics["conversions"] == (3 if writes_bfloat16() else 6)
    manifest = json.loads(Path(artifact.path, "manifest.json").read_text())
    assert (manifest["compute"], manifest["precision"]) == ("bfloat16", "int8")
    assert "int8 kernels" in manifest["requires"]
    assert "AMX or AVX512_BF16" in manifest["requires"]
    assert ("AVX512 for int8 kernels that write bfloat16" in manifest["requires"]) is writes_bfloat16()
    alone, both = (
        next(iter(lower(attention, each, None, None).graphs["serving_default"].predict(tokens).values()))
        for each in (int8, config)
    )
    distance = np.linalg.norm(both - alone) / np.linalg.norm(alone)
    assert 0 < distance < 0.05  # the last product rounds to int8, so what is rounded to 8 bits can be a whole step off


@pytest.mark.skipif(not uses_onednn(), reason="without oneDNN, TensorFlow cuts products in bfloat16 off")
def test_int8_kernels_write_bfloat16_for_a_product_and_it_rounds_once():
    inputs = keras.Input((6, 32), name="tokens")
    left, right = (layers.Dense(16, name=name)(inputs) for name in ("left", "right"))
    tokens = np.random.default_rng(3).normal(size=(8, 6, 32)).astype("float32")
    scores = keras.Model(inputs, keras.ops.matmul(left, keras.ops.transpose(right, (0, 2, 1))))
    quantized = quantize(scores, calibration_data=tokens)
    int8 = lower(quantized, ExportConfig(int8_nodes="all"), None, None).graphs["serving_default"]
    both, report = compute_in_half(int8, "bfloat16")
    assert report.metrics["conversions"] == (1 if writes_bfloat16() else 3)  # the output, and what the kernels write
    kernels = [
        next(node.name for node in int8.graph_def.node if node.op == "_QuantizedMatMul" and name in node.name)
        for name in ("left", "right")
    ]
    read = int8.as_function(fetch=kernels)(**int8.feed(tokens))
    first, second = (tf.cast(tf.cast(value, tf.bfloat16), tf.float32).numpy().reshape(8, 6, 16) for value in read)
    (found,) = both.predict(tokens).values()
    np.testing.assert_allclose(found, first @ second.transpose(0, 2, 1), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("ratios", "chosen"), [([0.9, 0.85], "bfloat16"), ([1.1, 0.5], "float32")])
def test_auto_times_int8_with_and_without_bfloat16(attention, monkeypatch, ratios, chosen):
    monkeypatch.setattr(choice, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(choice, "time_ratios", lambda single, graphs, feeds: [ratios])
    lowered = lower(attention, ExportConfig(int8_nodes="all", compute="auto"), None, None)
    assert (lowered.precision, lowered.compute) == ("int8", chosen)
    (step,) = [step for step in lowered.report.steps if step.kind == choice.CHOICE]
    assert f"{ratios[0]:.2f}x at batch size 1" in step.detail
    stored = lower(attention, ExportConfig(int8_nodes="all", compute="auto", float_weights="int8"), None, None)
    assert stored.compute == "float32"


def test_where_int8_does_not_pay_all_products_compute_in_bfloat16(attention, monkeypatch):
    monkeypatch.setattr(
        lowering, "select_int8", lambda model, feeds, stored: (stay_float(model, model, {1: 1.5}), None)
    )
    with pytest.warns(TfoptWarning, match="1.50x at batch size 1"):
        lowered = lower(attention, ExportConfig(compute="bfloat16"), None, None)
    assert (lowered.precision, lowered.compute) == ("float32", "bfloat16")


@pytest.mark.parametrize("scale", [1e-6, 1e-8])
def test_weights_that_are_too_small_for_float16_stay_in_float32(scale, tmp_path):
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(16, use_bias=False),
            layers.LayerNormalization(epsilon=1e-20),
            layers.Dense(4),
        ]
    )
    model.layers[0].kernel.assign(scale * np.random.default_rng(1).normal(size=(16, 16)))
    artifact = export(
        model, tmp_path / "a", ExportConfig(compute="float16"), calibration_data=X[:, 0, :16, 0].repeat(2, 1)[:, :16]
    )
    assert [skip.reason for skip in artifact.report.skipped] == ["its constants are below the range of float16"]
    assert len(artifact.report.changed) == 1
    assert verify(artifact.path, seconds=0).parity_relative_error < 0.01


def test_inputs_that_are_too_small_for_float16_are_told(tmp_path):
    x = 1e-7 * np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(16, use_bias=False),
            layers.LayerNormalization(epsilon=1e-20),
            layers.Dense(4),
        ]
    )
    with pytest.warns(TfoptWarning, match=r"changes the outputs by \d+\.\d% of their scale.*Use compute='bfloat16'"):
        export(model, tmp_path / "a", ExportConfig(compute="float16"), calibration_data=x)


def test_products_that_the_quantization_leaves_in_float_stay_in_float32(attention):
    excluded = QuantizationConfig(exclude=("*scores*",))
    model = quantize(attention_model(), excluded, calibration_data=TOKENS)
    lowered = lower(model, ExportConfig(int8_nodes="all", compute="bfloat16"), None, None)
    (head,) = [step for step in lowered.report.steps if "scores" in step.name]
    assert head.detail == "float32: the quantization leaves it in float"
    products = [node for node in lowered.graphs["serving_default"].graph_def.node if node.op == "MatMul"]
    assert [tf.as_dtype(node.attr["T"].type) for node in products] == [tf.float32]


def test_the_float_signature_is_float32_where_all_products_compute_in_bfloat16(attention, monkeypatch):
    monkeypatch.setattr(
        lowering, "select_int8", lambda model, feeds, stored: (stay_float(model, model, {1: 1.5}), None)
    )
    with pytest.warns(TfoptWarning):
        lowered = lower(attention, ExportConfig(compute="bfloat16", float_fallback=True, precision="int8"), None, None)
    half = tf.bfloat16.as_datatype_enum
    of = {name: {each.attr["T"].type for each in graph.graph_def.node} for name, graph in lowered.graphs.items()}
    assert half in of["serving_default"]
    assert half not in of["serving_float"]
