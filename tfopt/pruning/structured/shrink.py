"""Structured pruning in one call: `shrink` returns a smaller, dense model without the least important channels.

Weights and pruning masks are carried over. With a target of latency, channels leave until a call takes a share of the
time, measured on this machine: the time of a call does not fall in proportion to the multiply-adds, so smaller models
are built and timed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np

from tfopt.compat.forks import check_not_forked
from tfopt.compat.kinds import check_keras_3
from tfopt.errors import ConfigError, UnsupportedModelError, warn
from tfopt.models.copying import Rebuild, copy_model, is_plain, on_devices_of, plain_copy
from tfopt.profiling.cost import count_flops
from tfopt.pruning.call_times import Latency, compare_latency, timed_function
from tfopt.pruning.channels.call import Part, Setting
from tfopt.pruning.config import StructuredPruningConfig
from tfopt.pruning.payoff import payoff_of_channels
from tfopt.pruning.structured.choice import Ranked, choose, meet, rank, smallest
from tfopt.pruning.structured.groups import ChannelGroups, Group
from tfopt.pruning.weights import is_matched
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


def shrink(
    model: keras.Model, config: StructuredPruningConfig | None = None, data: Any = None, *, dry_run: bool = False
) -> ShrinkResult:
    """Removes whole channels, heads and units, and returns a smaller dense model.

    tfopt follows the channels from layer to layer: a filter leaves with its bias, its normalization and the slices of
    the next kernels that read it, and channels that meet in an addition leave together. What it cannot follow keeps its
    channels, and the report says why. The outputs are those of the model in which the weights of the removed channels
    are zero. So a channel that is zero already changes nothing. Train the result for some epochs to win back accuracy.

    Args:
        model: A built functional or Sequential Keras 3 model with its channels last, which may contain others.
        config: How many channels, and which.
        data: Batches of (inputs, targets) for the criterion "taylor", which needs gradients of the loss of `compile`.
        dry_run: Whether to only report what would change, with more figures: the bytes of the weights as they are and
            under gzip, and the median milliseconds of a call with `config.batch_size` examples on this machine. A
            step of the report says how much faster that is, or "about even" where the times cannot tell.

    Returns: The new model, the report, and the map from new to old channels. The given model is unchanged.

    Raises:
        UnsupportedModelError: The model is subclassed or not built, or not compiled if the criterion needs gradients.
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
    check_not_forked()
    config = StructuredPruningConfig() if config is None else config
    check_type("config", config, StructuredPruningConfig, "Pass for example tfopt.StructuredPruningConfig(ratio=0.5).")
    channels, groups, skipped = find_groups(model, config)
    copy_model(model, data)  # refuses a model whose copy computes something else, before anything is removed
    ranked = rank(model, groups, config, data)
    times = {}
    if config.target_latency is None:
        kept = choose(channels, ranked, config)
    else:
        kept, latency = meet_latency(model, channels, ranked, config)
        times = {"latency_ms_before": latency.before_ms, "latency_ms": latency.after_ms}
    result = finished(model, config, channels, groups, kept, skipped, metrics=times)
    if not dry_run:
        return result
    figures, unknown, speed = payoff_of_channels(model, result.model, config.batch_size, config.open_size)
    report = replace(
        result.report,
        name="shrink (dry run)",
        skipped=(*result.report.skipped, *unknown),
        metrics={**result.report.metrics, **figures},
        steps=speed,
    )
    return replace(result, model=None, report=report)


def find_groups(model: Any, config: StructuredPruningConfig) -> tuple[ChannelGroups, list[Group], list[Skip]]:
    """Returns the channels of a model, the groups that may shrink, and the others with the reasons."""
    _check_model(model)
    channels = ChannelGroups(model, config.widths, config.open_size)
    excluded = _excluded(channels, config.exclude)
    for pattern in config.ratios:
        if not any(fnmatchcase(group.name, pattern) for group in channels.groups):
            names = ", ".join(repr(group.name) for group in channels.groups[:8])
            raise ConfigError(
                f"ratios must name groups of the model. Received: {pattern!r}, which none has. The groups are {names}"
                f"{', ...' if len(channels.groups) > 8 else ''}."
            )
    skipped, may_shrink = list(channels.fixed), []
    for group in channels.groups:
        reason = _reason_to_keep(group, config, group.name in excluded)
        if reason is None:
            may_shrink.append(group)
        else:
            skipped.append(Skip(name=group.name, kind=group.kind, reason=reason))
    return channels, may_shrink, skipped


def finished(
    model: keras.Model,
    config: StructuredPruningConfig,
    channels: ChannelGroups,
    groups: Sequence[Group],
    kept: Any,
    skipped: Sequence[Skip],
    *,
    metrics: Mapping[str, float] | None = None,
) -> ShrinkResult:
    """Builds the smaller model of the kept units, with its report, and warns if nothing changed."""
    smaller = without_channels(model, channels, kept)
    counts, uncounted = _multiply_adds(model, smaller, channels, config)
    report = _report(channels, groups, kept, [*skipped, *uncounted], {**counts, **(metrics or {})})
    report.warn_if_unchanged()
    return ShrinkResult(smaller, report, {group.name: _indices(group, kept) for group in channels.groups})


def _multiply_adds(
    model: keras.Model, smaller: keras.Model, channels: ChannelGroups, config: StructuredPruningConfig
) -> tuple[dict[str, float], list[Skip]]:
    """Counts both models in their graphs, and warns if the smaller one has more than its target."""
    try:
        before, after = channels.counted, count_flops(smaller, open_size=config.open_size)
    except ConfigError as error:  # an open size that no target needed
        return {}, [Skip(name=model.name, kind="multiply-adds", reason=f"not counted. {error}")]
    if config.target_flops is not None and after.multiply_adds > config.target_flops * before.multiply_adds:
        warn(
            f"target_flops={config.target_flops:g} is not reached: the smaller model has "
            f"{after.multiply_adds / before.multiply_adds:.2f} of the multiply-adds. Set a smaller target_flops."
        )
    unknown = [Skip(name=model.name, kind="multiply-adds", reason=f"not counted: {each}") for each in before.uncounted]
    counts = {"multiply_adds": float(after.multiply_adds), "multiply_adds_before": float(before.multiply_adds)}
    return counts, unknown


def _check_model(model: Any) -> None:
    check_keras_3(model)
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


def _reason_to_keep(group: Group, config: StructuredPruningConfig, excluded: bool) -> str | None:
    if excluded:
        return "excluded"
    if len(group.units) <= group.step(config.round_to):
        if group.whole:
            return "it has one head or group"
        return f"{len(group.units)} channels are no more than round_to={group.multiple(config.round_to)}"
    if config.criterion == "bn_scale" and group.scales() is None:
        return "it has no batch normalization with a scale"
    return None


def _excluded(channels: ChannelGroups, patterns: tuple[str, ...]) -> set[str]:
    """Returns the names of the groups that are the widths of the layers that a pattern names."""
    paths = {weight.layer for weight in channels.trace.weights.values()}
    paths |= {resized.path for resized in channels.trace.resized.values()}
    excluded: set[str] = set()
    for pattern in patterns:
        named = {path for path in paths if is_matched(path, pattern)}
        if not named:
            raise ConfigError(f"exclude must name layers of the model. Received: {pattern!r}, which no layer has.")
        excluded.update(name for path in named for name in channels.groups_of(path))
    return excluded


def _report(
    channels: ChannelGroups, groups: Sequence[Group], kept: Any, skipped: Sequence[Skip], figures: Mapping[str, float]
) -> PassReport:
    changed, unchanged = [], []
    for group in groups:
        left, size = len(_indices(group, kept)), len(group.units)
        if left == size:
            unchanged.append(Skip(name=group.name, kind=group.kind, reason=f"all {size} {group.unit_name} stay"))
            continue
        detail = f"{size} -> {left} {group.unit_name}, in {len(group.members)} weights"
        if group.normalized:
            detail += f"; the statistics of {group.normalized[0]} change"
        changed.append(Change(name=group.name, kind=group.kind, detail=detail))
    metrics = {
        "parameters": float(channels.parameters(kept)),
        "parameters_before": float(channels.parameters(channels.all_kept)),
        **figures,
    }
    return PassReport(name="shrink", changed=tuple(changed), skipped=(*skipped, *unchanged), metrics=metrics)


def _indices(group: Group, kept: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in kept[group.units].nonzero()[0])


def without_channels(model: keras.Model, channels: ChannelGroups, kept: Any) -> keras.Model:
    """Returns a new model of the kept units. Layers, names, inputs and outputs are those of the model."""
    return on_devices_of(model, _Smaller(channels, kept).model, model)


class _Smaller(Rebuild):
    def __init__(self, channels: ChannelGroups, kept: Any) -> None:
        super().__init__()
        self.channels, self.kept = channels, kept

    def input_shape(self, tensor: Any) -> list[int | None]:
        """Returns the shape of a new input. That of a nested model may have fewer channels."""
        axes = self.channels.trace.tensors[id(tensor)].axes
        return [
            self._size(axis) if isinstance(axis, np.ndarray) else size
            for axis, size in zip(axes, tensor.shape, strict=True)
        ]

    def operation(self, operation: Any) -> Any:
        """Returns a copy of an operation whose config has the new sizes."""
        resized = self.channels.trace.resized.get(id(operation))
        if resized is None:
            return plain_copy(operation)
        config = copy.deepcopy(operation.get_config())
        for path, setting in resized.settings.items():
            place = config
            for name in path[:-1]:
                place.pop("build_config", None)  # of a wrapped layer: it would be built for the old sizes
                place = place[name]
            place[path[-1]] = self._value(setting)
        return plain_copy(operation, **config)

    def part(self, variable: Any, values: Any) -> Any:
        """Returns the kept part of a variable's values."""
        weight = self.channels.trace.weights.get(id(variable))
        for dimension, axis in enumerate(weight.axes if weight else ()):
            if isinstance(axis, np.ndarray):
                values = np.take(values, self.channels.kept_indices(axis, self.kept), axis=dimension)
        return values

    def _value(self, setting: Setting) -> Any:
        if isinstance(setting, Part):
            return self._size(setting.ids) // setting.divisor
        if isinstance(setting, np.ndarray):
            return self._size(setting)
        return [self._value(each) for each in setting] if isinstance(setting, list | tuple) else setting

    def _size(self, axis: Any) -> int:
        return self.channels.size(axis, self.kept)


TRIES = 8
NEAR = 0.03  # a ratio this near to the target ends the search


def meet_latency(
    model: keras.Model, channels: ChannelGroups, ranked: Sequence[Ranked], config: StructuredPruningConfig
) -> tuple[Any, Latency]:
    """Returns the units that stay, and the times that were measured.

    Raises:
        ConfigError: The smallest possible model is too slow, as far as the turns can tell, or an open size of the input
            besides the batch.
    """
    target = config.target_latency
    assert target is not None
    parent = timed_function(model, config.batch_size, config.open_size)
    everything = channels.multiply_adds(channels.all_kept)

    def measured(kept: Any) -> tuple[float, Any, Latency]:
        smaller = timed_function(without_channels(model, channels, kept), config.batch_size, config.open_size)
        return channels.multiply_adds(kept) / everything, kept, compare_latency(parent, smaller)

    least, _, latency = best = measured(smallest(channels, ranked, config))
    if latency.least > target:
        raise ConfigError(
            f"target_latency must be reachable. Received: {target:g}, and the smallest possible model takes "
            f"{latency.ratio:.2f} of the time, with max_ratio={config.max_ratio:g} and round_to={config.round_to}. Set "
            "a larger target, a larger max_ratio or a smaller round_to."
        )
    low, high = (least, latency.ratio), (1.0, 1.0)  # (share of the multiply-adds, share of the time)
    for _ in range(TRIES):
        if abs(best[2].ratio / target - 1) <= NEAR:
            break
        share = float(np.interp(target, (low[1], high[1]), (low[0], high[0])))
        share, _, latency = tried = measured(
            meet(channels, ranked, config, channels.multiply_adds, max(share, least) * everything)
        )
        if abs(latency.ratio - target) < abs(best[2].ratio - target):
            best = tried
        if latency.ratio <= target:
            low = (share, latency.ratio)
        else:
            high = (share, latency.ratio)
    return best[1], best[2]
