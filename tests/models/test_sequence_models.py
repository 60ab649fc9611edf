"""Models of sequences: their layers, what they see, and the form that cuDNN computes."""

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.models import lstm, tcn


def random_values(*shape):
    return np.random.default_rng(0).random(shape, "float32")


@pytest.mark.parametrize("build", [lstm, tcn])
def test_the_first_axis_is_the_steps(build):
    """Axes behind it are flattened: an image is a sequence of its rows."""
    image = random_values(2, 8, 6, 3)
    flat, high = build((8, 18), 4), build((8, 6, 3), 4)
    flat.set_weights(high.get_weights())
    np.testing.assert_allclose(flat(image.reshape(2, 8, 18)), high(image), atol=1e-6)
    pixels = build((8, 6, 3), 4, steps=144)
    assert pixels.get_layer("steps").output.shape == (None, 144, 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_lstm_is_one_that_cudnn_computes(bidirectional):
    model = lstm((8, 6), 4, units=(5, 7), bidirectional=bidirectional, dropout=0.2)
    found = [each for each in model._flatten_layers() if isinstance(each, keras.layers.LSTM)]
    assert len(found) == (4 if bidirectional else 2)
    for layer in found:
        settings = layer.get_config()
        assert settings["activation"] == "tanh"
        assert settings["recurrent_activation"] == "sigmoid"
        assert settings["use_bias"] is True
        assert settings["unroll"] is False
        assert settings["recurrent_dropout"] == 0
        assert layer.use_cudnn == "auto"  # Keras sets False if the other settings rule cuDNN out
    assert model.get_layer("logits").kernel.shape == (14 if bidirectional else 7, 4)
    assert [each.rate for each in model.layers if isinstance(each, keras.layers.Dropout)] == [0.2, 0.2]


def test_lstm_skips_the_tokens_that_fill_a_text():
    model = lstm((None,), 3, units=(8,), vocabulary=20, width=5)
    tokens = np.random.default_rng(0).integers(1, 20, (2, 6)).astype("int32")
    padded = np.pad(tokens, [(0, 0), (0, 4)])
    np.testing.assert_allclose(model(padded), model(tokens), atol=1e-6)
    assert np.abs(model(tokens[:, ::-1]) - model(tokens)).max() > 1e-4


def test_tcn_sees_as_many_steps_as_it_says():
    """The field of the last step: 1 + 2 * (kernel_size - 1) * (2^blocks - 1)."""
    model = tcn((40, 1), 2, filters=8, kernel_size=3, blocks=3)
    field = 1 + 2 * 2 * (2**3 - 1)
    x = random_values(1, 40, 1)
    expected = np.asarray(model(x))
    for place, counts in [(40 - field, True), (40 - field - 1, False), (39, True)]:
        changed = x.copy()
        changed[:, place] += 5
        assert (np.abs(np.asarray(model(changed)) - expected).max() > 0) == counts


def test_a_step_of_tcn_sees_no_later_one():
    model = tcn((16, 2), 2, filters=8, blocks=2)
    inside = keras.Model(model.input, model.get_layer("block2_out").output)
    x = random_values(1, 16, 2)
    changed = x.copy()
    changed[:, 10:] += 1
    before, after = np.asarray(inside(x)), np.asarray(inside(changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any()


def test_every_argument_of_tcn_takes_effect():
    model = tcn((16, 2), 2, filters=8, kernel_size=5, blocks=3, dropout=0.3, pool="mean", norm_momentum=0.8)
    convolutions = [each for each in model.layers if isinstance(each, keras.layers.Conv1D)]
    assert [each.kernel.shape for each in convolutions] == [(1, 2, 8)] + [(5, 8, 8)] * 6
    assert [each.dilation_rate[0] for each in convolutions] == [1, 1, 1, 2, 2, 4, 4]
    assert [each.rate for each in model.layers if isinstance(each, keras.layers.SpatialDropout1D)] == [0.3] * 6
    norms = [each.momentum for each in model.layers if isinstance(each, keras.layers.BatchNormalization)]
    assert norms == [0.8] * 6
    assert any(isinstance(each, keras.layers.GlobalAveragePooling1D) for each in model.layers)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: lstm((8, 6), 2, units=()), "units must hold the width of at least one layer"),
        (lambda: lstm((8, 6), 2, steps=5), "Received: input_shape=(8, 6), steps=5"),
        (lambda: tcn((8, None), 2), "Received: input_shape=(8, None), steps=None"),
        (lambda: tcn((8, 2), 2, pool="max"), "pool must be 'last' or 'mean'"),
    ],
)
def test_wrong_arguments_are_refused(build, words):
    with pytest.raises(ConfigError) as caught:
        build()
    assert words in str(caught.value)
