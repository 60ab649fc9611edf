"""Masks: they select the kept weights by their scores, and are applied inside the compiled training step.

A Keras optimizer assigns `variable.constraint(variable)` after every update, inside the compiled step. A mask that is
this constraint works with XLA, `steps_per_execution`, loss scaling and tf.distribute, and needs no wrapper around the
layer. It is set on the built variable and not as the layer's `kernel_constraint`, so the config of the layer does not
contain it: a saved model has plain zeros and plain layers, and loads without tfopt. After loading, `keep_zeros` makes
masks of the zeros, and `choose_masks` chooses the zeros first again, so that a second `prune` continues from the result
of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfopt.compat.tensorflow import strategy_of


class Mask(keras.constraints.Constraint):
    """A constraint that sets the weights outside a mask to zero.

    The mask is a boolean variable with a byte per weight, so that a new mask does not retrace the training step.

    Attributes:
        variable: The `keras.Variable` with the weights.
        inner: The earlier constraint of the variable, which is still applied to the kept weights.
        counter: The step count of a `PruningSchedule`; None without one. It is here because checkpoints save the
            variables of a constraint.
        movement: The sum of the scores of the criterion "movement" over the updates of a fit; None with other criteria.
        kept: Boolean `keras.Variable` of the same shape, True where the weight is kept. At first all weights are kept.

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
        self.movement: Any = None
        with _beside(variable):
            self.kept = keras.Variable("ones", shape=variable.shape, dtype="bool", trainable=False, name="mask")

    def __call__(self, w: Any) -> Any:
        if self.inner is not None:
            # Masked before, so that the constraint computes a norm of the kept weights only.
            w = self.inner(self._masked(w))
        return self._masked(w)

    def assign(self, kept: np.ndarray) -> None:
        """Changes the mask, and sets the weights outside it to zero."""
        self.kept.assign(kept)
        self.enforce()

    def enforce(self) -> None:
        """Sets the weights outside the mask to zero. Needed after code other than the optimizer has written them."""
        self.variable.assign(self._masked(self.variable))

    def carry_over(self, variable: Any, part: Callable[[Any], Any]) -> None:
        """Gives a copy of the variable the part of this mask that it keeps. A config does not contain the mask."""
        attach_mask(variable).assign(part(ops.convert_to_numpy(self.kept)))

    def _masked(self, w: Any) -> Any:
        # A product would give -0.0, which compresses worse, and NaN where an update overflowed.
        return ops.where(self.kept, w, 0)


def attach_mask(variable: Any) -> Mask:
    """Returns the mask of a variable. A variable without a mask gets one that keeps all weights."""
    if not isinstance(variable.constraint, Mask):
        variable.constraint = Mask(variable, inner=variable.constraint)
    return variable.constraint


def attach_counter(mask: Mask) -> Any:
    """Returns the counter of a mask. A mask without a counter gets one that is zero.

    The counter holds three integers. Two are from the end of an epoch: the number of steps done, and the step of the
    next update. The third is the number of steps whose updates are done; zero after a fit.

    Example:
        >>> kernel = keras.Variable([1.0, -2.0, 3.0])
        >>> attach_counter(attach_mask(kernel)).numpy()
        array([0, 0, 0])
    """
    if mask.counter is None:
        with _beside(mask.variable):
            mask.counter = keras.Variable("zeros", shape=(3,), dtype="int64", trainable=False, name="pruning_steps")
    return mask.counter


def attach_movement(mask: Mask) -> Any:
    """Returns the sum of movements of a mask, of the shape of the weights. A mask without one gets zeros.

    Example:
        >>> attach_movement(attach_mask(keras.Variable([1.0, -2.0]))).numpy()
        array([0., 0.], dtype=float32)
    """
    if mask.movement is None:
        shape = mask.variable.shape
        with _beside(mask.variable):
            mask.movement = keras.Variable("zeros", shape=shape, dtype="float32", trainable=False, name="movement")
    return mask.movement


@contextlib.contextmanager
def _beside(variable: Any) -> Iterator[None]:
    """Places new variables beside a weight: on its device, or on every replica if the weight is mirrored."""
    strategy = strategy_of(variable.value)
    with strategy.scope(), strategy.extended.colocate_vars_with(variable.value):
        yield
