"""LiteRT artifacts are measured in a process that has only LiteRT."""

import json

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.cli import main
from tfopt.errors import ArtifactError
from tfopt.exporting import ExportConfig, export, verify
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.verification.process import RuntimeProcess

X = np.random.default_rng(0).normal(size=(32, 12, 12, 3)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 5, 32)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A model, and its artifact in LiteRT's int8."""
    keras.utils.set_random_seed(0)
    directory = tmp_path_factory.mktemp("litert")
    inputs = keras.Input((12, 12, 3), name="image")
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.Conv2D(8, 3, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))
    model.save(directory / "model.keras")
    config = ExportConfig(format="litert", precision="int8")
    export(model, directory / "int8", config, calibration_data=X[:16])
    return directory


def test_the_receipt_is_that_of_litert(artifacts):
    receipt = verify(artifacts / "int8", data=(X, LABELS), seconds=0, batch_size=4)
    assert receipt.ok, receipt.problems
    assert receipt.runtime.startswith("LiteRT 2.")
    assert receipt.kernels["CONV_2D_INT8"] == 2
    assert receipt.kernels["FULLY_CONNECTED_INT8"] == 1
    assert receipt.computes == "int8"  # all of it
    assert receipt.weight_count == 3 * 3 * 3 * 8 + 3 * 3 * 8 * 8 + 8 * 8 * 8 * 5
    assert receipt.accuracy is not None
    assert 0 < receipt.parity_relative_error < 0.1
    assert None not in (receipt.load_ms, receipt.first_call_ms, receipt.memory_peak_bytes)


def test_no_processor_saturates(artifacts):
    manifest = read_manifest(artifacts / "int8")
    assert not manifest.needs_vnni
    assert manifest.requires == "LiteRT"


def test_several_callers_compute_at_once_and_other_sizes_are_refused(artifacts):
    with RuntimeProcess(artifacts / "int8") as process:
        assert process.calls_per_second({"image": X[:1]}, 0.05, callers=3) > 0
        whole = process.predict({"image": X}, batch_size=5)["output_0"]
        np.testing.assert_array_equal(whole, process.predict({"image": X}, batch_size=32)["output_0"])
        with pytest.raises(ArtifactError, match="cannot be served"):
            process.predict({"image": X[:, :10]})


def test_an_open_size_of_1_may_be_too_small(tmp_path):
    """The file stores open sizes as 1; this convolution, as in MobileNetV3, then has nothing to compute."""
    inputs = keras.Input((None, None, 3), name="image")
    x = layers.DepthwiseConv2D(3, strides=2)(layers.ZeroPadding2D(((0, 1), (0, 1)))(inputs))
    model = keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 1)(x)))
    export(model, tmp_path / "a", ExportConfig(format="litert"))
    with RuntimeProcess(tmp_path / "a") as process:
        for x in (X, X[:5, :9, :7]):
            np.testing.assert_allclose(process.predict({"image": x})["output_0"], model(x), atol=1e-5)


def test_the_commands_write_and_measure_it_and_refuse_a_flipped_bit(artifacts, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--format", "litert", "--precision", "float16"]
    assert main(["export", str(artifacts / "model.keras"), str(out), *words]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["runtime"].startswith("LiteRT")
    assert receipt["parity_relative_error"] < 1e-2
    data = bytearray((out / "model.tflite").read_bytes())
    data[len(data) // 2] ^= 1
    (out / "model.tflite").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.tflite, which has changed"):
        verify(out)
