"""Elements of tensor axes, and which of them can only be removed together.

Each index of an axis is an element: one output channel of a convolution, one row of a dense kernel. An operation of a
model couples elements. `Add` couples channel i of both inputs; a convolution couples channel i of its input to row i of
its kernel. Coupled elements form a unit: they are removed together, or stay together. An element that is fixed, such as
a channel of the model's input, keeps its whole unit.

An axis is an array of the numbers of its elements. Concatenating axes is concatenating arrays, and flattening a map
[height, width, channels] repeats the array of the channels for each pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

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
