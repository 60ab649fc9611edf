"""Regrowth: each update of the masks exchanges some kept weights for pruned ones that the loss asks for.

A weight that was pruned too early returns in this way. The number of zeros does not change. The method is that of RigL,
except that a weight dropped by an update cannot return in the same update.
"""

from __future__ import annotations

import math

import numpy as np


def share_at(step: int, share: float, begin_step: int, end_step: float) -> float:
    """Returns the share of the kept weights to exchange at a step: a half cosine from `share` to zero at `end_step`.

    Example:
        >>> [round(share_at(step, 0.3, 0, 100), 3) for step in (0, 50, 99, 100)]
        [0.3, 0.15, 0.0, 0.0]
    """
    if not begin_step <= step < end_step:
        return 0.0
    return share * (1 + math.cos(math.pi * (step - begin_step) / (end_step - begin_step))) / 2


def exchange(
    kept: np.ndarray, before: np.ndarray, weights: np.ndarray, gradients: np.ndarray, share: float
) -> np.ndarray:
    """Returns a mask with as many kept weights, of which a share was pruned before.

    Args:
        kept: The mask to change, True where a weight is kept.
        before: The mask until now. Only a weight that it does not keep can be regrown.
        weights: The weights; the kept ones with the smallest absolute value are dropped.
        gradients: Their gradients; the pruned ones with the largest absolute value are regrown.
        share: The share of the kept weights to exchange. Fewer are exchanged if fewer are pruned.

    Example:
        >>> mask = np.array([True, True, False, False])
        >>> exchange(mask, mask, np.array([3.0, 0.1, 0.0, 0.0]), np.array([0.0, 0.0, 1.0, -2.0]), share=0.5)
        array([ True, False, False,  True])

    Reference:
        Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, arXiv:1911.11134.
    """
    count = min(round(share * np.count_nonzero(kept)), int(np.count_nonzero(~before)))
    if not count:
        return kept
    return (kept & ~_highest(-np.abs(weights), kept, count)) | _highest(np.abs(gradients), ~before, count)


def _highest(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """Returns True at the `count` highest scores among some."""
    ranked = np.where(among, scores, -np.inf)
    chosen = np.zeros(ranked.size, dtype=bool)
    chosen[np.argpartition(ranked, -count, axis=None)[-count:]] = True
    return chosen.reshape(ranked.shape)
