"""Artifacts that compute in half precision: what is written, refused and measured."""

import json
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ArtifactError, ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.half import choice
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.verification.measured import remedy
from tfopt.hardware import Gpu, Hardware, multiplies_bfloat16
from tfopt.quantization import quantize

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
    np.testing.assert_allclose(found, images.predict(X, verbose=0), atol=0.02)


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
    with pytest.raises(ConfigError, match="compute='bfloat16' belongs to precision='float32' or 'bfloat16'"):
        ExportConfig(compute="bfloat16", precision="int8")
    with pytest.raises(ConfigError, match="Received: precision='bfloat16'"):
        ExportConfig(compute="float16", precision="bfloat16")
    with pytest.raises(ConfigError, match="compute in int8 or float32"):
        export(quantize(images, calibration_data=X), tmp_path / "int8", ExportConfig(compute="bfloat16"))
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
