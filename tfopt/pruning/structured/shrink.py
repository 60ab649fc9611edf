"""Structured pruning in one call: `shrink` returns a smaller, dense model without the least important channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import keras

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.models.plain_models import is_plain
from tfopt.pruning.structured.choice import Ranked, choose, rank
from tfopt.pruning.structured.config import StructuredPruningConfig
from tfopt.pruning.structured.groups import ChannelGroups, Group
from tfopt.pruning.structured.surgery import without_channels
from tfopt.report import Change, PassReport, Skip
from tfopt.settings.validation import check_type


@dataclass(frozen=True)
class ShrinkResult:
    """What `shrink` made.

    Attributes:
        model: The smaller model, not compiled; None after a dry run.
        report: The changed groups, the kept layers with the reasons, and parameters and multiply-adds before and after.
        channels: For each group by its name, the old indices of the channels that are left, in the new order. A head
            and a group of channels has one index.
    """

    model: keras.Model | None
    report: PassReport
    channels: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return str(self.report)


def shrink(model: keras.Model, config: StructuredPruningConfig | None = None, *, dry_run: bool = False) -> ShrinkResult:
    """Removes whole channels, heads and units, and returns a smaller dense model.

    tfopt follows the channels from layer to layer: a filter leaves with its bias, its normalization and the slices of
    the next kernels that read it, and channels that meet in an addition leave together. What it cannot follow keeps its
    channels, and the report says why. The outputs are those of the model in which the weights of the removed channels
    are zero. So a channel that is zero already changes nothing. Train the result for some epochs to win back accuracy.

    Args:
        model: A built functional or Sequential Keras 3 model with its channels last, which may contain others.
        config: How many channels, and which.
        dry_run: Whether to only report what would change.

    Returns: The new model, the report, and the map from new to old channels. The given model is unchanged.

    Raises:
        UnsupportedModelError: The model is subclassed or not built.
        UnsupportedLayerError: A layer cannot be rebuilt from its config.
        ConfigError: A pattern in `exclude` names no layer, a group would keep no channel, or no number of channels
            meets the target.

    Example:
        >>> from keras import layers
        >>> model = keras.Sequential([keras.Input((4,)), layers.Dense(32, name="a"), layers.Dense(2, name="b")])
        >>> result = shrink(model, StructuredPruningConfig(ratio=0.5))
        >>> result.model.get_layer("a").units, len(result.channels["a"])
        (16, 16)

    Reference:
        Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023, arXiv:2301.12900.
    """
    config = StructuredPruningConfig() if config is None else config
    check_type("config", config, StructuredPruningConfig, "Pass for example tfopt.StructuredPruningConfig(ratio=0.5).")
    _check_model(model)
    channels = ChannelGroups(model, config.widths)
    ranked, skipped = _ranked(channels, config)
    kept = choose(channels, ranked, config)
    report = _report(channels, ranked, kept, skipped, config)
    report.warn_if_unchanged()
    smaller = None if dry_run else without_channels(model, channels, kept)
    return ShrinkResult(smaller, report, {group.name: _indices(group, kept) for group in channels.groups})


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(f"model must be a Keras 3 model. Received: {type(model).__name__}.")
    if not is_plain(model):
        raise UnsupportedModelError(
            "model must be functional or Sequential: the layers of a subclassed model are connected in its own code. "
            f"Received: {model.name!r} ({type(model).__name__}). Call its layers on a keras.Input one by one, and pass "
            "keras.Model(inputs, outputs)."
        )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Give it an Input, or call it once on a "
            "batch."
        )


def _ranked(channels: ChannelGroups, config: StructuredPruningConfig) -> tuple[list[Ranked], list[Skip]]:
    """Returns the groups that may shrink with the order of their units, and the others with the reasons."""
    excluded = _excluded(channels, config.exclude)
    skipped, open_groups = list(channels.fixed), []
    for group in channels.groups:
        reason = None
        if group.name in excluded:
            reason = "excluded"
        elif len(group.units) <= group.step(config.round_to):
            count = len(group.units)
            reason = f"it has {count * group.channels} channels, no more than the step of round_to={config.round_to}"
        elif config.criterion == "bn_scale" and group.scales() is None:
            reason = "it has no batch normalization with a scale"
        if reason:
            skipped.append(Skip(name=group.name, kind=group.kind, reason=reason))
        else:
            open_groups.append(group)
    return rank(open_groups, config), skipped


def _excluded(channels: ChannelGroups, patterns: tuple[str, ...]) -> set[str]:
    """Returns the names of the groups that are the widths of the layers that a pattern names."""
    paths = {weight.layer for weight in channels.trace.weights.values()}
    paths |= {resized.path for resized in channels.trace.resized.values()}
    excluded: set[str] = set()
    for pattern in patterns:
        named = {path for path in paths if any(fnmatchcase(part, pattern) for part in _names(path))}
        if not named:
            raise ConfigError(f"exclude must name layers of the model. Received: {pattern!r}, which no layer has.")
        excluded.update(name for path in named for name in channels.groups_of(path))
    return excluded


def _names(path: str) -> list[str]:
    """Returns the names under which a pattern finds a layer: its own, its path, and those of the models around it."""
    parts = path.split("/")
    return [*parts, *("/".join(parts[: number + 1]) for number in range(len(parts)))]


def _report(
    channels: ChannelGroups, ranked: list[Ranked], kept: Any, skipped: list[Skip], config: StructuredPruningConfig
) -> PassReport:
    changed = []
    for group in (each.group for each in ranked):
        left, size = len(_indices(group, kept)), len(group.units)
        if left == size:
            skipped.append(Skip(name=group.name, kind=group.kind, reason=f"all {size} channels are needed"))
            continue
        exact = f"; statistics of {group.normalized[0]} change" if group.normalized else ""
        what = f"{size} -> {left} {group.unit_name}, with {len(group.members) - 1} more weights{exact}"
        changed.append(Change(name=group.name, kind=group.kind, detail=what))
    everything = channels.all_kept
    metrics = {
        "parameters": float(channels.parameters(kept)),
        "parameters_before": float(channels.parameters(everything)),
        "multiply_adds": float(channels.multiply_adds(kept)),
        "multiply_adds_before": float(channels.multiply_adds(everything)),
    }
    return PassReport(name="shrink", changed=tuple(changed), skipped=tuple(skipped), metrics=metrics)


def _indices(group: Group, kept: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in kept[group.units].nonzero()[0])
