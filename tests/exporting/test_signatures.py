"""Several signatures in one SavedModel: which serves where kernels are missing, and what it costs on disk."""

import hashlib
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

from tfopt.atomic.checked_json import with_checksum
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.verification.tensorflow_only import count_kernels, load_signature

X = np.random.default_rng(0).normal(size=(16, 8, 8, 16)).astype("float32")


@pytest.fixture(scope="module")
def model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 16), name="image"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.DepthwiseConv2D(3, activation="relu"),
            layers.Conv2D(64, 3),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(4),
        ]
    )


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("signatures")
    config = ExportConfig(precision="int8", int8_nodes="all", float_fallback=True, xla_signature=True)
    export(model, root / "all", config, calibration_data=X)
    export(model, root / "int8", ExportConfig(precision="int8", int8_nodes="all"), calibration_data=X)
    return root


def without_kernels(artifact, *, op_is_known=True):
    """Changes an artifact so that TensorFlow has no kernel for its int8 convolutions, as on another processor.

    Args:
        op_is_known: Whether TensorFlow has the op at least; a build without oneDNN has not.
    """
    path = artifact / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    changed = 0
    for function in saved.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.op == "_FusedQuantizedConv2D":
                if op_is_known:
                    node.attr["_kernel"].s = b"of another processor"  # a label that no kernel is registered under
                else:
                    node.op = "_ConvolutionOfAnotherBuild"
                changed += 1
    assert changed
    path.write_bytes(saved.SerializeToString())
    manifest = json.loads((artifact / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"]["saved_model.pb"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (artifact / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return artifact


@pytest.mark.slow
def test_the_float_signature_has_the_int8_weights(model, artifacts):
    with (
        SavedModelProcess(artifacts / "all") as int8,
        SavedModelProcess(artifacts / "all", "serving_float") as floating,
        SavedModelProcess(artifacts / "all", "serving_xla") as compiled,
    ):
        outputs = [process.predict({"image": X})["output_0"] for process in (int8, floating, compiled)]
        kernels = [process.loaded["kernels"] for process in (int8, floating)]
        weights = [process.count_weights()["weights"] for process in (int8, floating, compiled)]
    expected = np.asarray(model(X))
    errors = [np.linalg.norm(output - expected) / np.linalg.norm(expected) for output in outputs]
    assert errors[1] < errors[0] < 0.1
    np.testing.assert_allclose(outputs[2], outputs[1], atol=1e-4)
    assert kernels[0]["_FusedQuantizedConv2D"] == 2
    assert kernels[1] == {"Conv2D": 2, "DepthwiseConv2dNative": 1, "MatMul": 2}
    assert len(set(weights)) == 1


def bytes_of(artifact):
    files = [artifact / "saved_model.pb", *(artifact / "variables").glob("variables.data*")]
    return sum(file.stat().st_size for file in files)


def test_all_signatures_share_their_weights(model, artifacts):
    size = {name: bytes_of(artifacts / name) for name in ("all", "int8")}
    assert size["all"] < size["int8"] + 60_000  # the nodes of three functions, for 318,000 weights


def test_two_signatures_share_their_weights(model, tmp_path):
    export(model, tmp_path / "float32")
    export(model, tmp_path / "with_xla", ExportConfig(xla_signature=True))
    size = {name: bytes_of(tmp_path / name) for name in ("float32", "with_xla")}
    assert size["with_xla"] < size["float32"] + 60_000  # for 1,270,000 bytes of weights


def test_images_of_another_size_are_refused(artifacts):
    """Without the check, Flatten makes four rows of these two images, and the int8 kernels abort for the others."""
    for name, signature in (("int8", "serving_default"), ("all", "serving_float")):
        loaded = tf.saved_model.load(artifacts / name)  # keeps the variables alive
        serve = loaded.signatures[signature]
        for shape in ((2, 26, 8, 16), (2, 16, 8, 8)):
            # TensorFlow itself refuses some before the check of the artifact can.
            with pytest.raises((tf.errors.InvalidArgumentError, TypeError), match=r"image.*(\?,8,8,16|None, 8, 8, 16)"):
                serve(image=tf.ones(shape))


def test_xla_compiles_its_signature(artifacts):
    """What is compiled is marked so, and the mark survives saving."""
    saved = saved_model_pb2.SavedModel.FromString((artifacts / "all" / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    assert any(function.attr["_XlaMustCompile"].b for function in functions)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported operations"):
        _load_with_a_string_op_in_the_compiled_part(artifacts)


def _load_with_a_string_op_in_the_compiled_part(root):
    inner = tf.function(lambda x: tf.strings.to_number(tf.strings.as_string(x)), jit_compile=True)
    outer = tf.function(lambda x: {"y": inner(x)}).get_concrete_function(tf.TensorSpec([None], tf.float32, "x"))
    tf.saved_model.save(tf.Module(), str(root / "xla"), signatures=outer)
    tf.saved_model.load(str(root / "xla")).signatures["serving_default"](x=tf.ones([2]))


@pytest.mark.slow
@pytest.mark.parametrize(("op_is_known", "op"), [(True, "_FusedQuantizedConv2D"), (False, "_ConvolutionOfAnother")])
def test_without_the_kernels_the_float_signature_serves(op_is_known, op, artifacts, tmp_path):
    artifact = without_kernels(shutil.copytree(artifacts / "all", tmp_path / "a"), op_is_known=op_is_known)
    receipt = verify(artifact, seconds=0.01)
    assert receipt.ok
    assert receipt.signature == "serving_float"
    assert "signature serving_float" in str(receipt)
    with pytest.raises(ArtifactError, match=f"without {op}"):
        verify(artifact, seconds=0.01, signature="serving_default")


@pytest.mark.parametrize(("op_is_known", "op"), [(True, "_FusedQuantizedConv2D"), (False, "_ConvolutionOfAnother")])
def test_without_the_kernels_and_the_float_signature_the_error_names_them(op_is_known, op, artifacts, tmp_path):
    artifact = without_kernels(shutil.copytree(artifacts / "int8", tmp_path / "a"), op_is_known=op_is_known)
    with pytest.raises(ArtifactError, match=rf"oneDNN.*without {op}.*float_fallback=True"):
        verify(artifact, seconds=0.01)


def test_one_signature_loads_where_the_ops_of_another_are_unknown(model, artifacts, tmp_path):
    artifact = without_kernels(shutil.copytree(artifacts / "all", tmp_path / "a"), op_is_known=False)
    with pytest.raises(RuntimeError, match="_ConvolutionOfAnotherBuild"):
        tf.saved_model.load(str(artifact))
    expected = tf.saved_model.load(str(artifacts / "all")).signatures["serving_float"](image=X)["output_0"]
    serve = load_signature(artifact, "serving_float")
    np.testing.assert_array_equal(serve(image=X)["output_0"], expected)
    assert count_kernels(serve) == {"Conv2D": 2, "DepthwiseConv2dNative": 1, "MatMul": 2}
    with pytest.raises(RuntimeError, match="_ConvolutionOfAnotherBuild"):
        load_signature(artifact, "serving_default")
    with pytest.raises(ValueError, match="no signature 'nope', only "):
        load_signature(artifact, "nope")


@pytest.mark.slow
def test_onednn_switched_off_takes_no_int8_kernel_away(artifacts, monkeypatch):
    """TensorFlow's switch is for float kernels: those of int8 are registered without asking it."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    receipt = verify(artifacts / "all", seconds=0.01)
    assert receipt.ok
    assert receipt.signature == "serving_default"
    assert receipt.kernels["_FusedQuantizedConv2D"] == 2


def test_the_manifest_says_what_is_needed(artifacts):
    manifest = json.loads((artifacts / "all" / "manifest.json").read_text())
    assert manifest["signatures"] == ["serving_default", "serving_float", "serving_xla"]
    for word in ("oneDNN", "_FusedQuantizedConv2D", "_QuantizedMatMul", "'serving_float' needs TensorFlow only"):
        assert word in manifest["requires"]


def test_a_signature_that_is_not_there(artifacts):
    with pytest.raises(ConfigError, match=r"Unknown signature 'serving_float'. Expected one of: 'serving_default'"):
        verify(artifacts / "int8", signature="serving_float")


def test_a_fallback_belongs_to_int8():
    with pytest.raises(ConfigError, match="belongs to precision='int8'"):
        ExportConfig(precision="float16", float_fallback=True)
