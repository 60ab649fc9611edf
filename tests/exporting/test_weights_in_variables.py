"""Which weights an artifact holds in variables, and what of it can still be read as from constants."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.exporting import ExportConfig, SavedModelProcess, export
from tfopt.graph.source import freeze

TOKENS = np.random.default_rng(0).integers(0, 2000, (16, 12)).astype("int32")
DENSE, TABLE = 64 * 512 + 512 * 256, 2000 * 64


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((12,), dtype="int32", name="tokens")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(2000, 64)(tokens))
    x = layers.Dense(256, activation="relu")(layers.Dense(512, activation="relu")(x))
    return keras.Model(tokens, layers.Dense(3)(x))


def held(directory):
    return sum(int(np.prod(shape)) for _, shape in tf.train.list_variables(f"{directory}/variables/variables") if shape)


@pytest.mark.parametrize(
    ("settings", "in_variables"),
    [
        ({}, DENSE + TABLE),
        ({"weights_in": "constants"}, 0),
        ({"precision": "float16"}, TABLE),  # its matrices are decoded once, from constants
    ],
)
def test_weights_that_are_read_as_stored_are_in_variables(settings, in_variables, model, tmp_path):
    export(model, tmp_path / "a", ExportConfig(**settings))
    assert held(tmp_path / "a") == in_variables
    outputs = tf.saved_model.load(str(tmp_path / "a")).signatures["serving_default"](tokens=tf.constant(TOKENS))
    np.testing.assert_allclose(outputs["output_0"], np.asarray(model(TOKENS)), atol=2e-3)


def test_int8_weights_are_in_variables_and_can_be_read_again(model, tmp_path):
    """They are plain integers for TensorFlow's checkpoints and Keras' layers, and qint8 for the int8 kernels."""
    config = ExportConfig(precision="int8", int8_nodes="all")
    export(model, tmp_path / "int8", config, calibration_data=TOKENS)
    assert held(tmp_path / "int8") == DENSE + TABLE
    with SavedModelProcess(tmp_path / "int8") as process:
        served = process.predict({"tokens": TOKENS})["output_0"]
        assert process.count_weights()["weights"] == DENSE + 256 * 3
        cold = process.cold_start()
    assert cold["load_ms"] > 0
    assert cold["first_call_ms"] > 0
    assert cold["memory_peak_bytes"] is None or 1e8 < cold["memory_peak_bytes"] < 1e11
    np.testing.assert_array_equal(freeze(tmp_path / "int8").predict(TOKENS)["output_0"], served)
    layer = keras.layers.TFSMLayer(str(tmp_path / "int8"), call_endpoint="serving_default")
    np.testing.assert_array_equal(layer(TOKENS)["output_0"], served)


def test_an_artifact_with_a_float_signature_has_constants(model, tmp_path):
    config = ExportConfig(precision="int8", int8_nodes="all", float_fallback=True)
    export(model, tmp_path / "int8", config, calibration_data=TOKENS)
    assert not list((tmp_path / "int8" / "variables").glob("*.data*")) or not held(tmp_path / "int8")
