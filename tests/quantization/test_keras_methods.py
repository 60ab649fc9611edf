"""Keras' own quantization through tfopt.quantize: on a copy, with a report."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import export
from tfopt.quantization import quantize

TOKENS = np.random.default_rng(0).integers(0, 50, (32, 8)).astype("int32")


def block(number):
    inputs = keras.Input((8, 32))
    hidden = layers.Dense(64, activation="gelu", name=f"up{number}")(inputs)
    return keras.Model(
        inputs, layers.Add()([inputs, layers.Dense(32, name=f"down{number}")(hidden)]), name=f"b{number}"
    )


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((8,), dtype="int32", name="tokens")
    x = layers.Embedding(50, 32, name="embed")(tokens)
    for number in range(2):
        x = block(number)(x)
    return keras.Model(tokens, layers.Dense(5, name="head")(layers.LayerNormalization()(x)))


def structure():
    return {"pre_block_layers": ["embed"], "sequential_blocks": ["b0", "b1"]}


CONFIGS = {
    "int8": lambda: keras.quantizers.Int8QuantizationConfig(),
    "int4": lambda: keras.quantizers.Int4QuantizationConfig(block_size=16),
    "gptq": lambda: keras.quantizers.GPTQConfig(
        None, None, group_size=16, num_samples=8, sequence_length=8, quantization_layer_structure=structure()
    ),
    "awq": lambda: keras.quantizers.AWQConfig(
        None, None, group_size=16, num_samples=8, sequence_length=8, quantization_layer_structure=structure()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CONFIGS)
def test_a_copy_is_quantized(method, model, tmp_path):
    before = [value.copy() for value in model.get_weights()]
    expected = model.predict(TOKENS, verbose=0)
    data = TOKENS if method in ("gptq", "awq") else None
    result = quantize(model, CONFIGS[method](), calibration_data=data)
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))
    np.testing.assert_array_equal(model.predict(TOKENS, verbose=0), expected)
    outputs = result.model.predict(TOKENS, verbose=0)
    assert 0 < np.linalg.norm(outputs - expected) < (0.05 if method == "int8" else 0.2) * np.linalg.norm(expected)
    assert {"up0", "down1"} <= {change.name.rpartition("/")[2] for change in result.report.changed}
    assert any(skip.name.startswith("layer_normalization") for skip in result.report.skipped)
    assert result.report.metrics["weight_bytes_ratio"] < 0.6
    artifact = export(result, tmp_path / "a", calibration_data=TOKENS)
    served = tf.saved_model.load(artifact.path)
    exported = served.signatures["serving_default"](tokens=tf.constant(TOKENS))["output_0"]
    np.testing.assert_allclose(exported, outputs, atol=1e-4)
    result.model.save(tmp_path / "m.keras")
    if method in ("int8", "int4"):  # Keras 3.15 cannot load what its GPTQ and AWQ made
        again = keras.saving.load_model(tmp_path / "m.keras")
        np.testing.assert_allclose(again.predict(TOKENS, verbose=0), outputs, atol=1e-5)


def test_what_does_not_fit(model):
    with pytest.raises(ConfigError, match="calibration_data must be given for gptq"):
        quantize(model, CONFIGS["gptq"]())
    with pytest.raises(ConfigError, match="int4 takes no calibration_data"):
        quantize(model, CONFIGS["int4"](), calibration_data=TOKENS)
    wrong = keras.quantizers.GPTQConfig(TOKENS, None, quantization_layer_structure={"sequential_blocks": ["b7"]})
    with pytest.raises(ConfigError, match="'b7', which is the name of 0 layers"):
        quantize(model, wrong)
    with pytest.raises(UnsupportedModelError, match="must be a built"):
        quantize(keras.Sequential([layers.Dense(3)]), CONFIGS["int4"]())
