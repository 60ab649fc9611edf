"""Scores of a model's outputs in NumPy, updated batch by batch, so that a test part needs not fit in memory.

A score needs only targets and outputs. So it can judge an artifact that runs in a process without Keras. The accuracy
of classifiers is in classifiers.py: it first finds out the kind of classifier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tfopt.errors import ConfigError


@runtime_checkable
class Score(Protocol):
    """What an artifact is judged by. An own score is an object with these attributes and methods.

    Attributes:
        name: Name of the score in receipts and tables, for example "mean_iou".
        higher_is_better: Whether a higher result is better.
    """

    name: str
    higher_is_better: bool

    def update(self, targets: Any, outputs: Any) -> None:
        """Adds a batch of targets [batch, ...] and outputs [batch, ...], both NumPy arrays."""

    def result(self) -> float:
        """Returns the score of all batches so far."""


class MeanIoU:
    """Mean over classes of the intersection over union of the target's and the output's pixels, from 0 to 1.

    A class that is in no target and in no output does not count.

    Args:
        ignored_target: Class number of pixels that do not count, for example 255.
    Example:
        >>> score = MeanIoU()
        >>> score.update(np.array([[0, 0, 1, 1]]), np.eye(2)[[[0, 1, 1, 1]]])
        >>> round(score.result(), 4)
        0.5833

    Reference:
        Everingham et al., "The PASCAL Visual Object Classes Challenge: A Retrospective", IJCV 2015.
    """

    name = "mean_iou"
    higher_is_better = True

    def __init__(self, ignored_target: int | None = None) -> None:
        self._ignored = ignored_target
        self._threshold: float | None = None  # of a single output; the first batch decides
        self._counts = np.zeros((0, 0), np.int64)  # pixels by class of the target and class of the output

    def update(self, targets: Any, outputs: Any) -> None:
        """Adds a batch.

        Args:
            targets: Class numbers, [batch, ...] or [batch, ..., 1].
            outputs: Values of the classes, [batch, ..., classes]. A single value means class 1 if it is a logit above
                0, or a probability above 0.5. It is a probability if all values of the first batch lie in [0, 1].
        """
        outputs = np.asarray(outputs)
        if self._threshold is None:
            self._threshold = 0.5 if outputs.size and outputs.min() >= 0 and outputs.max() <= 1 else 0.0
        predicted = self.decisions(outputs).reshape(-1)
        classes = max(outputs.shape[-1], 2)
        if not len(self._counts):
            self._counts = np.zeros((classes, classes), np.int64)
        truth, counted = _classes(self.name, targets, outputs, classes, self._ignored)
        pairs = classes * truth[counted] + predicted[counted]
        self._counts += np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)

    def result(self) -> float:
        """Returns the mean IoU; NaN if no pixel counted."""
        hits = np.diag(self._counts)
        union = self._counts.sum(0) + self._counts.sum(1) - hits
        present = union > 0
        return float(np.mean(hits[present] / union[present])) if present.any() else math.nan

    def decisions(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the class of each pixel, [batch, ...]."""
        if outputs.shape[-1] > 1:
            return np.asarray(outputs.argmax(-1))
        return (outputs[..., 0] > (self._threshold or 0.0)).astype(np.int64)


class BitsPerByte:
    """Mean number of bits that a model needs for a byte of text: its cross-entropy in base 2, per byte.

    The outputs may be logits or probabilities. Outputs that lie in [0, 1] and sum to 1 are probabilities.

    Args:
        bytes_per_target: Mean number of bytes that a token stands for; 1 for a model of bytes.
        ignored_target: Token number that does not count, for example of padding.
    Example:
        >>> score = BitsPerByte()
        >>> score.update(np.array([[3, 7]]), np.zeros((1, 2, 256)))
        >>> score.result()
        8.0
    """

    name = "bits_per_byte"
    higher_is_better = False

    def __init__(self, bytes_per_target: float = 1.0, ignored_target: int | None = None) -> None:
        self._bytes = bytes_per_target
        self._ignored = ignored_target
        self._bits = 0.0
        self._tokens = 0

    def update(self, targets: Any, outputs: Any) -> None:
        """Adds a batch.

        Args:
            targets: Token numbers, [batch, ...] or [batch, ..., 1].
            outputs: Logits or probabilities of the tokens, [batch, ..., tokens].
        """
        values = np.asarray(outputs, np.float64)
        truth, counted = _classes(self.name, targets, values, values.shape[-1], self._ignored)
        values = values.reshape(-1, values.shape[-1])[counted]
        chosen = np.take_along_axis(values, truth[counted, None], -1)[:, 0]
        with np.errstate(divide="ignore"):  # a probability of 0 costs infinitely many bits
            costs = -np.log2(chosen) if _are_probabilities(values) else (_log_sum(values) - chosen) / math.log(2)
        self._bits += float(costs.sum())
        self._tokens += len(costs)

    def result(self) -> float:
        """Returns the bits per byte; NaN if no token counted."""
        return self._bits / (self._tokens * self._bytes) if self._tokens else math.nan

    @staticmethod
    def decisions(outputs: np.ndarray) -> np.ndarray:
        """Returns the most likely token at each place, [batch, ...]."""
        return np.asarray(outputs.argmax(-1))


class MeanAbsoluteError:
    """Mean of the absolute differences between targets and outputs, in the unit of the targets.

    Example:
        >>> score = MeanAbsoluteError()
        >>> score.update(np.array([1.0, 2.0]), np.array([[1.5], [2.0]]))
        >>> score.result()
        0.25
    """

    name = "mean_absolute_error"
    higher_is_better = False

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def update(self, targets: Any, outputs: Any) -> None:
        """Adds a batch of targets and outputs of one shape, [batch, ...]; a last axis of 1 may be missing in one."""
        targets, outputs = np.asarray(targets, np.float64), np.asarray(outputs, np.float64)
        one, other = targets.shape, outputs.shape
        if one != other and (*one, 1) != other and (*other, 1) != one:
            raise ConfigError(
                f"{self.name} needs targets of the outputs' shape. Received: targets of shape {targets.shape}, outputs "
                f"of shape {outputs.shape}. Give one target for each output."
            )
        self._sum += float(np.abs(targets.reshape(-1) - outputs.reshape(-1)).sum())
        self._count += targets.size

    def result(self) -> float:
        """Returns the mean absolute error; NaN if there were no targets."""
        return self._sum / self._count if self._count else math.nan


SCORES: dict[str, Callable[[], Score]] = {
    MeanIoU.name: MeanIoU,
    BitsPerByte.name: BitsPerByte,
    MeanAbsoluteError.name: MeanAbsoluteError,
}


def _classes(
    name: str, targets: Any, outputs: np.ndarray, classes: int, ignored: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the class numbers as a flat array, and which of them count."""
    truth = np.asarray(targets)
    if outputs.ndim < 2 or truth.size != outputs.size // outputs.shape[-1] or truth.dtype.kind not in "biuf":
        raise ConfigError(
            f"{name} needs one class number for each position of the outputs [batch, ..., classes]. Received: targets "
            f"of shape {truth.shape} and dtype {truth.dtype}, outputs of shape {outputs.shape}. Give class numbers."
        )
    truth = truth.reshape(-1)
    counted = np.ones(len(truth), bool) if ignored is None else truth != ignored
    wrong = counted & ~np.isin(truth, np.arange(classes))
    if wrong.any():
        raise ConfigError(
            f"{name} needs class numbers from 0 to {classes - 1}. Received: the target {truth[wrong][0]}. "
            "Correct the targets, or name the number of ignored targets."
        )
    return np.where(counted, truth, 0).astype(np.int64), counted


def _are_probabilities(rows: np.ndarray) -> bool:
    return bool(rows.size and rows.min() >= 0 and rows.max() <= 1 and np.allclose(rows.sum(-1), 1, atol=1e-3))


def _log_sum(rows: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the sum of the exponentials of each row."""
    largest = rows.max(-1, initial=-math.inf, keepdims=True)
    return np.asarray(largest[:, 0] + np.log(np.exp(rows - largest).sum(-1)))
