"""Example data of another dtype than the model's: converted and said so, or refused."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.graph import freeze
from tfopt.quantization import quantize

X = np.random.default_rng(0).random((8, 4)) * 3


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input((4,), name="x"), layers.Dense(2)])


@pytest.fixture(scope="module")
def graph(model):
    return freeze(model)


@pytest.fixture(scope="module")
def tokens():
    return freeze(keras.Sequential([keras.Input((4,), dtype="int32", name="ids"), layers.Embedding(5, 2)]))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("uint8", "uint8 to float32, unscaled; if the model was trained on scaled values"),
        ("int64", "int64 to float32, unscaled"),
        ("bool", "bool to float32, unscaled"),
    ],
)
def test_what_may_change_the_meaning_is_said(dtype, words, graph):
    with pytest.warns(TfoptWarning, match=f"input 'x' were converted from {words}"):
        fed = graph.feed(X.astype(dtype))
    np.testing.assert_array_equal(fed["x"], X.astype(dtype).astype("float32"))


@pytest.mark.parametrize("data", [X, X.astype("float32"), X.astype("float16")])
def test_what_changes_no_meaning_is_not(data, graph):
    np.testing.assert_array_equal(graph.feed(data)["x"], data.astype("float32"))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_whole_numbers_are_token_ids_in_any_dtype(dtype, tokens):
    ids = np.arange(8).reshape(2, 4) % 5
    fed = tokens.feed(ids.astype(dtype))["ids"]
    assert fed.dtype == "int32"
    np.testing.assert_array_equal(fed, ids)


@pytest.mark.parametrize("data", [X, np.full((2, 4), 2**33 + 1), np.full((2, 4), np.nan)])
def test_what_an_integer_cannot_hold_is_refused(data, tokens):
    with pytest.raises(ConfigError, match=r"Input 'ids' must be given as int32. Received: .* values that int32 cannot"):
        tokens.feed(data)


@pytest.mark.parametrize("data", [X.astype("complex64"), np.full((2, 4), "a")])
def test_other_kinds_are_refused(data, graph):
    with pytest.raises(ConfigError, match=r"Input 'x' must be given as float32. Received: values of dtype"):
        graph.feed(data)


def test_calibration_says_it_and_prediction_does_not(model):
    with pytest.raises(ConfigError, match="dtype complex64"):
        quantize(model, calibration_data=X.astype("complex64"))
    with pytest.warns(TfoptWarning, match="converted from int64") as caught:
        quantized = quantize(model, calibration_data=np.repeat(X, 2, axis=0).astype("int64"))
    assert all("converted" in str(each.message) for each in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized.predict(X.astype("int64"))
