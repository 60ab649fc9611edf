"""Label smoothing against NumPy and against Keras' own losses of one-hot targets."""

import keras
import numpy as np
import pytest
from scipy.special import log_softmax

from tfopt.errors import ConfigError
from tfopt.tasks.label_smoothing import SmoothedCrossEntropy, smoothed

LOGITS = np.random.default_rng(0).normal(size=(6, 5, 4)).astype("float32")
TARGETS = np.random.default_rng(1).integers(0, 4, (6, 5))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1)])
def test_it_is_the_cross_entropy_of_mixed_targets(shape):
    shares = 0.7 * np.eye(4)[TARGETS] + 0.3 / 4
    expected = -(shares * log_softmax(LOGITS, -1)).sum(-1).mean()
    loss = smoothed(keras.losses.SparseCategoricalCrossentropy(from_logits=True), 0.3)
    assert float(loss(TARGETS.reshape(shape), LOGITS)) == pytest.approx(expected, rel=1e-5)


def test_ignored_targets_and_weights_count_as_in_keras():
    targets = np.where(TARGETS == 2, 255, TARGETS)
    shares = 0.9 * np.eye(4)[TARGETS] + 0.1 / 4
    each, counts = -(shares * log_softmax(LOGITS, -1)).sum(-1), targets != 255
    loss = smoothed(keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255), 0.1)
    assert float(loss(targets, LOGITS)) == pytest.approx(each[counts].mean(), rel=1e-5)
    # Without smoothing, weights and ignored targets together give what Keras gives.
    weights = np.linspace(0, 1, 6, dtype="float32")[:, None] * np.ones((6, 5), "float32")
    ours, theirs = (
        make(targets, LOGITS, sample_weight=weights)
        for make in (
            SmoothedCrossEntropy(0.0, 255),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255),
        )
    )
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("kind", [keras.losses.CategoricalCrossentropy, keras.losses.BinaryCrossentropy])
def test_losses_of_shares_use_keras_own_smoothing(kind):
    loss = smoothed(kind(from_logits=True), 0.2)
    assert (type(loss), loss.get_config()["label_smoothing"], loss.get_config()["from_logits"]) == (kind, 0.2, True)


@pytest.mark.parametrize(
    "loss", [keras.losses.MeanSquaredError(), keras.losses.SparseCategoricalCrossentropy(), {"a": "mse"}, "mse"]
)
def test_other_losses_are_refused(loss):
    assert smoothed(loss, 0.0) is loss
    with pytest.raises(ConfigError, match=r"label_smoothing must be 0 unless .* Received: label_smoothing=0\.1, "):
        smoothed(loss, 0.1)


def test_it_is_saved_with_a_model(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", SmoothedCrossEntropy(0.1, ignore_class=7))
    model.save(tmp_path / "model.keras")
    loss = keras.saving.load_model(tmp_path / "model.keras").loss
    assert (loss.label_smoothing, loss.ignore_class) == (0.1, 7)
