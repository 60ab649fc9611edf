"""A Keras callback that records the load of the machine during `fit`.

One thread reads all values, from before the first step to after the last. Training never waits for it. It is one thread
for the whole fit, because psutil measures the CPU load since the last call of the same thread.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections import Counter
from contextlib import closing
from typing import Protocol

import keras
import psutil

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.profiling.nvml import Nvml, NvmlUnavailableError
from tfopt.report import Utilization

Figures = dict[str, float | None]

# A driver that does not answer must not stop the program, which would lose the trained model.
_STOP_TIMEOUT_S = 10.0


class GpuMonitor(keras.callbacks.Callback):
    """Samples the GPUs during `fit`, or the processor if there is no GPU; `source` names which.

    With NVIDIA GPUs the series are the attributes of `GpuSample`, for each GPU that this process may use, for example
    "gpu0_gpu_utilization_percent". Without a GPU they are "process_cpu_percent" (100 is one busy core, so the value can
    exceed 100), "system_cpu_percent" (0 to 100, all cores and processes), "process_memory_bytes" (resident) and
    "system_memory_used_bytes". Each `fit` has a sample at the start and at the end. A CPU percentage covers the time
    since the sample before, so the first value is None.

    A value that cannot be read is None in its sample, and sampling continues: NVML sometimes fails for a moment.

    Another fit with the same monitor continues the timeline. When `fit` raises an error, Keras does not inform its
    callbacks: call `stop`, or fit again. The thread never keeps the process alive.

    Args:
        interval_s: Seconds between samples.

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
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        super().__init__()
        if not 0 < interval_s <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"interval_s must be a number of seconds above 0. Received: interval_s={interval_s}. "
                "Use for example 0.5, the default."
            )
        self.interval_s = interval_s
        self.source = "not sampled yet"
        self._began: float | None = None
        self._samples: list[tuple[float, Figures]] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failures: Counter[str] = Counter()

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
            figures = f"mean {mean:,.1f}, max {highest:,.1f}" if known else "unavailable (no value could be read)"
            lines.append(f"  {name:32} {figures}")
        return "\n".join(lines)

    def on_train_begin(self, logs: object = None) -> None:
        self.stop()  # a fit before this one may have raised
        if self._began is None:
            self._began = time.perf_counter()
        self._stopping = threading.Event()
        reader = _open_reader()
        self.source, self._failures = reader.source, reader.failures
        self._thread = threading.Thread(
            target=self._record, args=(reader, self._began, self._stopping), name="tfopt-GpuMonitor", daemon=True
        )
        self._thread.start()

    def on_train_end(self, logs: object = None) -> None:
        self.stop()
        if self._failures:
            said = ", ".join(f"{words} ({count} times)" for words, count in self._failures.most_common(3))
            warnings.warn(f"GpuMonitor could not read all values: {said}.", TfoptWarning, stacklevel=2)

    def stop(self) -> None:
        """Takes the last sample and ends sampling. Has no effect if sampling is not running."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._failures[f"no answer for {_STOP_TIMEOUT_S:.0f} s from {self.source}"] += 1
        self._thread = None

    def _record(self, reader: _Reader, began: float, stopping: threading.Event) -> None:
        with closing(reader):
            self._sample(reader, began)
            while not stopping.wait(self.interval_s):
                self._sample(reader, began)
            self._sample(reader, began)

    def _sample(self, reader: _Reader, began: float) -> None:
        try:
            figures = reader.read()
        except Exception as error:  # noqa: BLE001 - training continues after any error; a warning at its end reports it
            reader.failures[f"{type(error).__name__}: {error}"] += 1
            figures = {}
        self._samples.append((time.perf_counter() - began, figures))


class _Reader(Protocol):
    source: str
    failures: Counter[str]  # error messages, each with the number of failed readings

    def read(self) -> Figures: ...

    def close(self) -> None: ...


class _GpuReader:
    def __init__(self) -> None:
        self._nvml = Nvml()
        self.source = f"NVML ({', '.join(self._nvml.names)})"
        self.failures = self._nvml.failures

    def read(self) -> Figures:
        samples = enumerate(self._nvml.sample())
        return {f"gpu{index}_{name}": value for index, gpu in samples for name, value in gpu.to_dict().items()}

    def close(self) -> None:
        self._nvml.close()


class _ProcessReader:
    # psutil counts the scheduler's ticks of 10 ms. A percentage of only a few ticks would be random.
    _SHORTEST_S = 0.1

    def __init__(self, reason: str) -> None:
        self.source = f"psutil ({reason})"
        self.failures: Counter[str] = Counter()
        self._process = psutil.Process()
        self._measured: float | None = None

    def read(self) -> Figures:
        process_cpu, system_cpu = self._cpu()
        return {
            "process_cpu_percent": process_cpu,
            "system_cpu_percent": system_cpu,
            "process_memory_bytes": float(self._process.memory_info().rss),
            "system_memory_used_bytes": float(psutil.virtual_memory().used),
        }

    def close(self) -> None:
        """Does nothing, because psutil has nothing to release."""

    def _cpu(self) -> tuple[float | None, float | None]:
        """Returns the load since the last call. The first call returns None, and only starts the measurement."""
        now, before = time.perf_counter(), self._measured
        if before is not None and now - before < self._SHORTEST_S:
            return None, None
        self._measured = now
        load = self._process.cpu_percent(), psutil.cpu_percent()
        return load if before is not None else (None, None)


def _open_reader() -> _Reader:
    try:
        return _GpuReader()
    except NvmlUnavailableError as reason:
        return _ProcessReader(str(reason))
