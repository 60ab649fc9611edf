"""One update of the masks during a fit: it raises the sparsity by the criterion, and exchanges weights by regrowth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria.gradients import LossGradients
from tfopt.pruning.criteria.scores import needs_data, score_weights
from tfopt.pruning.criteria.sensitivity import Products
from tfopt.pruning.masks import Mask, attach_movement, holds, parse_pattern
from tfopt.pruning.prune import set_sparsity
from tfopt.pruning.regrowth import exchange
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
