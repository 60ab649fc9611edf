"""The samples of a run of any length, in a bounded part of the memory."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

from tfopt.profiling.monitoring.readers import Figures

# A sample of eight GPUs takes some 13 kB. At two samples per second so many are the first two hours.
MOST = 2**14

Sample = tuple[float, Figures]


class Samples:
    """Samples in the order of time. When there are too many, each two that are neighbours become one.

    So the times between samples double, from then on too. A figure becomes the mean, a figure that counts up the last.

    Args:
        most: Number of samples that are kept.
    Example:
        >>> samples = Samples(most=4)
        >>> for second in range(6):
        ...     samples.add(second, {"load": 10.0 * second, "energy_joules": 1.0 * second})
        >>> [(second, figures["load"], figures["energy_joules"]) for second, figures in samples.so_far()]
        [(1, 5.0, 1.0), (3, 25.0, 3.0), (5, 45.0, 5.0)]
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: list[Sample] = []
        self._latest: list[Sample] = []  # they become one sample when there are `_together` of them
        self._together = 1
        self._lock = threading.Lock()  # one thread adds, others read

    def add(self, seconds: float, figures: Figures) -> None:
        """Adds a sample."""
        with self._lock:
            self._latest.append((seconds, figures))
            if len(self._latest) < self._together:
                return
            self._kept.append(_joined(self._latest))
            self._latest = []
            if len(self._kept) >= self._most:
                self._kept = [_joined(self._kept[place : place + 2]) for place in range(0, len(self._kept), 2)]
                self._together *= 2

    def so_far(self) -> list[Sample]:
        """Returns all samples until now."""
        with self._lock:
            return [*self._kept, *self._latest]


def _joined(samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    names = dict.fromkeys(name for _, figures in samples for name in figures)
    joined: Figures = {}
    for name in names:
        known = [value for _, figures in samples if (value := figures.get(name)) is not None]
        joined[name] = None if not known else known[-1] if name.endswith("_joules") else statistics.fmean(known)
    return samples[-1][0], joined
