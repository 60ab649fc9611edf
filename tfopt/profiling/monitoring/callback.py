"""A Keras callback that records the load of the machine during `fit`.

One thread reads all values, from before the first step to after the last. Training never waits for it. It is one thread
for the whole fit, because psutil measures the CPU load since the last call of the same thread.
"""

from __future__ import annotations

import inspect
import math
import statistics
import threading
import time
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import keras
import psutil

from tfopt.compat.frames import frame_of_thread
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.profiling.monitoring.readers import Figures, Reader, open_reader
from tfopt.profiling.monitoring.workers import write_worker
from tfopt.report import Utilization

# A driver that does not answer must not stop the program, which would lose the trained model.
_STOP_TIMEOUT_S = 10.0
GPU_LOGS = ("gpu_utilization_percent", "gpu_memory_used_bytes", "gpu_power_watts")
CPU_LOGS = ("process_cpu_percent", "process_memory_bytes")
LOGGED = (*GPU_LOGS, *CPU_LOGS)
"""The names that the monitor adds to the logs of an epoch. They are figures of the machine, not of the model."""


class GpuMonitor(keras.callbacks.Callback):
    """Samples the GPUs during `fit`, or the processor if there is no GPU; `source` names which.

    With NVIDIA GPUs the series are the attributes of `GpuSample`, for each GPU that this process may use, for example
    "gpu0_gpu_utilization_percent". With DCGM there are also "gpu0_sm_active_percent" and "gpu0_tensor_active_percent".
    Without a GPU they are "process_cpu_percent" (100 is one busy core, so the value can exceed 100),
    "system_cpu_percent" (0 to 100, all cores and processes), "process_memory_bytes" (resident) and
    "system_memory_used_bytes". Each `fit` has a sample at the start and at the end. A CPU percentage covers the time
    since the sample before, so the first value is None.

    At the end of each epoch, the means of the epoch are added to the logs: "gpu_utilization_percent" (mean of all
    GPUs), "gpu_memory_used_bytes" and "gpu_power_watts" (sums), or "process_cpu_percent" and "process_memory_bytes".
    So History, TensorBoard and CSVLogger show them, if the monitor comes before them in the list of callbacks. A figure
    that is unknown is NaN there.

    A value that cannot be read is None in its sample, and sampling continues: NVML sometimes fails for a moment. A GPU
    or a driver that is lost is looked for again.

    Another fit with the same monitor continues the timeline. Sampling ends with `fit`, also when `fit` raises an error.
    For a loop without `fit`, the monitor is a context manager.

    Args:
        interval_s: Seconds between samples.
        directory: Directory that all workers share. Each writes its timeline there, and `merge_workers` puts them
            together. None writes nothing.

    Raises:
        ConfigError: `interval_s` is not above 0.

    Warns:
        TfoptWarning: At the end of `fit`, if values could not be read. Training is not affected.

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
        if not 0 < interval_s <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"interval_s must be a number of seconds above 0. Received: interval_s={interval_s}. "
                "Use for example 0.5, the default."
            )
        self.interval_s = interval_s
        self.directory = None if directory is None else Path(directory)
        self.source = "not sampled yet"
        self._began: float | None = None
        self._samples: list[tuple[float, Figures]] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failures: Counter[str] = Counter()
        self._unavailable: dict[str, str] = {}
        self._notes: list[str] = []
        self._epoch = (0, 0.0, 0.0)  # samples, wall time and processor time at its start

    @property
    def utilization(self) -> Utilization:
        """The timeline of all fits until now."""
        samples = list(self._samples)  # the thread may append a sample at the same time
        names = dict.fromkeys(name for _, figures in samples for name in figures)
        return Utilization(
            source=self.source,
            seconds=[seconds for seconds, _ in samples],
            series={name: [figures.get(name) for _, figures in samples] for name in names},
        )

    def summary(self) -> dict[str, float | None]:
        """Returns the mean and the maximum of each series, as "<series>_mean" and "<series>_max".

        A value is None if the series has no values.
        """
        summary: dict[str, float | None] = {}
        for name, values in self.utilization.series.items():
            known = [value for value in values if value is not None]
            summary[f"{name}_mean"] = statistics.fmean(known) if known else None
            summary[f"{name}_max"] = max(known, default=None)
        return summary

    def __str__(self) -> str:
        utilization, summary = self.utilization, self.summary()
        lasted = utilization.seconds[-1] if utilization.seconds else 0.0
        lines = [f"{self.source}: {len(utilization.seconds)} samples in {lasted:.1f} s"]
        for name in utilization.series:
            mean, highest = summary[f"{name}_mean"], summary[f"{name}_max"]
            known = mean is not None and highest is not None
            why = self._unavailable.get(name, "no value could be read")
            figures = f"mean {mean:,.1f}, max {highest:,.1f}" if known else f"unavailable ({why})"
            lines.append(f"  {name:32} {figures}")
        return "\n".join([*lines, *(f"  {note}" for note in self._notes)])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.start(_fit_frame(inspect.currentframe()))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = (len(self._samples), time.perf_counter(), time.process_time())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._of_epoch())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.stop()
        if self._failures:
            said = ", ".join(f"{words} ({count} times)" for words, count in self._failures.most_common(3))
            warnings.warn(f"GpuMonitor could not read all values: {said}.", TfoptWarning, stacklevel=2)

    def __enter__(self) -> GpuMonitor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_train_end()

    def start(self, fit: FrameType | None = None) -> None:
        """Starts sampling. A sampling that runs ends before.

        Args:
            fit: The call of `fit`. When it has ended without a word, because it raised an error, sampling ends too.
        """
        self.stop()
        if self._began is None:
            self._began = time.perf_counter()
        self._stopping = threading.Event()
        reader = open_reader(self.interval_s)
        self.source, self._failures, self._unavailable = reader.source, reader.failures, reader.unavailable
        self._notes = []
        watched = None if fit is None else (threading.get_ident(), id(fit), fit.f_code)
        self._thread = threading.Thread(
            target=self._record,
            args=(reader, self._began, self._stopping, watched),
            name="tfopt-GpuMonitor",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Takes the last sample and ends sampling. Has no effect if sampling is not running."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._failures[f"no answer for {_STOP_TIMEOUT_S:.0f} s from {self.source}"] += 1
        self._thread = None
        if self.directory is not None:
            write_worker(self.directory, self.utilization)

    def _record(
        self, reader: Reader, began: float, stopping: threading.Event, fit: tuple[int, int, Any] | None
    ) -> None:
        with closing(reader):
            self._sample(reader, began)
            while not stopping.wait(self.interval_s) and (fit is None or _is_running(*fit)):
                self._sample(reader, began)
            self._sample(reader, began)
            self._notes = reader.notes()

    def _sample(self, reader: Reader, began: float) -> None:
        try:
            figures = reader.read()
        except Exception as error:  # noqa: BLE001 - training continues after any error; a warning at its end reports it
            reader.failures[f"{type(error).__name__}: {error}"] += 1
            figures = {}
        self._samples.append((time.perf_counter() - began, figures))

    def _of_epoch(self) -> dict[str, float]:
        """Returns the figures of the epoch that ends, for the logs."""
        first, began, computed = self._epoch
        if not self.source.startswith("NVML"):
            wall = time.perf_counter() - began
            load = 100 * (time.process_time() - computed) / wall
            return dict(zip(CPU_LOGS, (load, float(psutil.Process().memory_info().rss)), strict=True))
        samples = [figures for _, figures in self._samples[first:]]
        found = {}
        for name in GPU_LOGS:
            plain = name if name.startswith("gpu_utilization") else name.removeprefix("gpu_")
            per_sample = [
                [value for key, value in each.items() if value is not None and key.endswith(f"_{plain}")]
                for each in samples
            ]
            totals = [sum(values) for values in per_sample if values]
            if name == GPU_LOGS[0]:
                totals = [statistics.fmean(values) for values in per_sample if values]
            found[name] = statistics.fmean(totals) if totals else math.nan
        return found


def _fit_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the `fit` that called a callback, or None."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return frame
        frame = frame.f_back
    return None


def _is_running(thread: int, frame_id: int, code: Any) -> bool:
    """Returns whether a call is still on the stack of a thread."""
    frame = frame_of_thread(thread)
    while frame is not None:
        if id(frame) == frame_id and frame.f_code is code:
            return True
        frame = frame.f_back
    return False
