"""A Keras callback that records the load of the machine during `fit`, and adds figures to the logs of each epoch."""

from __future__ import annotations

import inspect
import math
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfopt.compat.tensorflow import has_started
from tfopt.errors import ConfigError, warn
from tfopt.profiling.monitoring.readers import Figures, Reader, open_reader
from tfopt.profiling.monitoring.sampling import NOT_SAMPLED, Sampling, timeline
from tfopt.profiling.monitoring.workers import worker_path
from tfopt.report import Utilization

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
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._names: list[str] | None = None
        self.begin()

    def begin(self) -> None:
        before = self._sampling.samples.so_far()
        self._after_s = before[-1][0] if before else -math.inf
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, float]:
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


NOW, PEAK = "tensorflow_memory_bytes", "tensorflow_memory_peak_bytes"


class GpuMonitor(keras.callbacks.Callback):
    """Samples the GPUs during `fit`, or the processor if there is no GPU; `source` names which.

    With NVIDIA GPUs the series are the attributes of `GpuSample`, for each GPU that this process may use, for example
    "gpu0_gpu_utilization_percent". "gpu0_tensorflow_memory_bytes" and "gpu0_tensorflow_memory_peak_bytes" are what
    TensorFlow's tensors take, now and at most. With DCGM there are also "gpu0_sm_active_percent" and
    "gpu0_tensor_active_percent". Without a GPU the series are "process_cpu_percent" (100 is one busy core, so the value
    can exceed 100), "system_cpu_percent" (0 to 100, all cores and processes), "process_memory_bytes" (resident) and
    "system_memory_used_bytes". Each `fit` has a sample at the start and at the end. A CPU percentage covers the time
    since the sample before, so the first value is None.

    At the end of each epoch, the figures of the epoch are added to the logs, such as "gpu_utilization_percent" (mean of
    all GPUs), "gpu_memory_used_bytes" and "gpu_energy_joules" (sums), or "process_cpu_percent" and
    "process_memory_bytes"; docs/monitoring.md lists all. So History, TensorBoard and CSVLogger show them, if the
    monitor comes before them in the list of callbacks. A figure that is unknown is NaN there.

    A value that cannot be read is None in its sample, and sampling continues: NVML sometimes fails for a moment. A GPU
    or a driver that is lost is looked for again.

    Another fit with the same monitor continues the timeline. Sampling ends with `fit`, also when `fit` raises an error.
    For a loop without `fit`, the monitor is a context manager.

    Args:
        interval_s: Seconds between samples.
        directory: Directory that all workers share. Each writes its samples there, and `merge_workers` puts them
            together. None writes nothing.
    Raises:
        ConfigError: `interval_s` is not above 0.
    Warns:
        TfoptWarning: At the end of `fit`, if values could not be read or written. Training is not affected.
    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> monitor = GpuMonitor(interval_s=0.1)
        >>> history = model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0, callbacks=[monitor])
        >>> len(monitor.utilization.seconds) >= 2
        True
        >>> with GpuMonitor(interval_s=0.1) as monitor:
        ...     for _ in range(3):
        ...         loss = model.train_on_batch(np.zeros((8, 4)), np.zeros((8, 1)))
        >>> len(monitor.utilization.seconds) >= 2
        True
    """

    def __init__(self, interval_s: float = 0.5, *, directory: str | Path | None = None) -> None:
        super().__init__()
        if not isinstance(interval_s, int | float) or not 0 < interval_s <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"interval_s must be a number of seconds above 0. Received: interval_s={interval_s!r}. "
                "Use for example 0.5, the default."
            )
        self.interval_s = interval_s
        self.directory = None if directory is None else Path(directory)
        self._path: Path | None = None
        self._began: float | None = None
        self._ended: list[Sampling] = []
        self._sampling: Sampling | None = None
        self._logs: EpochLogs | None = None

    @property
    def source(self) -> str:
        """Where the values come from."""
        last = self._sampling or (self._ended[-1] if self._ended else None)
        return NOT_SAMPLED if last is None else last.source

    @property
    def utilization(self) -> Utilization:
        """The timeline of all fits until now."""
        return timeline([*self._ended, *([] if self._sampling is None else [self._sampling])])

    def summary(self) -> dict[str, float | None]:
        """Returns the mean and the maximum of each series, as "<series>_mean" and "<series>_max".

        A value is None if the series has no values.
        """
        summary: dict[str, float | None] = {}
        load = self.utilization
        known = load.known
        for name in load.series:
            values = known.get(name)
            summary[f"{name}_mean"] = statistics.fmean(values) if values else None
            summary[f"{name}_max"] = max(values) if values else None
        return summary

    def __str__(self) -> str:
        return str(self.utilization)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.start(_fit_frame(inspect.currentframe()))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._logs is not None:
            self._logs.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None and self._logs is not None:
            logs.update(self._logs.end())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.stop()

    def __enter__(self) -> GpuMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.on_train_end()

    def start(self, fit: FrameType | None = None) -> None:
        """Starts sampling. A sampling that runs ends before.

        Args:
            fit: The call of `fit`. When it has ended without a word, because it raised an error, sampling ends too.
        """
        self.stop()
        if self._began is None:
            self._began = time.perf_counter()
        if self.directory is not None and self._path is None:
            self._path = worker_path(self.directory)
        spent = {name: values[-1] for name, values in self.utilization.known.items() if name.endswith("_joules")}
        self._sampling = Sampling(
            lambda: _FitReader(open_reader(self.interval_s), spent),
            self.interval_s,
            began=self._began,
            during=fit,
            path=self._path,
        )
        self._logs = EpochLogs(self._sampling)

    def stop(self) -> None:
        """Takes the last sample and ends sampling. Has no effect if sampling is not running."""
        if self._sampling is None:
            return
        sampling, self._sampling, self._logs = self._sampling, None, None
        sampling.stop()
        self._ended.append(sampling)
        if sampling.failures:
            said = ", ".join(f"{words} ({count} times)" for words, count in sampling.failures.most_common(3))
            warn(f"GpuMonitor could not read all values: {said}.")
        if sampling.unwritable is not None:
            self._path = None  # the next fit begins a file of its own
            warn(
                f"directory must be a place that can be written. Received: directory={str(self.directory)!r} "
                f"({sampling.unwritable}). The samples are in GpuMonitor.utilization."
            )


class _FitReader:
    """Reads the machine and TensorFlow's own memory. The energy goes on from that of the fits before."""

    def __init__(self, machine: Reader, spent_joules: dict[str, float]) -> None:
        self._machine, self._spent, self._memory = machine, spent_joules, TensorFlowMemory()
        self.source, self.failures = machine.source, machine.failures
        self.close, self.notes = machine.close, machine.notes

    @property
    def unavailable(self) -> dict[str, str]:
        return {**self._machine.unavailable, **self._memory.unavailable}

    def read(self) -> Figures:
        figures = self._machine.read()
        for name, before in self._spent.items():
            if (now := figures.get(name)) is not None:
                figures[name] = now + before
        try:
            return {**figures, **self._memory.read()}
        except Exception as error:  # noqa: BLE001 - the other figures are there
            self.failures[f"{type(error).__name__}: {error}"] += 1
            return figures


class TensorFlowMemory:
    """The memory that tensors of this process take on each GPU, now and at most, as TensorFlow counts it.

    NVML says how much memory all processes hold. TensorFlow takes nearly all of it at once, or keeps what it has taken,
    so that says little.

    The peak counts since the start of the process, or since `tf.config.experimental.reset_memory_stats`.

    Example:
        >>> memory = TensorFlowMemory()
        >>> bool(memory.read()) or memory.unavailable["tensorflow_memory_peak_bytes"].startswith("TensorFlow ")
        True
    """

    def __init__(self) -> None:
        self.unavailable = {PEAK: "TensorFlow has not started its devices"}
        self._devices: list[tuple[int, str]] | None = None

    def read(self) -> Figures:
        """Returns the present values by name, for example "gpu0_tensorflow_memory_bytes"."""
        if self._devices is None:
            if not has_started():  # to ask for the devices would start them, before the program has set memory growth
                return {}
            self._devices = self._find()
        figures: Figures = {}
        for number, device in self._devices:
            memory = tf.config.experimental.get_memory_info(device)
            figures |= {f"gpu{number}_{NOW}": float(memory["current"]), f"gpu{number}_{PEAK}": float(memory["peak"])}
        return figures

    def _find(self) -> list[tuple[int, str]]:
        """Returns the number of each GPU in CUDA_VISIBLE_DEVICES, and the name of TensorFlow's device."""
        visible = tf.config.get_visible_devices("GPU")
        if not visible:
            self.unavailable = {PEAK: "TensorFlow uses no GPU, and does not count the memory of a processor"}
            return []
        # In a cluster, the list has the devices of all workers. Those of this one have a memory to ask for.
        devices = [each.name for each in tf.config.list_logical_devices("GPU") if _is_here(each.name)]
        if len(devices) != len(visible):
            self.unavailable = {PEAK: "TensorFlow has divided the GPUs into logical devices"}
            return []
        self.unavailable = {}
        return [(int(gpu.name.rpartition(":")[2]), name) for gpu, name in zip(visible, devices, strict=True)]


def _is_here(device: str) -> bool:
    try:
        tf.config.experimental.get_memory_info(device)
    except (ValueError, tf.errors.OpError):
        return False
    return True


def _fit_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the `fit` that called a callback, or None."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return frame
        frame = frame.f_back
    return None
