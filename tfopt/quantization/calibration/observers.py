"""Observers: an observer gets the values of one tensor, piece by piece, and chooses the range to quantize it with.

"minmax" covers all values, so one outlier makes the step larger for all other values. The other observers clip
outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tfopt.quantization.annotation.grids import SMALLEST, Range, covering
from tfopt.quantization.config import QuantizationConfig


class Observer(Protocol):
    def update(self, values: np.ndarray) -> None:
        """Observes the tensor's values on one piece of the calibration data."""

    def range(self) -> Range:
        """Returns the range for all observed values."""


def make_observer(config: QuantizationConfig) -> Observer:
    return OBSERVERS[config.observer](config)


class MinMaxObserver:
    """The range that covers every observed value. One outlier makes the step larger for all other values.

    Example:
        >>> observer = MinMaxObserver()
        >>> observer.update(np.array([-1.0, 3.0]))
        >>> observer.update(np.array([0.5, 2.0]))
        >>> observer.range()
        Range(limit=3.0, signed=False, zero_point=64)
    """

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf

    def update(self, values: np.ndarray) -> None:
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))

    def range(self) -> Range:
        return covering(self.low, self.high)


class MovingAverageObserver:
    """The range whose ends are moving averages of the smallest and largest value of each piece.

    Training with fake quantization uses it (Jacob et al., CVPR 2018, section 3.1). A rare outlier has little effect.

    Example:
        >>> observer = MovingAverageObserver(momentum=0.9)
        >>> for high in (1.0, 1.0, 11.0):
        ...     observer.update(np.array([0.0, high]))
        >>> round(observer.range().limit, 6)
        2.0
    """

    def __init__(self, momentum: float = 0.9) -> None:
        self._momentum = momentum
        self._ends: tuple[float, float] | None = None

    def update(self, values: np.ndarray) -> None:
        low, high = float(values.min()), float(values.max())
        before = self._ends or (low, high)
        weight = 1 - self._momentum
        self._ends = (before[0] + weight * (low - before[0]), before[1] + weight * (high - before[1]))

    def range(self) -> Range:
        assert self._ends is not None  # calibration without examples raises an error earlier
        return covering(*self._ends)


class HistogramObserver:
    """Counts absolute values in a fine histogram.

    The limit is what `choose` returns for the counts, the centres of the bins, and the number of steps up to the limit.
    Values beyond the limit are clipped on both sides. On each side the range ends at the last value, or at the limit.

    Example:
        >>> observer = HistogramObserver(percentile(99.0))
        >>> observer.update(np.concatenate([np.linspace(0, 1, 999), [1000.0]]))
        >>> round(observer.range().limit, 1)
        1.0
    """

    BINS = 2**16  # if one outlier is a thousand times as large as all other values, 65 bins are left for these

    def __init__(self, choose: Callable[[np.ndarray, np.ndarray, int], float]) -> None:
        self._choose = choose
        self._counts = np.zeros(self.BINS, np.int64)
        self._limit = 0.0
        self._low, self._high = 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        magnitudes = np.abs(values.reshape(-1))
        self._low, self._high = min(self._low, float(values.min())), max(self._high, float(values.max()))
        highest = float(magnitudes.max())
        if highest > max(self._limit, SMALLEST):
            self._widen(highest)
        if not self._limit:
            self._counts[0] += magnitudes.size
        else:
            bins = np.minimum(magnitudes * (self.BINS / self._limit), self.BINS - 1).astype(np.int64)
            self._counts += np.bincount(bins, minlength=self.BINS)

    def _widen(self, limit: float) -> None:
        """Doubles the bins until they reach `limit`."""
        self._limit = self._limit or limit  # so far all values counted as zero, in the first bin
        while self._limit < limit:
            self._counts = np.concatenate([self._counts.reshape(-1, 2).sum(1), np.zeros(self.BINS // 2, np.int64)])
            self._limit *= 2

    def range(self) -> Range:
        everything = covering(self._low, self._high)
        if not self._limit:
            return everything
        width = self._limit / self.BINS
        used = int(np.flatnonzero(self._counts)[-1]) + 1
        steps = round(max(everything.limit, -everything.low) / everything.scale)
        limit = self._choose(self._counts[:used], (np.arange(used) + 0.5) * width, steps)
        return covering(max(self._low, -limit), min(self._high, limit))


def percentile(percent: float) -> Callable[[np.ndarray, np.ndarray, int], float]:
    """Returns a function that chooses the limit which covers this percentage of all values."""

    def choose(counts: np.ndarray, centres: np.ndarray, steps: int) -> float:
        cumulative = np.cumsum(counts)
        index = int(np.searchsorted(cumulative, cumulative[-1] * percent / 100))
        return float(_upper_edges(centres)[min(index, len(centres) - 1)])

    return choose


def least_squares(counts: np.ndarray, centres: np.ndarray, steps: int) -> float:
    """Chooses the limit with the smallest mean squared error of rounding and clipping together."""
    held = np.flatnonzero(counts)
    weights, values = counts[held], centres[held]

    def error(limit: float) -> float:
        scale = limit / steps
        rounded = np.minimum(np.rint(values / scale), steps) * scale
        return float(np.sum(weights * (rounded - values) ** 2))

    return min(_candidates(centres), key=error)


def least_divergence(counts: np.ndarray, centres: np.ndarray, steps: int) -> float:
    """Chooses the limit with the smallest Kullback-Leibler divergence of the quantized values from the float values.

    Migacz, "8-bit Inference with TensorRT", GPU Technology Conference 2017.
    """
    if counts[1:].any():
        counts = np.append(0, counts[1:])  # zero is exact on any grid
    window = len(counts)
    while True:  # after outliers are clipped, the rest is searched again
        best = _least_divergent(counts, window, steps)
        if best >= window / 4:
            return float(_upper_edges(centres)[best - 1])
        window = 2 * best


def _least_divergent(counts: np.ndarray, window: int, steps: int, bins: int = 2048) -> int:
    """Returns how many of the first bins to keep. The histogram is made coarser, so that most bins hold values."""
    width = -(-window // bins)
    coarse = np.add.reduceat(counts[:window], np.arange(0, window, width)).astype(np.float64)
    outside = float(counts[window:].sum())

    def divergence(inside: int) -> float:
        kept = coarse[:inside]
        reference = kept.copy()
        reference[-1] += coarse[inside:].sum() + outside
        # A step has the mass of its bins, which is spread evenly over its bins that are not empty.
        starts = np.unique(np.arange(steps + 1) * inside // (steps + 1))
        sizes = np.diff(np.append(starts, inside))
        mass = np.repeat(np.add.reduceat(kept, starts), sizes)
        held = np.repeat(np.add.reduceat((kept > 0).astype(np.float64), starts), sizes)
        spread = np.divide(mass, held, out=np.zeros(inside), where=kept > 0)
        total = max(spread.sum(), 1.0)
        both = (reference > 0) & (spread > 0)
        p, q = reference / reference.sum(), spread / total
        # If the last bin was empty, the clipped values have no counterpart in the quantized ones. p / q counts as 1e6.
        lost = float(p[~both].sum())
        return float(np.sum(p[both] * np.log(p[both] / q[both]))) + lost * np.log(1e6)

    fewest = min(steps + 1, len(coarse))
    tried = range(len(coarse), fewest - 1, -max(1, len(coarse) // 256))
    return min(width * min(tried, key=divergence), window)


def _candidates(centres: np.ndarray, count: int = 160) -> list[float]:
    """Returns the limits to try, from the whole range down. Of equally good limits, the first one is chosen."""
    highest = float(_upper_edges(centres)[-1])
    return [highest * 2 ** (-number / 16) for number in range(count)]


def _upper_edges(centres: np.ndarray) -> np.ndarray:
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else centres[0]
    return np.asarray(centres + half)


OBSERVERS: Mapping[str, Callable[[QuantizationConfig], Observer]] = {
    "minmax": lambda config: MinMaxObserver(),
    "moving_average": lambda config: MovingAverageObserver(),
    "percentile": lambda config: HistogramObserver(percentile(config.percentile)),
    "mse": lambda config: HistogramObserver(least_squares),
    "entropy": lambda config: HistogramObserver(least_divergence),
}
