"""Reads the share of busy multiprocessors and tensor cores through `dcgmi`, where NVIDIA's DCGM is installed.

NVML says whether any kernel runs. DCGM says how many of the multiprocessors have work, and how busy the tensor cores
are: https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html

`dcgmi dmon` prints a header now and then, and a row for each GPU:

    #Entity   SMACT        TENSO
    ID
    GPU 0     0.913        0.402
    GPU 1     N/A          N/A
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import threading
import time

from tfopt.child_processes import end

# DCGM_FI_PROF_SM_ACTIVE and DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, shares from 0 to 1.
FIELDS = {"1002": "sm_active_percent", "1004": "tensor_active_percent"}
ROW = re.compile(r"^\s*GPU\s+(\d+)\s+(\S+)\s+(\S+)")
FASTEST_MS = 100
STOP_S = 2.0
# A row that is older than this, and than some intervals, says nothing of the present.
STALE_S, STALE_INTERVALS = 2.0, 5

Figures = dict[str, float | None]


class Dcgm:
    """A `dcgmi dmon` that prints values, and the last values of each GPU.

    Args:
        interval_s: Seconds between two prints.

    Attributes:
        reason: Why there are no values, or no more; None while `dcgmi` runs.
        runs: Whether `dcgmi` was started.
    """

    def __init__(self, interval_s: float) -> None:
        self.reason: str | None = None
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
        """Ends `dcgmi`."""
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
