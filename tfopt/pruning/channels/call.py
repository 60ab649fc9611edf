"""What a rule sees of a model: one call of a layer or operation, with the axes of its tensors and weights.

Each index of an axis is an element: one output channel of a convolution, one row of a dense kernel. An axis is an array
of the numbers of its elements. Concatenating axes is concatenating arrays, and flattening a map [height, width,
channels] repeats the array of the channels for each pixel.

A rule couples elements. `Add` couples channel i of both inputs; a convolution couples channel i of its input to row i
of its kernel. Coupled elements form a unit: they are removed together, or stay together. An element that is fixed, such
as a channel of the model's input, keeps its whole unit. A rule also says which settings of the layer have which size,
counts the multiply-adds, and returns the axes of each output. It knows nothing of groups, scores or surgery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from tfopt.report import Skip

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Fixed:
    """An axis that keeps all its elements, with the reason."""

    reason: str


Axis: TypeAlias = Ids | Fixed


class Elements:
    """All elements of the axes of a model.

    Example:
        >>> elements = Elements()
        >>> one, other = elements.new(3), elements.new(3)
        >>> elements.join(one, other)
        >>> elements.join(other[:1], Fixed("it is an input"))
        >>> units, reasons = elements.units()
        >>> units.tolist(), reasons
        ([0, 1, 2, 0, 1, 2], {0: 'it is an input'})
    """

    def __init__(self) -> None:
        self._count = 0
        self._joined: list[tuple[Ids, Ids]] = []
        self._fixed: list[tuple[Ids, str]] = []

    def new(self, count: int) -> Ids:
        """Returns the numbers of new elements."""
        ids = np.arange(self._count, self._count + count)
        self._count += count
        return ids

    def join(self, one: Axis, other: Axis) -> None:
        """Couples each element of an axis to the element at the same index of another axis."""
        if isinstance(one, Fixed):
            one, other = other, one
        if isinstance(one, Fixed):
            return
        if isinstance(other, Fixed):
            self._fixed.append((one.ravel(), other.reason))
            return
        assert one.size == other.size, (one.shape, other.shape)
        self._joined.append((one.ravel(), other.ravel()))

    def tie(self, rows: Ids) -> None:
        """Couples all elements of each row of a two-dimensional array."""
        if rows.shape[1] > 1:
            self.join(rows[:, 1:], np.repeat(rows[:, :1], rows.shape[1] - 1, axis=1))

    def units(self) -> tuple[Ids, dict[int, str]]:
        """Returns the unit of each element, and for each fixed unit the first reason."""
        if not self._joined:
            labels = np.arange(self._count)
        else:
            rows, columns = (np.concatenate(ids) for ids in zip(*self._joined, strict=True))
            edges = coo_matrix((np.ones(rows.size, bool), (rows, columns)), shape=(self._count, self._count))
            _, labels = connected_components(edges, directed=False)
        reasons: dict[int, str] = {}
        for ids, reason in self._fixed:
            for unit in np.unique(labels[ids]).tolist():
                reasons.setdefault(unit, reason)
        return labels.astype(np.int64), reasons


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the model.

    Attributes:
        shape: Its shape with the batch, None where a size is open.
        axes: The axis of each dimension.
        sizes: Its shape in the call whose multiply-adds are counted, where no size is open.
    """

    shape: tuple[int | None, ...]
    axes: tuple[Axis, ...]
    sizes: tuple[int, ...]

    @property
    def channels(self) -> Axis:
        """The last axis."""
        return self.axes[-1]


@dataclass(frozen=True)
class Part:
    """The size of an axis divided by a number, for settings that count groups or heads."""

    ids: Ids
    divisor: int


Setting: TypeAlias = Any
"""A value of a layer's config in which an axis (or a `Part` of it) stands for its size."""


@dataclass(frozen=True)
class TracedWeight:
    """A variable of a layer: the path and class of the layer, and the axis of each of its dimensions."""

    layer: str
    kind: str
    variable: Any
    axes: list[Axis]


@dataclass(frozen=True)
class Resized:
    """An operation of the model whose config holds sizes: its path in the model, and the settings by their path."""

    operation: Any
    path: str
    settings: dict[tuple[str, ...], Setting]


@dataclass
class Trace:
    """What the rules found in a model.

    Attributes:
        elements: The elements of all axes.
        weights: The variables with their axes, by id, in the order of computation.
        resized: The operations whose config holds sizes, by id.
        work: The multiply-adds of each call: a constant, times the sizes of axes.
        heads: Axes whose elements are groups or heads. Their number need not be a multiple of anything.
        normalized: Axes over which a layer computes statistics, with the layer's name.
        strided: Axes that a convolution of single pixels reads with a stride.
        widths: Whether such axes may lose elements, although the statistics then change.
        rules: The rule of each class of layers, for rules of layers that contain others.
        tensors: The tensors of the model and of nested models, by the id of the symbolic tensor.
        not_followed: The operations that keep all channels that enter or leave them, each with the reason, by path.
    """

    widths: bool = False
    rules: Mapping[type, Rule] = field(default_factory=dict)
    elements: Elements = field(default_factory=Elements)
    weights: dict[int, TracedWeight] = field(default_factory=dict)
    resized: dict[int, Resized] = field(default_factory=dict)
    work: list[tuple[int, tuple[Ids, ...]]] = field(default_factory=list)
    heads: list[Ids] = field(default_factory=list)
    normalized: list[tuple[Ids, str]] = field(default_factory=list)
    strided: list[Ids] = field(default_factory=list)
    not_followed: dict[str, Skip] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class LayerCall:
    """One call of an operation.

    Attributes:
        trace: Where the rule notes what it finds.
        operation: The layer, or the operation of `keras.ops`. `owner` is the layer of the model that contains it.
        path: Path of the operation in the model.
        arguments: Positional and named arguments, in which a `Tensor` stands for each tensor of the model.
        shapes: Shapes of the outputs, None where a size is open.
        sizes: Shapes of the outputs in the call whose multiply-adds are counted.
        prefix: Path of the operation's config in that of `owner`.
    """

    trace: Trace
    operation: Any
    path: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    shapes: list[tuple[int | None, ...]]
    sizes: list[tuple[int, ...]]
    owner: Any = None
    prefix: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [each for each in keras.tree.flatten(self.arguments) if isinstance(each, Tensor)]

    @property
    def x(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    def __str__(self) -> str:
        return f"{self.path!r} ({type(self.operation).__name__})"

    def join(self, one: Axis, other: Axis) -> None:
        self.trace.elements.join(one, other)

    def tie(self, rows: Ids) -> None:
        self.trace.elements.tie(rows)

    def same(self, axes: Sequence[Axis]) -> Axis:
        """Couples axes element by element, and returns one for all: a fixed one fixes the others, so not that one."""
        kept: Axis = next((axis for axis in axes if isinstance(axis, np.ndarray)), axes[0])
        for axis in axes:
            if axis is not kept:
                self.join(axis, kept)
        return kept

    def fix(self, axis: Axis, reason: str) -> Fixed:
        """Keeps all elements of an axis. The reason follows the name of the operation."""
        fixed = Fixed(f"{self} {reason}")
        self.join(axis, fixed)
        return fixed

    def fix_all(self, reason: str) -> list[tuple[Axis, ...]]:
        """Keeps all elements of all inputs and outputs. Returns the axes of the outputs."""
        kind = type(self.owner or self.operation).__name__
        self.trace.not_followed.setdefault(self.path, Skip(name=self.path, kind=kind, reason=f"it {reason}"))
        for tensor in self.tensors:
            self.fix_axes(tensor.axes, reason)
        fixed = Fixed(f"{self} {reason}")
        return [(fixed,) * len(shape) for shape in self.shapes]

    def fix_axes(self, axes: Sequence[Axis], reason: str) -> tuple[Axis, ...]:
        """Keeps all elements of some axes."""
        return tuple(self.fix(axis, reason) for axis in axes)

    def weight(self, variable: Any, axis: int) -> Ids:
        """Returns the elements of an axis of a variable. They are the same for each call of a shared layer."""
        weights = self.trace.weights
        if id(variable) not in weights:
            reason = f"{self} needs all of it"
            weights[id(variable)] = TracedWeight(
                self.path, type(self.operation).__name__, variable, [Fixed(reason) for _ in variable.shape]
            )
        axes, axis = weights[id(variable)].axes, axis % len(variable.shape)
        found = axes[axis]
        if isinstance(found, Fixed):
            found = axes[axis] = self.trace.elements.new(variable.shape[axis])
        return found

    def follow(self, variable: Any, axis: Axis, at: int = -1) -> None:
        """Couples an axis of a variable to an axis of a tensor. A variable of None is left out."""
        if variable is not None:
            self.join(self.weight(variable, at), axis)

    def normalized(self, axis: Axis) -> Axis:
        """Returns an axis after statistics over it. It keeps all its elements, unless widths may change."""
        if not self.trace.widths:
            return self.fix(axis, "computes statistics over these channels, and widths=False keeps them")
        if not isinstance(axis, Fixed):
            self.trace.normalized.append((axis, self.path))
        return axis

    def resize(self, setting: str, value: Setting) -> None:
        """Notes a setting of the operation whose value is a size. A shared layer has the same size in each call."""
        path = (*self.prefix, setting)
        owner = self.owner or self.operation
        found = self.trace.resized.setdefault(id(owner), Resized(owner, self.path, {})).settings
        if path in found:
            for one, other in zip(axes_in(found[path]), axes_in(value), strict=True):
                self.join(one, other)
        found[path] = value

    def work(self, sizes: Sequence[int], *axes: Axis | int) -> None:
        """Counts sizes times the sizes of axes as multiply-adds. The batch is one of the sizes."""
        known = [*sizes, *(axis for axis in axes if isinstance(axis, int))]
        ids = tuple(axis for axis in axes if isinstance(axis, np.ndarray))
        self.trace.work.append((math.prod(known), ids))


Rule: TypeAlias = Callable[[LayerCall], Sequence[tuple[Axis, ...]]]


def axes_in(value: Setting) -> list[Ids]:
    """Returns the axes in a setting."""
    if isinstance(value, Part):
        return [value.ids]
    if isinstance(value, np.ndarray):
        return [value]
    return [axis for each in value for axis in axes_in(each)] if isinstance(value, list | tuple) else []
