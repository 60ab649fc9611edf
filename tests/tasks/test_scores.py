"""Scores against NumPy, scikit-learn and Keras, batch by batch and at once."""

import math

import keras
import numpy as np
import pytest
from sklearn.metrics import jaccard_score, log_loss, mean_absolute_error

from tfopt.errors import ConfigError
from tfopt.tasks import SCORES, BitsPerByte, MeanAbsoluteError, MeanIoU, Score
from tfopt.tasks.keras_metrics import BitsPerByteMetric

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(20, 6, 5)).astype("float32")
TARGETS = GENERATOR.integers(0, 5, (20, 6))


def streamed(score, targets, outputs):
    """Updates in batches of unequal size; the result must not depend on them."""
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
        score.update(targets[part], outputs[part])
    return score.result()


def test_mean_iou_is_scikit_learns_macro_jaccard():
    expected = jaccard_score(TARGETS.ravel(), LOGITS.argmax(-1).ravel(), average="macro")
    assert streamed(MeanIoU(), TARGETS, LOGITS) == pytest.approx(expected)
    assert streamed(MeanIoU(), TARGETS[..., None].astype("float32"), LOGITS) == pytest.approx(expected)


def test_mean_iou_leaves_out_ignored_pixels_and_absent_classes():
    targets = np.where(GENERATOR.random(TARGETS.shape) < 0.3, 255, TARGETS % 3)
    outputs = LOGITS.copy()
    outputs[..., 3:] = -100  # classes 3 and 4 are nowhere
    kept = targets != 255
    expected = jaccard_score(targets[kept], outputs.argmax(-1)[kept], average="macro")
    assert streamed(MeanIoU(255), targets, outputs) == pytest.approx(expected)
    reference = keras.metrics.MeanIoU(5, ignore_class=255, sparse_y_pred=False)
    reference.update_state(targets, outputs)
    assert float(reference.result()) == pytest.approx(expected, abs=1e-6)


def test_mean_iou_of_one_output_is_a_logit_or_a_probability():
    outputs = GENERATOR.normal(size=(9, 4, 4, 1))
    targets = GENERATOR.integers(0, 2, (9, 4, 4))
    expected = jaccard_score(targets.ravel(), (outputs > 0).ravel().astype(int), average="macro")
    assert streamed(MeanIoU(), targets, outputs) == pytest.approx(expected)
    assert streamed(MeanIoU(), targets, 1 / (1 + np.exp(-outputs))) == pytest.approx(expected)  # of a sigmoid


def probabilities(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("outputs", [LOGITS, probabilities(LOGITS), 1000 * LOGITS.astype("float64")])
def test_bits_per_byte_is_the_cross_entropy_in_base_2(outputs):
    shares = outputs if outputs.max() <= 1 else probabilities(outputs)
    chosen = np.take_along_axis(shares, TARGETS[..., None], -1)
    if chosen.min() > 0:
        expected = log_loss(TARGETS.ravel(), shares.reshape(-1, 5).astype("float64"), labels=range(5)) / math.log(2)
    else:  # logits of a thousand: the reference in logarithms
        largest = outputs.max(-1)
        sums = np.log(np.exp(outputs - largest[..., None]).sum(-1)) + largest
        expected = (sums - np.take_along_axis(outputs, TARGETS[..., None], -1)[..., 0]).mean() / math.log(2)
    assert streamed(BitsPerByte(), TARGETS, outputs) == pytest.approx(expected, rel=1e-5)


def test_bits_per_byte_counts_bytes_and_leaves_out_padding():
    padded = np.where(np.arange(6) < GENERATOR.integers(1, 7, (20, 1)), TARGETS, -1)
    kept = padded >= 0
    nats = -np.log(np.take_along_axis(probabilities(LOGITS), np.where(kept, padded, 0)[..., None], -1))[..., 0]
    expected = nats[kept].mean() / math.log(2) / 3.5
    assert streamed(BitsPerByte(3.5, -1), padded, LOGITS) == pytest.approx(expected, rel=1e-5)
    metric = BitsPerByteMetric(3.5, -1)
    for part in (slice(0, 7), slice(7, None)):
        metric.update_state(padded[part], LOGITS[part])
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert again.get_config() == metric.get_config()


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 4, 2)])
def test_mean_absolute_error(shape):
    outputs, targets = GENERATOR.normal(size=shape), GENERATOR.normal(size=shape)
    expected = mean_absolute_error(targets.ravel(), outputs.ravel())
    assert streamed(MeanAbsoluteError(), targets, outputs) == pytest.approx(expected)
    if shape == (30, 1):
        assert streamed(MeanAbsoluteError(), targets[:, 0], outputs) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("score", "targets", "outputs", "words"),
    [
        (MeanIoU(), np.full((2, 3), 5), np.zeros((2, 3, 5)), "class numbers from 0 to 4. Received: the target 5"),
        (MeanIoU(), np.zeros((2, 4)), np.zeros((2, 3, 5)), r"targets of shape (2, 4)"),
        (BitsPerByte(), np.full((2, 3), -1), np.zeros((2, 3, 5)), "Received: the target -1"),
        (BitsPerByte(), np.array([["a"]]), np.zeros((1, 1, 5)), "dtype <U1"),
        (MeanAbsoluteError(), np.zeros((3, 2)), np.zeros((3, 4)), "targets of shape (3, 2), outputs of shape (3, 4)"),
        (MeanAbsoluteError(), np.zeros((2, 3)), np.zeros((3, 2)), "targets of shape (2, 3), outputs of shape (3, 2)"),
    ],
)
def test_targets_that_do_not_fit_are_refused(score, targets, outputs, words):
    with pytest.raises(ConfigError) as caught:
        score.update(targets, outputs)
    assert words in str(caught.value)


def test_without_targets_there_is_no_score():
    assert all(math.isnan(make().result()) for make in SCORES.values())
    assert all(isinstance(make(), Score) for make in SCORES.values())
