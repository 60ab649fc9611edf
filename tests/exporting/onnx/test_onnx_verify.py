"""ONNX artifacts are measured in a process that has only ONNX Runtime."""

import json

import keras
import numpy as np
import onnx
import pytest
from keras import layers, ops

from tfopt.atomic.checked_json import with_checksum
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export, export_formats, verify
from tfopt.exporting.manifest import FileRecord, read_manifest
from tfopt.exporting.verification.process import runs
from tfopt.hardware import detect

X = np.random.default_rng(0).normal(size=(32, 12, 12, 3)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 5, 32)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A float32 SavedModel, and the same model as ONNX in float32 and int8."""
    keras.utils.set_random_seed(0)
    directory = tmp_path_factory.mktemp("onnx")
    inputs = keras.Input((12, 12, 3), name="image")
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.Conv2D(8, 3, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))
    model.save(directory / "model.keras")
    export(model, directory / "saved_model")
    export(model, directory / "float32", ExportConfig(format="onnx"))
    config = ExportConfig(format="onnx", precision="int8")
    export(model, directory / "int8", config, calibration_data=X[:16], baseline=directory / "saved_model")
    return directory


def test_the_receipt_is_that_of_onnx_runtime(artifacts):
    receipt = verify(artifacts / "int8", data=(X, LABELS), seconds=0, batch_size=4)
    assert receipt.ok, receipt.problems
    assert receipt.runtime.startswith("ONNX Runtime ")
    assert receipt.rows()["device"].endswith(receipt.runtime)
    assert receipt.kernels["QLinearConv"] == 2
    assert receipt.computes == "int8"  # all of it
    assert receipt.weight_count == 3 * 3 * 3 * 8 + 3 * 3 * 8 * 8 + 8 * 8 * 8 * 5
    assert receipt.baseline.endswith("saved_model")  # another runtime
    assert receipt.agreement >= 0.9
    assert 0 < receipt.parity_relative_error < 0.1
    assert receipt.speedup > 0
    assert None not in (receipt.load_ms, receipt.first_call_ms, receipt.memory_peak_bytes)
    assert receipt.latency_ms_median > 0


def test_a_float_file_computes_the_model_to_rounding(artifacts):
    receipt = verify(artifacts / "float32", seconds=0)
    assert receipt.ok
    assert receipt.parity_relative_error < 1e-5
    assert receipt.computes == "float32"


def test_threads_are_those_that_are_asked_for(artifacts):
    receipt = verify(artifacts / "float32", seconds=0, threads=(1, 2))
    if detect().logical_cores > 1:
        assert receipt.serving.calls[0].threads == (1, 2)


def test_a_file_that_has_changed_is_refused(artifacts, tmp_path):
    copy = tmp_path / "copy"
    export(str(artifacts / "model.keras"), copy, ExportConfig(format="onnx"))
    data = bytearray((copy / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.onnx").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.onnx, which has changed"):
        verify(copy)


def test_weights_in_another_file_are_refused(artifacts, tmp_path):
    copy = tmp_path / "copy"
    export(str(artifacts / "model.keras"), copy, ExportConfig(format="onnx"))
    model = onnx.load(copy / "model.onnx")
    outside = model.graph.initializer[0]
    outside.ClearField("raw_data")
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../../../etc/passwd")
    (copy / "model.onnx").write_bytes(model.SerializeToString())
    _accept(copy)
    with pytest.raises(ArtifactError, match="its weights must be in the file itself"):
        verify(copy)


def _accept(directory):
    """Makes the manifest that of the files as they are, as a stranger would who sends a bad artifact."""
    manifest = read_manifest(directory).to_dict()
    manifest["files"]["model.onnx"] = FileRecord.of(directory / "model.onnx").to_dict()
    (directory / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


@pytest.mark.slow
def test_the_commands_write_and_measure_it(artifacts, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["export", str(artifacts / "model.keras"), out, "--format", "onnx", "--precision", "float16"]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["runtime"].startswith("ONNX Runtime")
    assert receipt["precision"] == "float16"


def test_several_formats_share_one_calibration(artifacts, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=X[:16])
    words = [
        "export",
        str(artifacts / "model.keras"),
        str(tmp_path / "out"),
        "--precision",
        "int8",
        "--int8-nodes",
        "all",
    ]
    words += ["--formats", "saved_model", "onnx", "--calibration-data", str(tmp_path / "x.npz"), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["saved_model", "onnx"]
    outputs = []
    for name, artifact in found.items():
        assert artifact["path"] == str(tmp_path / "out" / name)
        assert read_manifest(tmp_path / "out" / name).model_format == name
        with runs(artifact["path"])(artifact["path"]) as process:
            outputs.append(process.predict({"image": X})["output_0"])
    np.testing.assert_allclose(*outputs, atol=0.02)
    assert (outputs[0].argmax(-1) == outputs[1].argmax(-1)).all()


def test_settings_of_one_format_are_left_out_for_the_others_and_a_precision_of_one_is_refused(artifacts, tmp_path):
    model = str(artifacts / "model.keras")
    found = export_formats(model, tmp_path / "a", ("saved_model", "onnx"), ExportConfig(weights_in="constants"))
    assert list(found) == ["saved_model", "onnx"]
    with pytest.raises(ConfigError, match=r"precision must be one of float32, .* with format='onnx'"):
        export_formats(model, tmp_path / "b", ("saved_model", "onnx"), ExportConfig(precision="bfloat16"))
    for formats, told in {
        ("saved_model", "torch"): "Unknown format 'torch'. Expected one of",
        "onnx": r"formats must be a list of formats. Received: formats='onnx'. Pass \['onnx'\]",
        (): "formats must be",
    }.items():
        with pytest.raises(ConfigError, match=told):
            export_formats(model, tmp_path / "b", formats)
    assert not (tmp_path / "b").exists()


def test_formats_before_one_that_is_refused_stay_and_a_fixed_batch_of_keras_is_open(tmp_path):
    inputs = keras.Input((3, 3), name="matrix", batch_size=2)
    model = keras.Model(inputs, ops.qr(inputs)[1])
    with pytest.raises(UnsupportedModelError, match=r"must have an equivalent there.*Qr"):
        export_formats(model, tmp_path, ("saved_model", "onnx", "openvino"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved_model"]
    assert verify(tmp_path / "saved_model", seconds=0).ok
    assert read_manifest(tmp_path / "saved_model").signature.inputs["matrix"].shape == (None, 3, 3)


@pytest.mark.slow
def test_a_file_gives_several_inputs_by_their_names(tmp_path, capsys):
    inputs = [keras.Input((6,), name="image"), keras.Input((2,), name="meta-data")]
    hidden = layers.Dense(32, activation="relu")(layers.Concatenate()(inputs))
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    model.save(tmp_path / "model.keras")
    random = np.random.default_rng(0)
    data = {"image": random.random((48, 6), np.float32), "meta-data": random.random((48, 2), np.float32)}
    labels = np.asarray(model(list(data.values()))).argmax(-1)
    np.savez(tmp_path / "data.npz", y=labels, **data)
    file, out = str(tmp_path / "data.npz"), str(tmp_path / "out")
    words = ["export", str(tmp_path / "model.keras"), out, "--format", "onnx", "--precision", "int8"]
    assert main([*words, "--calibration-data", file]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--data", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9
