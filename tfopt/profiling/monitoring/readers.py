"""What a monitor reads at each sample: the GPUs through NVML and DCGM, or the processor if there is no GPU.

NVML says whether any kernel runs. Where NVIDIA's DCGM is installed, `dcgmi` says how many of the multiprocessors have
work, and how busy the tensor cores are: https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html

`dcgmi dmon` prints a header now and then, and a row for each GPU:

    #Entity   SMACT        TENSO
    ID
    GPU 0     0.913        0.402
    GPU 1     N/A          N/A
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from typing import Protocol

import psutil

from tfopt.child_processes import end
from tfopt.profiling.monitoring.nvml import Nvml, NvmlUnavailableError

# DCGM_FI_PROF_SM_ACTIVE and DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, shares from 0 to 1.
FIELDS = {"1002": "sm_active_percent", "1004": "tensor_active_percent"}
ROW = re.compile(r"^\s*GPU\s+(\d+)\s+(\S+)\s+(\S+)")
FASTEST_MS = 100
STOP_S = 2.0
# A row that is older than this, and than some intervals, says nothing of the present.
STALE_S, STALE_INTERVALS = 2.0, 5

Figures = dict[str, float | None]


class Dcgm:
    """A `dcgmi dmon` that prints values, and the last values of each GPU."""

    def __init__(self, interval_s: float) -> None:
        self.reason: str | None = None  # why there are no values, or no more
        self._last: dict[int, tuple[float, Figures]] = {}
        self._words = ""
        self._closing = False
        self._process: subprocess.Popen[str] | None = None
        self._stale_s = max(STALE_INTERVALS * interval_s, STALE_S)
        command = shutil.which("dcgmi")
        if command is None:
            self.reason = "dcgmi is not installed"
            return
        milliseconds = max(int(1000 * interval_s), FASTEST_MS)
        try:
            self._process = subprocess.Popen(
                [command, "dmon", "-e", ",".join(FIELDS), "-d", str(milliseconds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the training, and a wrapper ends with what it has started
            )
        except OSError as error:
            self.reason = f"dcgmi cannot be started: {error}"
            return
        self._thread = threading.Thread(target=self._read, args=(self._process,), name="tfopt-dcgmi", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        return self._process is not None

    def last(self, gpu: int | None) -> Figures:
        """Returns the last values of a GPU, by its number on the bus; empty if `dcgmi` was never started."""
        if not self.runs:
            return {}
        when, figures = self._last.get(-1 if gpu is None else gpu, (0.0, {}))
        is_fresh = self.reason is None and time.monotonic() - when < self._stale_s
        return {name: figures.get(name) if is_fresh else None for name in FIELDS.values()}

    def close(self) -> None:
        if self._process is None or self._closing:
            return
        self._closing = True
        end(self._process, STOP_S)
        self._thread.join(STOP_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if (match := ROW.match(line)) is not None:
                    number, *values = match.groups()
                    figures = {name: _percent(value) for name, value in zip(FIELDS.values(), values, strict=True)}
                    self._last[int(number)] = (time.monotonic(), figures)
                elif line.strip() and not line.startswith(("#", "ID")):
                    self._words = " ".join(line.split())[:200]
        if not self._closing:
            code = process.wait()
            self.reason = f"dcgmi ended with code {code}{f': {self._words}' if self._words else ''}"


def _percent(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:  # N/A
        return None
    return 100 * share if math.isfinite(share) else None


class Reader(Protocol):
    """Reads all values at one moment."""

    source: str  # where the values come from
    failures: Counter[str]  # error messages, each with the number of failed readings

    @property
    def unavailable(self) -> dict[str, str]:
        """Why a figure has no value."""

    def read(self) -> Figures:
        """Returns the values by name."""

    def close(self) -> None:
        """Releases what the reader holds."""

    def notes(self) -> list[str]:
        """Returns remarks for the summary."""


class GpuReader:
    """Reads the NVIDIA GPUs that this process may use."""

    def __init__(self, interval_s: float) -> None:
        self._nvml = Nvml()
        self._dcgm = Dcgm(interval_s)
        self.source = f"NVML ({', '.join(self._nvml.names)})"
        self.failures = self._nvml.failures

    @property
    def unavailable(self) -> dict[str, str]:
        why = self._dcgm.reason
        if why is None:
            return {**self._nvml.unavailable}
        places = [f"gpu{index}_" for index in range(len(self._nvml.names))] if self._dcgm.runs else [""]
        return {**self._nvml.unavailable, **{f"{gpu}{name}": why for gpu in places for name in FIELDS.values()}}

    def read(self) -> Figures:
        figures: Figures = {}
        for index, (gpu, number) in enumerate(zip(self._nvml.sample(), self._nvml.numbers, strict=True)):
            values = {**gpu.to_dict(), **self._dcgm.last(number)}
            figures |= {f"gpu{index}_{name}": value for name, value in values.items()}
        return figures

    def close(self) -> None:
        self._dcgm.close()
        self._nvml.close()

    def notes(self) -> list[str]:
        throttles = self._nvml.throttles.most_common()
        notes = [f"clocks lowered by {words} in {count} samples" for words, count in throttles]
        return [*notes, self._dcgm.reason] if self._dcgm.runs and self._dcgm.reason is not None else notes


class ProcessReader:
    """Reads the processor load and the memory of a process with its children, and of the machine.

    Without a pid, it is this process without its children. `reason` says why no GPU is read.
    """

    # psutil counts the scheduler's ticks of 10 ms. A percentage of only a few ticks would be random.
    _SHORTEST_S = 0.1

    def __init__(self, reason: str, pid: int | None = None) -> None:
        self.source = f"psutil ({reason})"
        self.failures: Counter[str] = Counter()
        self.unavailable: dict[str, str] = {}
        self._pid = pid
        self._process: psutil.Process | None = None  # asked for at each reading, so that an error is one of the reading
        self._seconds: float | None = None
        self._measured: float | None = None

    def read(self) -> Figures:
        tree = self._tree()
        process_cpu, system_cpu = self._cpu(tree)
        return {
            "process_cpu_percent": process_cpu,
            "system_cpu_percent": system_cpu,
            "process_memory_bytes": _memory(tree),
            "system_memory_used_bytes": float(psutil.virtual_memory().used),
        }

    def close(self) -> None:
        """Does nothing, because psutil has nothing to release."""

    def notes(self) -> list[str]:
        return []

    def _tree(self) -> list[psutil.Process]:
        """Returns the processes that are read; none if the program has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = self._process or psutil.Process(self._pid)
            if self._pid is None:
                return [self._process]
            if self._process.is_running():  # its number may be that of another process by now
                return [self._process, *self._process.children(recursive=True)]
        return []

    def _cpu(self, tree: list[psutil.Process]) -> tuple[float | None, float | None]:
        """Returns the load since the last call. The first call returns None, and only starts the measurement."""
        now, before = time.perf_counter(), self._measured
        if before is not None and now - before < self._SHORTEST_S:
            return None, None
        self._measured = now
        seconds, self._seconds = self._seconds, _cpu_seconds(tree, with_ended=self._pid is not None)
        system = psutil.cpu_percent()
        if before is None:
            return None, None
        if seconds is None or self._seconds is None:
            return None, system
        return 100 * max(self._seconds - seconds, 0.0) / (now - before), system


def _memory(tree: list[psutil.Process]) -> float | None:
    sizes = []
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            sizes.append(process.memory_info().rss)
    return float(sum(sizes)) if any(sizes) else None


def _cpu_seconds(tree: list[psutil.Process], *, with_ended: bool) -> float | None:
    """Returns the processor time of processes, also of their children that have ended."""
    total = None
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            times = process.cpu_times()
            of_ended = times.children_user + times.children_system if with_ended else 0.0
            total = (total or 0.0) + times.user + times.system + of_ended
    return total


def open_reader(interval_s: float, pid: int | None = None) -> Reader:
    """Returns a reader of the GPUs, or of the processor load of a process (None is this one) if no GPU can be read.

    Example:
        >>> reader = open_reader(0.5)
        >>> reader.source.split(" ")[0] in ("NVML", "psutil")
        True
        >>> reader.close()
    """
    try:
        return GpuReader(interval_s)
    except NvmlUnavailableError as reason:
        return ProcessReader(str(reason), pid)
    except Exception as error:  # noqa: BLE001 - a broken driver is no reason to stop
        return ProcessReader(f"no NVIDIA GPU can be read: {type(error).__name__}: {error}", pid)
