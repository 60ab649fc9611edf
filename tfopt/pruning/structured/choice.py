"""Which units of the groups stay: the best of each group, in numbers that meet the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np

from tfopt.errors import ConfigError
from tfopt.pruning.config import StructuredPruningConfig
from tfopt.pruning.criteria import CHANNEL_CRITERIA
from tfopt.pruning.gradients import LossGradients
from tfopt.pruning.structured.groups import ChannelGroups, Group

HALVINGS = 20  # of the interval in which a target is sought


@dataclass(frozen=True)
class Ranked:
    """A group with the order of its units, the most important first, and their scores in this order."""

    group: Group
    order: Any
    scores: Any


def rank(
    model: keras.Model, groups: Sequence[Group], config: StructuredPruningConfig, data: Any, kept: Any = None
) -> list[Ranked]:
    """Scores the units of each group. The criterion "taylor" needs a compiled model and data.

    `kept` has a boolean for each unit of the model, False where it was removed before. Such units come last.
    """
    values: Iterable[Any]
    if config.criterion == "taylor":
        values = _channel_products(model, groups, data, config.gradient_batches)
    else:
        values = (group.scales() if config.criterion == "bn_scale" else group.values() for group in groups)
    criterion = CHANNEL_CRITERIA[config.criterion] if isinstance(config.criterion, str) else config.criterion
    return [_ranked(group, criterion(value), kept) for group, value in zip(groups, values, strict=True)]


def _ranked(group: Group, scores: Any, kept: Any) -> Ranked:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.shape != (len(group.units),) or not np.isfinite(scores).all():
        raise ConfigError(
            f"criterion must return one finite score per channel. Received: shape {scores.shape} for the "
            f"{len(group.units)} channels of {group.name!r}. Return an array of this length."
        )
    if kept is not None:
        scores = np.where(kept[group.units], scores, min(scores.min(), 0.0) - 1)
    order = np.argsort(-scores, kind="stable")
    return Ranked(group, order, scores[order])


def choose(channels: ChannelGroups, ranked: Sequence[Ranked], config: StructuredPruningConfig) -> Any:
    """Returns a boolean for each unit of the model, True where it stays."""
    target, value = config.target
    if target == "ratio":
        for each in ranked if config.scope == "layer" else ():
            units, ratio = len(each.group.units), _ratio(config, each.group, value)
            if units > 1 and units * (1 - ratio) < 0.5:
                raise ConfigError(
                    f"ratio must leave at least one channel of each group. Received: ratio={ratio:g}, and "
                    f"{each.group.name!r} has {units}. Set {math.floor(100 * (units - 1) / units) / 100:g} or less, or "
                    "exclude it."
                )
        return kept_units(channels, ranked, counts_at(ranked, config))
    cost = {"target_flops": channels.multiply_adds, "target_parameters": channels.parameters}[target]
    return meet(channels, ranked, config, cost, value * cost(channels.all_kept))


def meet(
    channels: ChannelGroups,
    ranked: Sequence[Ranked],
    config: StructuredPruningConfig,
    cost: Callable[[Any], float],
    target: float,
) -> Any:
    """Returns the units that stay so that the cost is at most the target, and as near to it as the steps allow."""

    def kept_at(share: float) -> tuple[list[int], Any]:
        counts = _counts(ranked, config, share, limit=True)
        return counts, kept_units(channels, ranked, counts)

    low, high = 0.0, 1.0
    counts, kept = kept_at(high)  # the smallest model
    if cost(kept) > target:
        all_kept = channels.all_kept
        name, value = config.target
        whole = ", ".join(repr(path) for path in channels.trace.not_followed)
        raise ConfigError(
            f"{name} must be reachable. Received: {value:g}, and the smallest possible is "
            f"{cost(kept) / cost(all_kept):.2f}, with max_ratio={config.max_ratio:g} and round_to={config.round_to}"
            f"{f'; {whole} cannot shrink' if whole else ''}. Set a larger target, a larger max_ratio or a smaller "
            "round_to."
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        middle_counts, middle_kept = kept_at(middle)
        if cost(middle_kept) <= target:
            high, counts, kept = middle, middle_counts, middle_kept
        else:
            low = middle
    # The last step of the search may remove from many groups at once. What is not needed comes back.
    # The group whose best removed unit is the most important, as a share of the mean of the group, comes first.
    best = [
        each.scores[count] / (each.scores.mean() or 1.0) if count < len(each.scores) else -math.inf
        for each, count in zip(ranked, counts, strict=True)
    ]
    for number in sorted(range(len(ranked)), key=lambda each: -best[each]):
        more = min(counts[number] + ranked[number].group.step(config.round_to), len(ranked[number].group.units))
        tried = [*counts[:number], more, *counts[number + 1 :]]
        tried_kept = kept_units(channels, ranked, tried)
        if cost(tried_kept) <= target:
            counts, kept = tried, tried_kept
    return kept


def smallest(channels: ChannelGroups, ranked: Sequence[Ranked], config: StructuredPruningConfig) -> Any:
    """Returns the units of the smallest model that `max_ratio` and `round_to` allow."""
    return kept_units(channels, ranked, _counts(ranked, config, 1.0, limit=True))


def counts_at(ranked: Sequence[Ranked], config: StructuredPruningConfig) -> list[int]:
    """Returns how many units of each group stay with `ratio` and `ratios`."""
    return _counts(ranked, config, config.target[1], limit=config.scope == "global")


def _counts(ranked: Sequence[Ranked], config: StructuredPruningConfig, share: float, limit: bool) -> list[int]:
    """Returns how many units of each group stay if the share of all is to be removed."""
    if config.scope == "global":
        relative = [each.scores / (each.scores.mean() or 1.0) for each in ranked]
        flat = np.sort(np.concatenate(relative)) if relative else np.zeros(0)
        removed = round(share * flat.size)
        threshold = flat[removed - 1] if removed else -math.inf
        wished = [float(np.count_nonzero(scores > threshold)) for scores in relative]
    else:
        wished = [len(each.scores) * (1 - _ratio(config, each.group, share)) for each in ranked]
    return [
        _rounded(each.group, count, config, (1 - config.max_ratio) * len(each.scores) if limit else 0.0)
        for each, count in zip(ranked, wished, strict=True)
    ]


def _ratio(config: StructuredPruningConfig, group: Group, ratio: float) -> float:
    """Returns the share that a group loses: that of `ratios`, or else `ratio`."""
    return next((share for pattern, share in config.ratios.items() if fnmatchcase(group.name, pattern)), ratio)


def _rounded(group: Group, count: float, config: StructuredPruningConfig, least: float) -> int:
    """Returns the nearest number of whole steps, at least one step, or all units of a group of one step."""
    step, units = group.step(config.round_to), len(group.units)
    least = max(least, group.least_channels / group.channels)
    steps = max(math.floor(count / step + 0.5), math.ceil(least / step - 1e-9), 1)
    return min(steps * step, units)


def kept_units(channels: ChannelGroups, ranked: Sequence[Ranked], counts: Sequence[int]) -> Any:
    """Returns a boolean for each unit of the model, True where it stays: the best of each group."""
    kept = channels.all_kept
    for each, count in zip(ranked, counts, strict=True):
        kept[each.group.units[each.order[count:]]] = False
    return kept


def _channel_products(model: keras.Model, groups: Sequence[Group], data: Any, batches: int) -> list[Any]:
    """Returns an array [units, batches] for each group: the sums of weight * gradient over the weights of each unit."""
    held = {id(member.weight.variable): member.weight.variable for group in groups for member in group.members}
    variables = [variable for variable in held.values() if variable.trainable]
    sums: list[list[Any]] = [[] for _ in groups]
    for gradients in LossGradients(model, variables).of_batches(data, batches):
        products = {
            id(variable): variable.numpy().astype(np.float32) * gradient
            for variable, gradient in zip(variables, gradients, strict=True)
        }
        for group, of_group in zip(groups, sums, strict=True):
            of_group.append(sum(_sums(member, products) for member in group.members))
    return [np.stack(of_group, axis=1) for of_group in sums]


def _sums(member: Any, products: dict[int, Any]) -> Any:
    """Returns the sum over the values of each unit in one weight; zero for a weight that is not trained."""
    values = products.get(id(member.weight.variable))
    if values is None:
        return 0.0
    others = tuple(axis for axis in range(values.ndim) if axis != member.dimension)
    return values.sum(axis=others)[member.indices].sum(axis=1)
