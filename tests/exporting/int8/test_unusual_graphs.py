"""SavedModels as they come: other types and open sizes work, or are left as they are and listed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import TfoptWarning, UnsupportedModelError
from tfopt.exporting import ExportConfig, SavedModelProcess, export

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_float64_stays_float64(precision, tmp_path):
    """What computes in float64 is not quantized, and what computes in float32 beside it is."""
    wide, narrow = GENERATOR.normal(size=(64, 32)), GENERATOR.normal(size=(32, 64)).astype("float32")
    x = GENERATOR.normal(size=(16, 64))
    serve = tf.function(lambda x: {"y": tf.cast(tf.nn.relu(x @ wide), tf.float32) @ narrow})
    function = serve.get_concrete_function(tf.TensorSpec([None, 64], tf.float64, "x"))
    tf.saved_model.save(tf.Module(), str(tmp_path / "source"), signatures=function)
    artifact = export(
        tmp_path / "source", tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=x
    )
    with SavedModelProcess(artifact.path) as process:
        outputs = process.predict({"x": x})["y"]
        kernels = process.loaded["kernels"]
        assert process.loaded["inputs"]["x"]["dtype"] == "float64"
    expected = np.maximum(x @ wide, 0) @ narrow
    limit = 1e-6 if precision == "float32" else 0.02
    assert np.linalg.norm(outputs - expected) < limit * np.linalg.norm(expected)
    if precision == "int8":
        assert [skip.reason for skip in artifact.report.skipped] == ["its weights are float64, not float32"]
        assert (kernels["MatMul"], kernels["_QuantizedMatMul"]) == (1, 1)


def test_float64_alone_is_exported_as_it_is(tmp_path):
    weights = GENERATOR.normal(size=(64, 32))
    x = GENERATOR.normal(size=(4, 64))
    function = tf.function(lambda x: {"y": x @ weights}).get_concrete_function(
        tf.TensorSpec([None, 64], tf.float64, "x")
    )
    tf.saved_model.save(tf.Module(), str(tmp_path / "source"), signatures=function)
    for precision in ("int8", "int4_weight_only"):
        with pytest.warns(TfoptWarning, match="changed nothing"):
            export(
                tmp_path / "source",
                tmp_path / precision,
                ExportConfig(precision=precision, int8_nodes="all"),
                calibration_data=x,
            )
        outputs = tf.saved_model.load(str(tmp_path / precision)).signatures
        np.testing.assert_allclose(outputs["serving_default"](x=tf.constant(x))["y"], x @ weights, rtol=1e-12)


def test_a_signature_without_inputs(tmp_path):
    function = tf.function(lambda: {"y": tf.ones([2, 3]) @ tf.ones([3, 4])}).get_concrete_function()
    tf.saved_model.save(tf.Module(), str(tmp_path / "source"), signatures=function)
    export(tmp_path / "source", tmp_path / "float32")
    with pytest.raises(UnsupportedModelError, match="must have an input to be quantized"):
        export(tmp_path / "source", tmp_path / "a", ExportConfig(precision="int8"), calibration_data=np.zeros((4, 3)))
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int8_weight_only"])
def test_images_of_any_size(precision, tmp_path):
    model = keras.Sequential(
        [
            keras.Input((None, None, 3), name="image"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    artifact = export(
        model,
        tmp_path / "a",
        ExportConfig(precision=precision, int8_nodes="all"),
        calibration_data=GENERATOR.random((8, 20, 24, 3), dtype="float32"),
    )
    with SavedModelProcess(artifact.path) as process:
        for size in ((20, 24), (33, 17)):
            x = GENERATOR.random((3, *size, 3), dtype="float32")
            outputs, expected = process.predict({"image": x})["output_0"], np.asarray(model(x))
            assert np.linalg.norm(outputs - expected) < 0.05 * np.linalg.norm(expected)
