"""Masks: how they are applied inside the compiled training step, and the choice of the kept weights by their scores.

A Keras optimizer assigns `variable.constraint(variable)` after every update, inside the compiled step. A mask that is
this constraint works with XLA, `steps_per_execution`, loss scaling and tf.distribute, and needs no wrapper around the
layer. It is set on the built variable and not as the layer's `kernel_constraint`, so the config of the layer does not
contain it: a saved model has plain zeros and plain layers, and loads without tfopt. After loading, `keep_zeros` makes
masks of the zeros, and `choose_masks` chooses the zeros first again, so that a second `prune` continues from the result
of the first.

Masks are applied in four places: by the optimizer after each update (the constraint); by `assign`, when a mask changes;
at the end of a training by the schedules, since callbacks may have written weights; and at the end of `fit` by
`hold_masks` of tfopt.training, since `use_ema` averages weights before their masks are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfopt.compat.optimizers import updating_optimizers
from tfopt.compat.tensorflow import strategy_of
from tfopt.pruning.patterns import Pattern, Unstructured
from tfopt.pruning.weights import Weight


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
        self.kept = beside(variable, "ones", variable.shape, "bool", "mask")

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
    """
    if mask.counter is None:
        mask.counter = beside(mask.variable, "zeros", (3,), "int64", "pruning_steps")
    return mask.counter


def attach_movement(mask: Mask) -> Any:
    """Returns the sum of movements of a mask, of the shape of the weights. A mask without one gets zeros."""
    if mask.movement is None:
        mask.movement = beside(mask.variable, "zeros", mask.variable.shape, "float32", "movement")
    return mask.movement


def writes_averages(model: Any) -> bool:
    """Whether Keras' fit would end with averages of the weights, which constraints such as masks have not seen."""
    averages = any(getattr(each, "use_ema", False) for each in updating_optimizers(getattr(model, "optimizer", None)))
    return averages and "fit" not in vars(model)  # the fit of tfopt.compile applies the constraints after that


def beside(variable: Any, value: str, shape: Sequence[int], dtype: str, name: str) -> Any:
    """Makes a variable beside a weight: on its device, or on every replica if the weight is mirrored."""
    strategy = strategy_of(variable.value)
    with strategy.scope(), strategy.extended.colocate_vars_with(variable.value):
        return keras.Variable(value, shape=shape, dtype=dtype, trainable=False, name=name)


def choose_masks(
    weights: Sequence[Weight],
    scores: Sequence[Any],
    sparsity: float,
    scope: str,
    pattern: Pattern | None = None,
    each: Sequence[float] | None = None,
) -> list[Any]:
    """Returns a boolean mask for each weight, True where it is kept.

    Weights that are already pruned go first whatever their scores, so that masks only grow and are found again after
    saving and loading. At least one unit is kept per layer, or in the whole model with the global scope, unless a
    pruned unit keeps weights itself. `each` gives the weights sparsities of their own.
    """
    pattern = pattern or Unstructured()
    ranked = [np.where(pruned(weight), -np.inf, score) for weight, score in zip(weights, scores, strict=True)]
    units = [pattern.units(score, weight.reduction) for weight, score in zip(weights, ranked, strict=True)]
    least = 1 if pattern.zeros == 1 else 0
    if scope == "global" and units:
        kept = keep_highest(np.concatenate(units), sparsity / pattern.zeros, least)
        chosen = np.split(kept, np.cumsum([one.size for one in units])[:-1])
    else:
        shares = each or _sparsities(weights, sparsity, scope)
        chosen = [keep_highest(one, share / pattern.zeros, least) for one, share in zip(units, shares, strict=True)]
    return [
        pattern.mask(score, weight.reduction, one) for weight, score, one in zip(weights, ranked, chosen, strict=True)
    ]


def _sparsities(weights: Sequence[Weight], sparsity: float, scope: str) -> list[float]:
    """Returns the sparsity of each weight for a scope that ranks each layer alone."""
    if scope == "erk":
        return erk_sparsities([tuple(weight.variable.shape) for weight in weights], sparsity)
    return [sparsity] * len(weights)


def holds(
    weights: Sequence[Weight],
    masks: Sequence[Mask],
    sparsity: float,
    scope: str,
    pattern: Pattern,
    each: Sequence[float] | None = None,
) -> bool:
    """Returns whether masks hold a sparsity already. The arguments are those of `choose_masks`."""
    counts = [
        pattern.count_pruned(mask.kept.numpy(), weight.reduction) for weight, mask in zip(weights, masks, strict=True)
    ]
    least = 1 if pattern.zeros == 1 else 0
    if scope == "global":
        wanted = [(sum(done for done, _ in counts), sum(size for _, size in counts), sparsity)]
    else:
        shares = each or _sparsities(weights, sparsity, scope)
        wanted = [(done, size, share) for (done, size), share in zip(counts, shares, strict=True)]
    return all(_dropped(size, share / pattern.zeros, least) <= done for done, size, share in wanted)


def pruned(weight: Weight) -> Any:
    """Returns True where a weight is already pruned: where its mask says so, or, without a mask, where it is zero.

    A mask that keeps everything is that of a model just loaded, or of one that was never pruned. With another mask, a
    zero that is kept was regrown and waits for its first step.
    """
    mask = weight.variable.constraint
    if isinstance(mask, Mask):
        dropped = ~mask.kept.numpy()
        if dropped.any():
            return dropped
    return weight.read() == 0


def keep_highest(scores: Any, sparsity: float, least: int = 1) -> Any:
    """Returns a boolean array of the same shape that is False at the `round(sparsity * size)` lowest scores.

    The number is exact: among equal scores, the first are dropped and the last are kept. (tfmot rounds the number of
    kept elements, which differs by one if `sparsity * size` ends in .5.) At least `least` elements are kept.

    Example:
        >>> keep_highest(np.array([3.0, 1.0, 1.0, 1.0]), sparsity=0.5)
        array([ True, False, False,  True])
    """
    flat = scores.ravel()
    dropped = _dropped(flat.size, sparsity, least)
    if dropped <= 0:
        return np.ones(scores.shape, dtype=bool)
    # A partition finds the threshold in linear time. Sorting 25 million weights takes seconds. Of scores that are -inf,
    # those of weights that are pruned already, only the number counts.
    known = np.isneginf(flat)
    pruned_before = int(np.count_nonzero(known))
    threshold = -np.inf
    if dropped > pruned_before:
        place = dropped - pruned_before - 1
        threshold = np.partition(flat[~known] if pruned_before else flat, place)[place]
    kept = flat > threshold
    ties = np.flatnonzero(flat == threshold)
    kept[ties[dropped - np.count_nonzero(flat < threshold) :]] = True
    return kept.reshape(scores.shape)


def _dropped(size: int, sparsity: float, least: int) -> int:
    return min(round(sparsity * size), size - least)


def erk_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """Returns a sparsity for each kernel, so that the kernels together have the given sparsity.

    A kernel keeps a share of its weights in proportion to (sum of its sizes) / (product of its sizes): large kernels
    become sparser than small ones. A kernel whose share would exceed 1 stays dense.

    Example:
        >>> [round(each, 3) for each in erk_sparsities([(10, 10), (100, 100)], 0.8)]
        [0.0, 0.808]

    Reference:
        Erdos-Renyi-Kernel in Evci et al., "Rigging the Lottery", ICML 2020, arXiv:1911.11134.
    """
    sizes = [math.prod(shape) for shape in shapes]
    weights = [sum(shape) for shape in shapes]  # the share that is kept, times the size, up to a factor
    dense: set[int] = set()
    while len(dense) < len(sizes):
        left = (1 - sparsity) * sum(sizes) - sum(sizes[number] for number in dense)
        factor = left / sum(each for number, each in enumerate(weights) if number not in dense)
        over = {number for number, each in enumerate(weights) if number not in dense and factor * each > sizes[number]}
        if not over:
            break
        dense |= over
    return [
        0.0 if number in dense else 1 - factor * each / size
        for number, (each, size) in enumerate(zip(weights, sizes, strict=True))
    ]
