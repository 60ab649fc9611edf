"""The choice of masks: the units with the lowest scores are pruned, per layer or over the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfopt.pruning.masks.allocation import erk_sparsities
from tfopt.pruning.masks.constraint import Mask
from tfopt.pruning.masks.patterns import Pattern, Unstructured
from tfopt.pruning.weights import Weight


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
    kept elements, which differs by one if `sparsity * size` ends in .5.)

    Args:
        scores: The scores.
        sparsity: Share to drop.
        least: Number of elements that are kept in any case.

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
