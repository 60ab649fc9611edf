"""One update of the masks during a fit: it raises the sparsity by the criterion, and exchanges weights by regrowth.

Regrowth exchanges some kept weights for pruned ones that the loss asks for. A weight that was pruned too early returns
in this way. The number of zeros does not change. The method is that of RigL, except that a weight dropped by an update
cannot return in the same update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import Products, needs_data, score_weights
from tfopt.pruning.gradients import LossGradients
from tfopt.pruning.masks import Mask, attach_movement, holds
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.prune import set_sparsity
from tfopt.pruning.weights import Weight, layer_sparsities

Counts = list[tuple[int, int]]


class MaskUpdates:
    """Changes the masks of a model that is in training.

    Args:
        model: The model that is trained; gradients are those of its loss.
        weights: The prunable weights.
        masks: Their masks.
        config: Settings of the pruning.
        data: Batches for the gradients; None if neither the criterion nor regrowth needs them.
    """

    def __init__(
        self, model: keras.Model, weights: Sequence[Weight], masks: Sequence[Mask], config: PruningConfig, data: Any
    ) -> None:
        self._weights, self._masks, self._config, self._data = weights, masks, config, data
        self._gradients: LossGradients | None = None
        if weights and (needs_data(config.criterion) or config.regrowth):
            self._gradients = LossGradients(model, [weight.variable for weight in weights])
        # For each weight, how many of its values are masked, and how many it has.
        self._counts = self._count()

    @property
    def sparsity(self) -> float:
        """The share of the prunable weights that the masks hold at zero."""
        masked, size = _total(self._counts)
        return masked / size if size else 0.0

    def __call__(self, sparsity: float, exchanged: float = 0.0, *, sample: bool = False) -> None:
        """Makes one update.

        Args:
            sparsity: Share of zeros. Masks that hold enough stay, except that the schedule "cyclic" releases weights.
            exchanged: Share of the kept weights to exchange for pruned ones.
            sample: Whether to add to the movements, also if the masks stay.
        """
        config = self._config
        releases = config.schedule == "cyclic" and sparsity < self.sparsity
        if releases:
            for mask in self._masks:
                mask.assign(np.ones(mask.kept.shape, dtype=bool))
        # Masks that already hold enough zeros stay. A resumed fit replays steps, with weights that were trained
        # further; masks of the same size, chosen again from these weights, could differ.
        pattern = parse_pattern(config.pattern, config.transposable)
        each = layer_sparsities(self._weights, config, sparsity)
        rises = not holds(self._weights, self._masks, sparsity, config.scope, pattern, each)
        scored = rises or (sample and config.criterion == "movement")
        products = self._products() if exchanged or (scored and needs_data(config.criterion)) else None
        before = [keras.ops.convert_to_numpy(mask.kept) for mask in self._masks] if exchanged else []
        if scored:
            scores = self._scores(products)
            if rises:
                set_sparsity(self._weights, scores, sparsity, config)
        if exchanged and products is not None:
            self._exchange(before, products, exchanged)
        if rises or releases:
            self._counts = self._count()

    def forget(self) -> None:
        """Sets the sums of movements to zero, which may be those of an earlier fit."""
        for mask in self._masks:
            if mask.movement is not None:
                mask.movement.assign(keras.ops.zeros_like(mask.movement))

    def _products(self) -> list[Products]:
        assert self._gradients is not None  # made for these settings
        return self._gradients.mean_products(self._data, self._config.gradient_batches)

    def _scores(self, products: Sequence[Products] | None) -> list[np.ndarray]:
        scores = score_weights(self._weights, self._config.criterion, products)
        if self._config.criterion != "movement":
            return scores
        summed = []
        for mask, score in zip(self._masks, scores, strict=True):
            movement = attach_movement(mask)
            movement.assign(keras.ops.convert_to_numpy(movement) + score)
            summed.append(keras.ops.convert_to_numpy(movement))
        return summed

    def _exchange(self, before: Sequence[np.ndarray], products: Sequence[Products], share: float) -> None:
        for weight, mask, old, means in zip(self._weights, self._masks, before, products, strict=True):
            mask.assign(exchange(keras.ops.convert_to_numpy(mask.kept), old, weight.read(), means.gradient, share))

    def _count(self) -> Counts:
        kept = [keras.ops.convert_to_numpy(mask.kept) for mask in self._masks]
        return [(int(np.count_nonzero(~one)), one.size) for one in kept]


def _total(counts: Counts) -> tuple[int, int]:
    return sum(masked for masked, _ in counts), sum(size for _, size in counts)


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
