"""The figures of the machine that are added to Keras' logs at the end of each epoch."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence

import psutil

from tfopt.profiling.monitoring.sampling import Sampling

Combine = Callable[[Sequence[float]], float]
# The series of each name, and how the figures of several GPUs become one.
ALWAYS: dict[str, tuple[str, Combine]] = {
    "gpu_utilization_percent": ("gpu_utilization_percent", statistics.fmean),
    "gpu_memory_used_bytes": ("memory_used_bytes", sum),
    "gpu_power_watts": ("power_watts", sum),
}
# These are added where the machine has them.
WHERE_KNOWN: dict[str, tuple[str, Combine]] = {
    "gpu_energy_joules": ("energy_joules", sum),
    "gpu_temperature_celsius": ("temperature_celsius", max),
    "gpu_throttled": ("throttled", max),
    "gpu_tensorflow_memory_peak_bytes": ("tensorflow_memory_peak_bytes", max),
    "gpu_sm_active_percent": ("sm_active_percent", statistics.fmean),
    "gpu_tensor_active_percent": ("tensor_active_percent", statistics.fmean),
    **{
        f"gpu_{link}_{way}_bytes_per_second": (f"{link}_{way}_bytes_per_second", sum)
        for link in ("pcie", "nvlink")
        for way in ("sent", "received")
    },
}
OF_GPUS = {**ALWAYS, **WHERE_KNOWN}
OF_PROCESS = ("process_cpu_percent", "process_memory_bytes")
LOGGED = (*OF_GPUS, *OF_PROCESS)
"""The names that the monitor adds to the logs of an epoch. They are figures of the machine, not of the model."""


class EpochLogs:
    """The figures of one epoch after the other.

    The names are those of the first epoch, because CSVLogger has the same columns to the end. A figure that is unknown
    is NaN. An epoch that is shorter than the time between two samples has the figures of the last sample.

    Args:
        sampling: What samples.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._names: list[str] | None = None
        self.begin()

    def begin(self) -> None:
        """Starts an epoch."""
        before = self._sampling.samples.so_far()
        self._after_s = before[-1][0] if before else -math.inf
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, float]:
        """Returns the figures of the epoch."""
        if self._names is None:
            self._names = self._known_names()
        load = 100 * (time.process_time() - self._processor) / max(time.perf_counter() - self._wall, 1e-9)
        figures = {"process_cpu_percent": load, "process_memory_bytes": _memory()}
        return {name: figures[name] if name in figures else self._figure(*OF_GPUS[name]) for name in self._names}

    def _known_names(self) -> list[str]:
        series = {name for _, figures in self._sampling.samples.so_far() for name in figures}
        given = {re.sub(r"^gpu\d+_", "", name) for name in series - set(self._sampling.unavailable)}
        has_gpus = any(re.fullmatch(r"gpu\d+_gpu_utilization_percent", name) for name in series)
        return [
            *(ALWAYS if has_gpus else OF_PROCESS),
            *(name for name, (plain, _) in WHERE_KNOWN.items() if plain in given),
        ]

    def _figure(self, plain: str, combine: Combine) -> float:
        samples = self._sampling.samples.so_far()
        own = [figures for seconds, figures in samples if seconds > self._after_s]
        earlier = [figures for seconds, figures in samples if seconds <= self._after_s]
        own = own or earlier[-1:]
        names = {name for sample in own for name in sample if re.fullmatch(rf"gpu\d+_{plain}", name)}
        of_gpus = []
        for name in names:
            known = [value for sample in own if (value := sample.get(name)) is not None]
            if known and name.endswith("_joules"):  # it counts up, also before the first sample of the epoch
                before = (figures.get(name) for figures in reversed(earlier))
                of_gpus.append(known[-1] - next((value for value in before if value is not None), known[0]))
            elif known:
                of_gpus.append(statistics.fmean(known))
        return float(combine(of_gpus)) if of_gpus else math.nan


def _memory() -> float:
    try:
        return float(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return math.nan
