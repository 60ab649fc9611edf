"""Weights in few bits, and activations in float: integers with scales, or places in a codebook.

A matrix of weights is divided into groups. The weights of a group share one scale and are rounded to

    w  =  scale * q,    q in [-127, 127] for int8, [-8, 7] for int4

In int8 a group is a whole output channel. In int4 this would be too coarse, so a channel is divided into groups of
`group_size` weights along its inputs. The scale of an int4 group has the sign that puts its largest weight at -8, so
that all sixteen steps are used. Several scales near this one are tried, and the one with the least squared error wins.

Weights that share few values, as `tfopt.cluster` leaves them, are stored without any error: these values, and for each
weight the place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import ml_dtypes
import numpy as np
from annotated_types import Ge

from tfopt.settings.validation import Remedy, check_fields

Decode = Literal["load", "call"]
EXACT_PLACES = 2**24  # float32 holds each whole number up to this
SHRINK = np.array([8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7], np.float32)
"""Factors for the scale of an int4 group. With 8/7 the range is symmetric, from -7 to 7. A factor below 1 clips the
largest weight and gives all others finer steps."""


@dataclass(frozen=True, kw_only=True)
class WeightOnlyConfig:
    """Settings of the weights that an artifact stores in fewer bits than float32: in all precisions but that and int8.

    Example:
        >>> WeightOnlyConfig(group_size=32).decode
        'load'
    """

    group_size: Annotated[int, Ge(8), Remedy("32, 64 and 128 are usual.")] = 64
    """int4: number of weights along the inputs of a channel that share a scale. A smaller number is more accurate and
    makes a larger file."""
    decode: Decode = "load"
    """Time of decoding. "load": once, before the first call; calls are then as fast as in float32. "call": at every
    call, which takes time but keeps the weights small in memory."""
    minimum_size: Annotated[int, Ge(1), Remedy("1024 is usual.")] = 1024
    """Smallest number of values in a weight that is stored in few bits. Smaller weights stay float32."""
    exclude: tuple[str, ...] = ()
    """Names (or shell-style patterns such as '*/head/*') of graph nodes whose weights stay float32."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A matrix as integers with a scale for each group. Channel axis 1: each column is an output channel.

    The steps are int8, [groups, size, columns] or, if each row is a channel, [rows, groups, size]. Zeros fill up the
    last group of a channel. The scales are float32, the same shape with size 1. Those of int4 are rounded to bfloat16.
    """

    steps: np.ndarray
    scales: np.ndarray
    channel_axis: int
    shape: tuple[int, int]

    @property
    def filled_shape(self) -> tuple[int, int]:
        """The shape of the matrix with full last groups."""
        first, second, third = self.steps.shape
        return (first * second, third) if self.channel_axis == 1 else (first, second * third)

    def decoded(self) -> np.ndarray:
        rows, columns = self.shape
        return (self.steps * self.scales).reshape(self.filled_shape)[:rows, :columns]


def quantize_matrix(matrix: np.ndarray, *, bits: int, group_size: int | None, channel_axis: int) -> Grouped:
    """Rounds a finite float32 matrix to integers of 8 or 4 bits. A group of a channel's inputs shares a scale.

    Example:
        >>> grouped = quantize_matrix(np.float32([[1.0, -8.0], [-0.5, 4.0]]), bits=8, group_size=None, channel_axis=1)
        >>> grouped.steps[0].tolist()
        [[127, -127], [-64, 64]]
    """
    groups = _divide(matrix, group_size, channel_axis)
    axis = 2 - channel_axis  # of the members of a group
    rows, columns = matrix.shape

    def rounded(scales: np.ndarray, limits: tuple[int, int]) -> Grouped:
        steps = np.clip(np.rint(groups / scales), *limits).astype(np.int8)
        return Grouped(steps=steps, scales=scales, channel_axis=channel_axis, shape=(rows, columns))

    if bits == 8:
        return rounded(_or_one(np.abs(groups).max(axis=axis, keepdims=True) / 127), (-127, 127))
    outermost = np.take_along_axis(groups, np.abs(groups).argmax(axis=axis, keepdims=True), axis=axis)
    best, least = np.ones_like(outermost), np.full(outermost.shape, np.inf)
    for shrink in SHRINK:
        scales = _or_one((outermost * shrink / -8).astype(ml_dtypes.bfloat16).astype(np.float32))
        tried = rounded(scales, (-8, 7))
        # In float64, since the squares of tiny and of huge weights are no numbers of float32.
        error = np.square(tried.steps * scales - groups, dtype=np.float64).sum(axis=axis, keepdims=True)
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return rounded(best, (-8, 7))


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """A matrix as places in a list of its values: it is values[first + steps].

    The values are float32. The steps are int8 in the shape of the matrix, of 4 or 8 bits. `first` holds whole numbers
    in float32: one, or one for each channel, [1, columns] or [rows, 1].
    """

    values: np.ndarray
    steps: np.ndarray
    first: np.ndarray
    bits: int

    @property
    def size_bytes(self) -> int:
        return self.steps.size * self.bits // 8 + self.values.nbytes

    def decoded(self) -> np.ndarray:
        return self.values[(self.first + self.steps).astype(np.int64)]


def find_codebook(matrix: np.ndarray, channel_axis: int | None = None) -> Codebook | None:
    """Returns a finite float32 matrix as places in one codebook, or else in one for each channel, if there is an axis.

    Returns None if it has too many values: over 256, or so many that it would take more than half of its bytes.

    Example:
        >>> book = find_codebook(np.tile(np.float32([[0.5, -2.0], [0.0, 0.5]]), (4, 1)), channel_axis=1)
        >>> book.values.tolist(), book.steps[:2].tolist(), book.first.item(), book.bits
        ([-2.0, 0.0, 0.5], [[-6, -8], [-7, -6]], 8.0, 4)
    """
    for shared in (True,) if channel_axis is None else (True, False):
        rows = matrix.reshape(1, -1) if shared else matrix if channel_axis == 0 else matrix.T
        tables = [np.unique(row) + np.float32(0) for row in rows]  # which makes a zero of -0.0
        size = max(len(table) for table in tables)
        bits = 4 if size <= 16 else 8
        exact = shared or size * len(rows) <= EXACT_PLACES
        if exact and size <= 256 and bits * matrix.size + 32 * size * len(rows) <= 16 * matrix.size:
            break
    else:
        return None
    half = 2 ** (bits - 1)  # steps have a sign
    places = np.stack([np.searchsorted(table, row) for table, row in zip(tables, rows, strict=True)])
    steps, first = (places - half).astype(np.int8), np.arange(len(rows), dtype=np.float32)[:, None] * size + half
    return Codebook(
        values=np.concatenate([np.pad(table, (0, size - len(table))) for table in tables]),
        steps=steps.reshape(matrix.shape) if shared else steps if channel_axis == 0 else steps.T,
        first=first[0, 0] if shared else first if channel_axis == 0 else first.T,
        bits=bits,
    )


def _divide(matrix: np.ndarray, group_size: int | None, channel_axis: int) -> np.ndarray:
    """Returns the matrix with its input axis divided into groups. Zeros fill up the last group."""
    inputs = matrix.shape[1 - channel_axis]
    size = min(group_size or inputs, inputs)
    count = -(-inputs // size)
    missing = [(0, count * size - inputs), (0, 0)]
    filled = np.pad(matrix, missing if channel_axis == 1 else missing[::-1])
    rows, columns = filled.shape
    return filled.reshape((count, size, columns) if channel_axis == 1 else (rows, count, size))


def _or_one(scales: np.ndarray) -> np.ndarray:
    """Returns the scales with 1 for a group of zeros, where every scale is right."""
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)
