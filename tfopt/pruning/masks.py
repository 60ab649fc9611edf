"""Masks: which weights are kept, chosen from their scores and held inside the compiled training step.

A Keras optimizer assigns `variable.constraint(variable)` after every update, inside the compiled step. A mask set there
holds under XLA, `steps_per_execution`, loss scaling and tf.distribute alike, and needs no wrapper around the layer.
It is set on the built variable, not as the layer's `kernel_constraint`, so it does not enter the layer's config: a
saved model holds plain zeros and plain layers, and loads where tfopt is not installed. After loading, the zeros are
chosen first again (see `choose_masks`), so that a second `prune` continues from where the first ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfopt.compat.tensorflow import strategy_of
from tfopt.errors import ConfigError
from tfopt.pruning.criteria import Criterion
from tfopt.pruning.weights import Weight


class Mask(keras.constraints.Constraint):
    """A constraint that sets the weights outside a mask to zero.

    The mask is a boolean variable, a byte per weight, so that changing it between steps does not retrace the step.

    Attributes:
        variable: The `keras.Variable` that is constrained.
        inner: The constraint the variable had before, still applied to the weights that are kept.
        counter: Where a `PruningSchedule` keeps its count of steps; None without one. It is here because the variables
            that a constraint holds are saved with the training.
        kept: Boolean `keras.Variable` of the same shape; True where the weight is kept, which at first is everywhere.

    Example:
        >>> kernel = keras.Variable([1.0, -2.0, 3.0])
        >>> kernel.constraint = Mask(kernel)
        >>> kernel.constraint.assign(np.array([True, False, True]))
        >>> kernel.numpy().tolist()
        [1.0, 0.0, 3.0]
    """

    def __init__(self, variable: Any, inner: Any = None) -> None:
        self.variable = variable
        self.inner = inner
        self.counter: Any = None
        with _beside(variable):
            self.kept = keras.Variable("ones", shape=variable.shape, dtype="bool", trainable=False, name="mask")

    def __call__(self, w: Any) -> Any:
        if self.inner is not None:
            # Masked before, so that a norm counts the kept weights only.
            w = self.inner(self._masked(w))
        return self._masked(w)

    def assign(self, kept: np.ndarray) -> None:
        """Changes the mask, and sets the weights outside it to zero."""
        self.kept.assign(kept)
        self.enforce()

    def enforce(self) -> None:
        """Sets the weights outside the mask to zero, should something else than the optimizer have written them."""
        self.variable.assign(self._masked(self.variable))

    def _masked(self, w: Any) -> Any:
        # A product would leave -0.0, which is less compressible, and NaN where an update overflowed.
        return ops.where(self.kept, w, 0)


def attach_mask(variable: Any) -> Mask:
    """Returns the variable's mask, and puts one that keeps everything on it where there is none."""
    if not isinstance(variable.constraint, Mask):
        variable.constraint = Mask(variable, inner=variable.constraint)
    return variable.constraint


def attach_counter(mask: Mask) -> Any:
    """Returns the mask's counter, and gives it one at zero if it has none.

    It holds two integers as they are at the end of an epoch: the steps done, and the step of the next update.

    Example:
        >>> kernel = keras.Variable([1.0, -2.0, 3.0])
        >>> attach_counter(attach_mask(kernel)).numpy()
        array([0, 0])
    """
    if mask.counter is None:
        with _beside(mask.variable):
            mask.counter = keras.Variable("zeros", shape=(2,), dtype="int64", trainable=False, name="pruning_steps")
    return mask.counter


def choose_masks(weights: Sequence[Weight], sparsity: float, criterion: Criterion, scope: str) -> list[np.ndarray]:
    """Returns a boolean mask for each weight, True where it is kept.

    Weights that are zero already go first, whatever the criterion, so that masks grow and are found again after
    saving and loading. At least one weight is kept per layer, or overall with the global scope.

    Raises:
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: The criterion returned something else than a score per weight.
    """
    scores = [_scores(weight, criterion) for weight in weights]
    if scope == "layer" or not scores:
        return [keep_highest(score, sparsity) for score in scores]
    kept = keep_highest(np.concatenate([score.ravel() for score in scores]), sparsity)
    parts = np.split(kept, np.cumsum([score.size for score in scores])[:-1])
    return [part.reshape(score.shape) for part, score in zip(parts, scores, strict=True)]


def keep_highest(scores: np.ndarray, sparsity: float) -> np.ndarray:
    """Returns a boolean array of the same shape that is False at the `round(sparsity * size)` lowest scores.

    The number is exact: among equal scores the first are dropped, the last kept. One element is always kept.
    (tfmot rounds the number kept instead, which differs by one where `sparsity * size` lies halfway.)

    Example:
        >>> keep_highest(np.array([3.0, 1.0, 1.0, 1.0]), sparsity=0.5)
        array([ True, False, False,  True])
    """
    flat = scores.ravel()
    dropped = min(round(sparsity * flat.size), flat.size - 1)
    if dropped <= 0:
        return np.ones(scores.shape, dtype=bool)
    # A partition finds the threshold in linear time; sorting 25 million weights takes seconds.
    threshold = np.partition(flat, dropped - 1)[dropped - 1]
    kept = flat > threshold
    ties = np.flatnonzero(flat == threshold)
    kept[ties[dropped - np.count_nonzero(flat < threshold) :]] = True
    return kept.reshape(scores.shape)


@contextlib.contextmanager
def _beside(variable: Any) -> Iterator[None]:
    """Makes variables where a weight lives: on its device, or as its mirror on every replica."""
    strategy = strategy_of(variable.value)
    with strategy.scope(), strategy.extended.colocate_vars_with(variable.value):
        yield


def _scores(weight: Weight, criterion: Criterion) -> np.ndarray:
    values = weight.read()
    scores = np.asarray(criterion(values))
    if scores.shape != values.shape or np.isnan(scores).any():
        raise ConfigError(
            f"criterion must return one score per weight. Received: shape {scores.shape}, "
            f"{np.isnan(scores).sum()} of them NaN, for the {weight}."
        )
    return np.where(values == 0, -np.inf, scores)
