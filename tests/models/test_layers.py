"""The layers of the builders: what they compute, lengths, masks and dtypes."""

import keras
import numpy as np
import pytest
from keras import ops

from tfopt.errors import ConfigError
from tfopt.models.layers import ClassToken, LayerScale, LearnedPositions, SublinearMean

X = np.random.default_rng(0).random((2, 5, 8), "float32")


@pytest.mark.parametrize("length", [5, 9])
def test_each_position_has_its_own_vector(length):
    layer = LearnedPositions(length)
    added = layer(X) - X
    np.testing.assert_allclose(added[0], layer.positions[:5], atol=1e-6)
    np.testing.assert_allclose(added[1], layer.positions[:5], atol=1e-6)
    assert layer.positions.shape == (length, 8)


def test_positions_take_sequences_of_an_open_length():
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, LearnedPositions(6)(inputs))
    assert model.output_shape == (None, None, 8)
    assert [model(X[:, :length]).shape[1] for length in (1, 5)] == [1, 5]


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match=r"Received: length=4 for 5 positions\. Set 5 or more\."):
        LearnedPositions(4)(X)


def test_positions_pass_a_mask_on():
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, LearnedPositions(4)(keras.layers.Embedding(3, 8, mask_zero=True)(tokens)))
    assert model(np.array([[1, 2, 0]]))._keras_mask.numpy().tolist() == [[True, True, False]]


def test_the_class_token_stands_before_every_sequence():
    layer = ClassToken()
    out = layer(X)
    np.testing.assert_array_equal(out[:, 1:], X)
    np.testing.assert_array_equal(out[0, 0], out[1, 0])
    np.testing.assert_array_equal(out[0, 0], layer.token[0, 0])


def test_layer_scale_has_a_factor_for_each_channel():
    layer = LayerScale(0.5)
    np.testing.assert_allclose(layer(X), X / 2)
    layer.factors.assign(np.arange(8.0))
    np.testing.assert_allclose(layer(X), X * np.arange(8.0))


@pytest.mark.parametrize("pad_token", [None, 0])
def test_a_repeated_token_counts_less_each_time(pad_token):
    tokens = np.array([[3, 5, 3, 3, 0], [0, 0, 0, 0, 0]], "int32")
    layer = SublinearMean(pad_token)
    shares = {3: (1 + np.log(3)) / 3, 5: 1.0, 0: 0.0 if pad_token == 0 else 1.0}
    weights = np.array([shares[token] for token in tokens[0]])
    out = np.asarray(layer(X, tokens))
    np.testing.assert_allclose(out[0], weights @ X[0] / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(out[1], np.zeros(8) if pad_token == 0 else X[1].mean(0), rtol=1e-5)
    half = SublinearMean.from_config({**layer.get_config(), "dtype": "mixed_float16"})
    assert (half.pad_token, half(X, tokens).dtype) == (pad_token, "float16")
    np.testing.assert_allclose(half(X, tokens), out, atol=2e-3)
    assert layer.compute_output_shape(X.shape, tokens.shape) == out.shape


@pytest.mark.parametrize("layer", [LearnedPositions(7), ClassToken(), LayerScale(0.1)], ids=lambda layer: layer.name)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_layers_compute_in_the_dtype_of_their_policy_and_keep_their_settings(layer, policy):
    copy = type(layer).from_config({**layer.get_config(), "dtype": policy})
    assert copy(X).dtype == copy.compute_dtype
    assert {weight.dtype for weight in copy.weights} == {"float32"}
    config = copy.get_config()
    assert {name: value for name, value in layer.get_config().items() if name != "dtype"}.items() <= config.items()
    assert tuple(copy.compute_output_shape(X.shape)) == ops.shape(copy(X))
