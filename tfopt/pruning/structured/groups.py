"""Groups of channels that can be removed, each with the weights it runs through.

The units of one group lie in the same axes of the same weights, equally often. So a group is what a layer calls its
width: the filters of a convolution with the normalization after it and the rows of the next kernel; the heads of an
attention; the units of an LSTM. Channels that an addition couples across blocks are one group.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from tfopt.compat.kinds import check_keras_3
from tfopt.profiling.cost import FlopCount, count_flops
from tfopt.pruning.channels.call import Ids, Resized, Trace, TracedWeight, axes_in
from tfopt.pruning.channels.tracing import trace_model
from tfopt.report import Skip

# Input channels that a strided convolution of single pixels keeps. With fewer, oneDNN's kernel for the gradient of its
# filter writes past its memory on processors with AVX-512 (oneDNN#6035, in TensorFlow 2.21): training crashes.
LEAST_STRIDED = 16
# Channels that the kernels of AVX-512 compute at once, in int8 and in float32: 40 take as long as 48.
KERNEL_WIDTH = 16


@dataclass(frozen=True)
class Member:
    """An axis of a weight that a group runs through. `indices` [units, times] are those of each unit."""

    weight: TracedWeight
    dimension: int
    indices: Ids

    def __str__(self) -> str:
        return f"{self.weight.layer}.{self.weight.variable.name} axis {self.dimension}"


@dataclass(frozen=True)
class Group:
    """Channels that a model can lose one by one, each with all its weights.

    Attributes:
        name: Path of the first layer of the group, the one that computes the channels; with ":2" for a second group of
            this layer.
        units: Numbers of the units.
        members: The axes of weights that hold them.
        channels: Number of channels of each unit.
        whole: Whether a unit is a head or a group of channels. The number of units need not be a multiple of anything.
        normalized: The layers that compute statistics over these channels. Without them the removal is exact.
        least_channels: Number of channels that must stay.
    """

    name: str
    units: Ids
    members: tuple[Member, ...]
    channels: int
    whole: bool
    normalized: tuple[str, ...] = ()
    least_channels: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {len(self.units)} {self.unit_name} in " + ", ".join(map(str, self.members))

    @property
    def kind(self) -> str:
        """The class of the first layer."""
        return self.members[0].weight.kind

    @property
    def unit_name(self) -> str:
        """What a unit is, in the plural."""
        if not self.whole:
            return "channels"
        return "heads" if self.channels == 1 else f"groups of {self.channels} channels"

    def values(self) -> Any:
        """Returns the values of all kernels that belong to each unit, [units, values]."""
        return self._rows([member for member in self.members if len(member.weight.variable.shape) > 1])

    def scales(self) -> Any:
        """Returns the scales of the batch normalizations, [units, values]; None without any."""
        wanted = ("BatchNormalization", "gamma")
        found = [each for each in self.members if (each.weight.kind, each.weight.variable.name) == wanted]
        return self._rows(found) if found else None

    def _rows(self, members: Sequence[Member]) -> Any:
        values = (np.moveaxis(each.weight.variable.numpy(), each.dimension, 0)[each.indices] for each in members)
        return np.concatenate([each.astype(np.float32).reshape(len(self.units), -1) for each in values], axis=1)

    def multiple(self, round_to: int | None) -> int:
        """Returns the number that the width stays a multiple of: by default one that suits it."""
        if round_to is not None:
            return round_to
        return KERNEL_WIDTH if len(self.units) * self.channels >= 4 * KERNEL_WIDTH else KERNEL_WIDTH // 2

    def step(self, round_to: int | None) -> int:
        """Returns the number of units whose channels are a multiple of `round_to`. Heads count one by one."""
        multiple = self.multiple(round_to)
        return 1 if self.whole else multiple // math.gcd(multiple, self.channels)


class ChannelGroups:
    """The groups of a model, and what the model costs with a part of their units.

    Attributes:
        groups: The groups, in the order of computation.
        fixed: The layers whose width is kept, with the reasons.

    Args:
        model: A built functional or Sequential Keras 3 model with its channels last.
        widths: Whether channels over which a layer computes statistics may be removed.
        open_size: Size of the open dimensions besides the batch, for which multiply-adds are counted.

    Example:
        >>> from keras import layers
        >>> model = keras.Sequential([keras.Input((4,)), layers.Dense(16, name="a"), layers.Dense(2, name="b")])
        >>> print(ChannelGroups(model))
        a: 16 channels in a.kernel axis 1, a.bias axis 0, b.kernel axis 0
    """

    def __init__(self, model: keras.Model, widths: bool = False, open_size: int | None = None) -> None:
        check_keras_3(model)
        self.trace: Trace = trace_model(model, widths, open_size)
        self._model, self._open_size = model, open_size
        self._parameters = int(model.count_params())
        self._unit_of, self._reasons = self.trace.elements.units()
        self.groups = self._find_groups()
        self.fixed = tuple(self._find_fixed())

    def __str__(self) -> str:
        return "\n".join(map(str, self.groups))

    @property
    def all_kept(self) -> Any:
        """A boolean for each unit, True. The other methods take such an array."""
        return np.ones(int(self._unit_of.max(initial=0)) + 1, dtype=bool)

    def groups_of(self, path: str) -> set[str]:
        """Returns the names of the groups that are the width of a layer, or run through a layer without one."""
        for resized in self.trace.resized.values():
            if resized.path == path:
                units = self._units_of(_axes_of(resized))
                return {group.name for group in self.groups if units & set(group.units.tolist())}
        return {group.name for group in self.groups if any(member.weight.layer == path for member in group.members)}

    def kept_indices(self, axis: Any, kept: Any) -> Ids:
        """Returns the indices of an axis that stay."""
        return np.flatnonzero(kept[self._unit_of[axis]])

    def size(self, axis: Any, kept: Any) -> int:
        """Returns how many indices of an axis stay."""
        return int(np.count_nonzero(kept[self._unit_of[axis]]))

    def shape(self, weight: TracedWeight, kept: Any) -> tuple[int, ...]:
        """Returns the shape of a weight with the kept units alone."""
        return tuple(
            self.size(axis, kept) if isinstance(axis, np.ndarray) else int(size)
            for axis, size in zip(weight.axes, weight.variable.shape, strict=True)
        )

    def mask(self, weight: TracedWeight, kept: Any) -> Any:
        """Returns a boolean array of a weight's shape, False where a value belongs to a removed unit."""
        mask = np.ones(weight.variable.shape, dtype=bool)
        for dimension, axis in enumerate(weight.axes):
            if isinstance(axis, np.ndarray):
                stays = kept[self._unit_of[axis]]
                mask &= stays.reshape([-1 if each == dimension else 1 for each in range(mask.ndim)])
        return mask

    def parameters(self, kept: Any) -> int:
        """Returns the number of parameters, those of the normalizations' statistics included."""
        weights = self.trace.weights.values()
        removed = sum(math.prod(weight.variable.shape) - math.prod(self.shape(weight, kept)) for weight in weights)
        return self._parameters - removed

    @cached_property
    def counted(self) -> FlopCount:
        """The multiply-adds of the model as it is. A ConfigError if a dimension is open and open_size is None."""
        return count_flops(self._model, open_size=self._open_size)

    def multiply_adds(self, kept: Any) -> int:
        """Returns the multiply-adds of an example. What tfopt does not follow has as many as before."""
        return self.counted.multiply_adds - self._followed(self.all_kept) + self._followed(kept)

    def _followed(self, kept: Any) -> int:
        return sum(count * math.prod(self.size(axis, kept) for axis in axes) for count, axes in self.trace.work)

    def _find_groups(self) -> tuple[Group, ...]:
        places: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # unit -> (weight, dimension, index)
        weights = list(self.trace.weights.values())
        for number, weight in enumerate(weights):
            for dimension, axis in enumerate(weight.axes):
                if isinstance(axis, np.ndarray):
                    for index, unit in enumerate(self._unit_of[axis].tolist()):
                        places[unit].append((number, dimension, index))
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for unit, found in sorted(places.items()):
            if unit not in self._reasons:
                alike[tuple((number, dimension) for number, dimension, _ in found)].append(unit)
        whole = self._units_of(self.trace.heads)
        strided = self._units_of(self.trace.strided)
        normalized = [(name, self._units_of([axis])) for axis, name in self.trace.normalized]
        groups: list[Group] = []
        for signature, units in alike.items():
            indices = np.array([[index for _, _, index in places[unit]] for unit in units])
            columns: dict[tuple[int, int], list[int]] = defaultdict(list)
            for column, place in enumerate(signature):
                columns[place].append(column)
            members = tuple(
                Member(weights[number], dimension, indices[:, where]) for (number, dimension), where in columns.items()
            )
            groups.append(
                Group(
                    name=_free_name(members[0].weight.layer, {group.name for group in groups}),
                    units=np.array(units),
                    members=members,
                    channels=min(member.indices.shape[1] for member in members),
                    whole=bool(whole & set(units)),
                    least_channels=LEAST_STRIDED if strided & set(units) else 1,
                    normalized=tuple(dict.fromkeys(name for name, found in normalized if found & set(units))),
                )
            )
        return tuple(groups)

    def _units_of(self, axes: Sequence[Ids]) -> set[int]:
        return {unit for axis in axes for unit in np.unique(self._unit_of[axis]).tolist()}

    def _find_fixed(self) -> list[Skip]:
        fixed = list(self.trace.not_followed.values())
        for resized in self.trace.resized.values():
            reasons = [self._reasons.get(unit) for unit in self._units_of(_axes_of(resized))]
            if reasons and all(reasons) and resized.path not in self.trace.not_followed:
                kind = type(resized.operation).__name__
                fixed.append(Skip(name=resized.path, kind=kind, reason=reasons[0] or ""))
        return fixed


def _free_name(layer: str, taken: set[str]) -> str:
    """Returns the name of a layer's group, with a number if the layer has several: heads and output channels."""
    numbered = (f"{layer}:{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([layer], numbered) if name not in taken)


def _axes_of(resized: Resized) -> list[Ids]:
    return [axis for value in resized.settings.values() for axis in axes_in(value)]
