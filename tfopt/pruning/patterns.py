"""Patterns: which weights of a kernel are pruned together, so that hardware can use their zeros.

A kernel is seen as a stack of matrices [others, reduction, outputs]. A product sums over the reduction axis, the input
channels of a dense layer or a convolution. A convolution also sums over its window, which gives the others.

A pattern divides a kernel into units. A unit is kept whole, or is pruned: then it loses all its weights, or with n:m
all but n. `sparsity` is the share of pruned units, times the share of zeros in a pruned unit.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfopt.errors import ConfigError

LARGEST_TRANSPOSABLE = 4  # the masks of a larger square are too many to try


class Pattern(ABC):
    """A way to divide kernels into units.

    Attributes:
        zeros: Share of zeros in a pruned unit.
    """

    zeros: float = 1.0

    @abstractmethod
    def units(self, scores: Any, reduction: Sequence[int]) -> Any:
        """Returns the score of each unit, in one dimension. -inf marks weights, or a unit, that are pruned already."""

    @abstractmethod
    def mask(self, scores: Any, reduction: Sequence[int], kept: Any) -> Any:
        """Returns the mask of a kernel, True where a weight is kept, from a boolean for each unit."""

    def count_pruned(self, kept: Any, reduction: Sequence[int]) -> tuple[int, int]:
        """Returns how many units a mask prunes, and how many there are."""
        units = self.units(np.where(kept, 0.0, -np.inf), reduction)
        return int(np.count_nonzero(np.isneginf(units))), int(units.size)


class Unstructured(Pattern):
    """Every weight is a unit."""

    def count_pruned(self, kept: Any, reduction: Sequence[int]) -> tuple[int, int]:
        return int(kept.size - np.count_nonzero(kept)), int(kept.size)

    def units(self, scores: Any, reduction: Sequence[int]) -> Any:
        return scores.ravel()

    def mask(self, scores: Any, reduction: Sequence[int], kept: Any) -> Any:
        return kept.reshape(scores.shape)


class Blocks(Pattern):
    """Blocks of `rows` inputs and `columns` outputs, by the mean of their scores. Blocks at the edge are smaller.

    Example:
        >>> Blocks(1, 2).units(np.array([[1.0, 3.0, 5.0]]), (0,))
        array([2., 5.])

    Reference:
        Narang et al., "Block-Sparse Recurrent Neural Networks", arXiv:1711.02782.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def units(self, scores: Any, reduction: Sequence[int]) -> Any:
        blocks = self._blocks(scores, reduction)
        pruned = np.isneginf(blocks)
        sums = np.where(pruned, 0, blocks)
        inside = ~np.isnan(blocks)
        means = np.where(inside, sums, 0).sum((1, 3)) / inside.sum((1, 3))
        return np.where((pruned | ~inside).all((1, 3)), -np.inf, means).ravel()

    def mask(self, scores: Any, reduction: Sequence[int], kept: Any) -> Any:
        blocks = self._blocks(scores, reduction)
        across = kept.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
        full = np.broadcast_to(across, blocks.shape).reshape(blocks.shape[0] * self.rows, -1)
        stack = as_stack(scores, reduction)
        height, width = stack.shape[0] * stack.shape[1], stack.shape[2]
        return from_stack(full[:height, :width].reshape(stack.shape), scores.shape, reduction)

    def _blocks(self, scores: Any, reduction: Sequence[int]) -> Any:
        """Returns [rows of blocks, rows, columns of blocks, columns]; NaN outside the kernel."""
        stack = as_stack(scores, reduction)
        matrix = stack.reshape(-1, stack.shape[2])
        padded = _padded(_padded(matrix, 0, self.rows), 1, self.columns)
        return padded.reshape(padded.shape[0] // self.rows, self.rows, -1, self.columns)


class NOfM(Pattern):
    """At most n of m successive weights along the reduction axis are not zero. The last group may be smaller.

    Sparse tensor cores of NVIDIA compute 2:4 kernels up to twice as fast.

    Example:
        >>> NOfM(2, 4).mask(np.array([[4.0], [1.0], [3.0], [2.0]]), (0,), np.array([False])).ravel()
        array([ True, False,  True, False])

    Reference:
        Mishra et al., "Accelerating Sparse Deep Neural Networks", arXiv:2104.08378.
    """

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self.zeros = 1 - n / m

    def units(self, scores: Any, reduction: Sequence[int]) -> Any:
        groups = self._groups(scores, reduction)
        lost = np.sort(groups, axis=2)[:, :, : self.m - self.n]  # NaN, which is padding, comes last
        return _lost(lost, axis=2).ravel()

    def mask(self, scores: Any, reduction: Sequence[int], kept: Any) -> Any:
        groups = self._groups(scores, reduction)
        # Padding counts as a zero, so a smaller group keeps n as well. Of equal scores the first is kept.
        order = np.argsort(-np.where(np.isnan(groups), -np.inf, groups), axis=2, kind="stable")
        best = np.zeros(groups.shape, dtype=bool)
        np.put_along_axis(best, order[:, :, : self.n], values=True, axis=2)
        full = best | kept.reshape(*groups.shape[:2], 1, groups.shape[3])
        stack = as_stack(scores, reduction)
        full = full.reshape(stack.shape[0], -1, stack.shape[2])[:, : stack.shape[1]]
        return from_stack(full, scores.shape, reduction)

    def _groups(self, scores: Any, reduction: Sequence[int]) -> Any:
        """Returns [others, groups, m, outputs]; NaN outside the kernel."""
        stack = _padded(as_stack(scores, reduction), 1, self.m)
        return stack.reshape(stack.shape[0], -1, self.m, stack.shape[2])


class TransposableNOfM(NOfM):
    """n:m along the reduction axis and along the outputs, so that the gradient for the inputs is a sparse product too.

    Each square of m inputs and m outputs gets the mask with the largest sum of scores among all those with n weights in
    each row and column.

    Reference:
        Hubara et al., "Accelerated Sparse Neural Training", NeurIPS 2021, arXiv:2102.08124.
    """

    def units(self, scores: Any, reduction: Sequence[int]) -> Any:
        squares = self._squares(scores, reduction)
        best = self._best(squares)
        return _lost(np.where(best, np.nan, squares), axis=(2, 4)).ravel()

    def mask(self, scores: Any, reduction: Sequence[int], kept: Any) -> Any:
        squares = self._squares(scores, reduction)
        full = self._best(squares) | kept.reshape(*squares.shape[:2], 1, squares.shape[3], 1)
        stack = as_stack(scores, reduction)
        full = full.reshape(squares.shape[0], squares.shape[1] * self.m, -1)
        return from_stack(full[:, : stack.shape[1], : stack.shape[2]], scores.shape, reduction)

    def _squares(self, scores: Any, reduction: Sequence[int]) -> Any:
        """Returns [others, rows of squares, m, columns of squares, m]; NaN outside the kernel."""
        stack = _padded(_padded(as_stack(scores, reduction), 1, self.m), 2, self.m)
        return stack.reshape(stack.shape[0], stack.shape[1] // self.m, self.m, -1, self.m)

    def _best(self, squares: Any) -> Any:
        masks = _square_masks(self.n, self.m)
        finite = np.isfinite(squares)
        least = squares[finite].min(initial=0.0)
        span = float(np.abs(squares[finite]).sum()) + 1.0
        known = np.where(np.isnan(squares), least, np.where(np.isneginf(squares), least - span, squares))
        by_square = np.moveaxis(known, 3, 2).reshape(*known.shape[:2], known.shape[3], -1)
        found = masks[(by_square @ masks.reshape(len(masks), -1).T).argmax(-1)]
        return np.moveaxis(found, 2, 3)


@functools.cache
def _square_masks(n: int, m: int) -> Any:
    """Returns all masks [masks, m, m] with n weights in each row and each column; 90 for 2:4."""
    rows = [np.isin(np.arange(m), chosen) for chosen in itertools.combinations(range(m), n)]
    masks = (np.array(each) for each in itertools.product(rows, repeat=m))
    return np.array([mask for mask in masks if (mask.sum(0) == n).all()])


def parse_pattern(text: str, transposable: bool = False) -> Pattern:
    """Returns the pattern that a text names: "unstructured", "2:4", "4x4".

    Example:
        >>> parse_pattern("2:4").zeros
        0.5
    """
    if transposable and not re.fullmatch(r"\d+:\d+", text):
        raise ConfigError(
            f"transposable must be False unless the pattern is n:m. Received: transposable=True, pattern={text!r}. "
            "Set pattern='2:4'."
        )
    if text == "unstructured":
        return Unstructured()
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        rows, columns = map(int, match.groups())
        if not rows * columns:
            raise ConfigError(f"A block must have at least one row and one column. Received: pattern={text!r}.")
        return Blocks(rows, columns)
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = map(int, match.groups())
        if not 0 < n < m:
            raise ConfigError(
                "n:m must keep at least one and fewer than m of m weights. "
                f"Received: pattern={text!r}. Set for example pattern='2:4'."
            )
        if transposable and m > LARGEST_TRANSPOSABLE:
            raise ConfigError(
                f"A transposable n:m must have m of at most {LARGEST_TRANSPOSABLE}. Received: pattern={text!r}. "
                "Set pattern='2:4'."
            )
        return TransposableNOfM(n, m) if transposable else NOfM(n, m)
    raise ConfigError(
        f"pattern must be 'unstructured', n:m such as '2:4', or a block such as '4x4'. Received: pattern={text!r}."
    )


def as_stack(array: Any, reduction: Sequence[int]) -> Any:
    """Returns an array of a kernel's shape as [others, reduction, outputs].

    `reduction` is the last of the reduction axes, `others` are those before it: (3, 3, 16, 32) becomes (9, 16, 32).
    """
    *others, last = reduction
    outputs = [axis for axis in range(array.ndim) if axis not in reduction]
    moved = np.transpose(array, (*others, last, *outputs))
    return moved.reshape(math.prod(array.shape[axis] for axis in others), array.shape[last], -1)


def from_stack(stack: Any, shape: Sequence[int], reduction: Sequence[int]) -> Any:
    """Returns an array of a kernel's shape: undoes `as_stack`."""
    order = (*reduction, *(axis for axis in range(len(shape)) if axis not in reduction))
    return np.transpose(stack.reshape([shape[axis] for axis in order]), np.argsort(order))


def _padded(array: Any, axis: int, multiple: int) -> Any:
    """Returns an array with NaN at the end of an axis, so that its size is a multiple."""
    widths = [(0, -array.shape[axis] % multiple if each == axis else 0) for each in range(array.ndim)]
    return np.pad(np.asarray(array, np.float64), widths, constant_values=np.nan)


def _lost(scores: Any, axis: Any) -> Any:
    """Returns the sum of the scores that pruning a unit drops; -inf if all of them are pruned already."""
    dropped = np.where(np.isnan(scores), -np.inf, scores)
    return np.where(np.isneginf(dropped).all(axis), -np.inf, np.where(np.isfinite(dropped), dropped, 0).sum(axis))
