"""How calibration data use the ranges that were chosen for them, and what in the data makes int8 wrong elsewhere.

A range that is wrong for other data can look right on the calibration data. So the data themselves are examined: too
few examples, inputs that never change, and single values far beyond all others. The use of each range shows the rest: a
tensor most of whose values become zero, because a few values are so much larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfopt.errors import warn
from tfopt.graph.edit import producer
from tfopt.graph.frozen import FrozenGraph, full_name
from tfopt.quantization.annotation.grids import Range
from tfopt.quantization.calibration.calibrate import in_pieces, length
from tfopt.report import Change
from tfopt.report.record import RANGE

FEWEST = 16  # examples
WORST = 3  # tensors that a report names
WIDE = 10.0  # the largest value, as a multiple of the largest one without OUTLIERS
OUTLIERS = 1e-3  # share of the values, and at least one
MUCH_OF_INPUT, MUCH_OF_TENSOR, MUCH_SATURATED = 0.5, 0.95, 0.2
SHARES = ("Softmax", "Sigmoid")  # most of their values are about 0, and of no weight in what follows
CALIBRATION = "calibration"  # kind of the notes that are warned of


class RangeUse:
    """How the values of a tensor use its range."""

    def __init__(self, given: Range) -> None:
        self._scale, self._lowest, self._highest = given.scale, round(given.low / given.scale), given.steps
        self._levels = np.zeros(self._highest - self._lowest + 1, bool)
        self._values = self._nonzero = self._saturated = self._lost = 0

    def add(self, values: np.ndarray) -> None:
        steps = np.rint(values.reshape(-1) / self._scale)
        inside = np.clip(steps, self._lowest, self._highest)
        nonzero = int(np.count_nonzero(values))
        self._values += values.size
        self._nonzero += nonzero
        self._saturated += int(np.count_nonzero(steps != inside))
        self._lost += nonzero - int(np.count_nonzero(steps))
        self._levels[(inside - self._lowest).astype(np.int64)] = True

    @property
    def saturated(self) -> float:
        """Share of the values beyond the ends of the range."""
        return self._saturated / max(self._values, 1)

    @property
    def lost(self) -> float:
        """Share of the values other than 0 that become 0."""
        return self._lost / max(self._nonzero, 1)

    def __str__(self) -> str:
        return (
            f"{self.saturated:.2%} of the values saturated, {1 - float(self._levels.mean()):.0%} of the range unused, "
            f"{self.lost:.1%} of the values rounded to 0"
        )


def examine(graph: FrozenGraph, batches: Sequence[Mapping[str, Any]], ranges: Mapping[str, Range]) -> list[Change]:
    """Warns of calibration data that do not tell the ranges of other data, and returns the notes for the report.

    There is a note for each warning, and one for each of the ranges that are used worst; none without ranges.
    """
    if not ranges:
        return []
    uses = {tensor: RangeUse(each) for tensor, each in ranges.items()}
    function = graph.as_function(fetch=list(ranges))
    for piece in in_pieces(batches):
        for use, value in zip(uses.values(), function(**piece), strict=True):
            use.add(value.numpy())
    found = [*_of_inputs(graph, batches), *_of_tensors(graph, uses)]
    if found:
        words = "; ".join(f"{note.name!r}: {note.detail}" for note in found)
        warn(
            f"calibration_data must be like the data that the int8 model will get. Received: {words}. The int8 model "
            "may be wrong on other data. Pass 100 to 500 examples of real, normalised inputs without outliers."
        )
    worst = sorted(uses, key=lambda tensor: uses[tensor].saturated + uses[tensor].lost, reverse=True)[:WORST]
    return found + [Change(name=tensor, kind=RANGE, detail=str(uses[tensor])) for tensor in worst]


def usual_limit(parts: Sequence[np.ndarray]) -> float:
    """Returns the largest magnitude but for a few values that are far larger, or infinity where there are none.

    Zeros do not count, because inputs can be sparse.

    Example:
        >>> usual_limit([np.array([1.0, -2.0, 0.0, 1e6])]), usual_limit([np.array([1.0, -2.0, 3.0])])
        (2.0, inf)
    """
    magnitudes = np.concatenate([np.abs(part[part != 0]).astype(np.float64) for part in parts])
    few = max(int(magnitudes.size * OUTLIERS), 1)
    if magnitudes.size <= few:
        return math.inf
    usual = float(np.partition(magnitudes, -few - 1)[-few - 1])
    return usual if float(magnitudes.max()) > WIDE * usual else math.inf


def _of_inputs(graph: FrozenGraph, batches: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    examples = sum(map(length, batches))
    if examples < FEWEST:
        few = f"{examples} example{'' if examples == 1 else 's'}, which show few of the values of others"
        yield _warned("calibration_data", few)
    constant = {name: _constant([np.asarray(batch[name]) for batch in batches]) for name in graph.inputs}
    for name, words in constant.items():
        # Ids and masks may well be the same for all examples, as long as another input is not.
        if words and (graph.inputs[name].dtype.is_floating or all(constant.values())):
            yield _warned(name, words)
        elif graph.inputs[name].dtype.is_floating:
            words = _outliers([np.asarray(batch[name]) for batch in batches])
            if words:
                yield _warned(name, words)


def _constant(parts: Sequence[np.ndarray]) -> str:
    first = np.asarray(parts[0][0])  # one string is no array
    if first.size and all((part == first.flat[0]).all() for part in parts):
        return f"every value is {first.flat[0]:g}" if first.dtype.kind in "fiub" else "every value is equal"
    several = sum(map(len, parts)) > 1
    if several and all(part.shape[1:] == first.shape and (part == first).all() for part in parts):
        return "all examples are equal"
    return ""


def _outliers(parts: Sequence[np.ndarray]) -> str:
    """Returns in words that a few values are far larger than all others."""
    usual = usual_limit(parts)
    if math.isinf(usual):
        return ""
    highest = max(float(np.abs(part).max()) for part in parts)
    return f"values up to {highest:.3g}, while {1 - OUTLIERS:.1%} of the others are at most {usual:.3g}"


def _of_tensors(graph: FrozenGraph, uses: Mapping[str, RangeUse]) -> Iterator[Change]:
    inputs = {spec.name for spec in graph.inputs.values()}
    nodes = {node.name: node for node in graph.graph_def.node}
    for tensor, use in uses.items():
        node = nodes[producer(full_name(tensor))]
        if use.saturated > MUCH_SATURATED:
            yield _warned(tensor, f"{use.saturated:.0%} of the values are beyond its range")
        if node.op not in SHARES and use.lost > (MUCH_OF_INPUT if node.name in inputs else MUCH_OF_TENSOR):
            yield _warned(tensor, f"{use.lost:.1%} of the values are rounded to 0, so small are they in its range")


def _warned(name: str, detail: str) -> Change:
    return Change(name=name, kind=CALIBRATION, detail=detail)
