"""Reads the share of busy multiprocessors and tensor cores through `dcgmi`, where NVIDIA's DCGM is installed.

NVML says whether any kernel runs. DCGM says how many of the multiprocessors have work, and how busy the tensor cores
are: https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading

# DCGM_FI_PROF_SM_ACTIVE and DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, shares from 0 to 1.
FIELDS = {"1002": "sm_active_percent", "1004": "tensor_active_percent"}
ROW = re.compile(r"^\s*GPU\s+(\d+)\s+(\S+)\s+(\S+)")
STOP_S = 2.0


class Dcgm:
    """A `dcgmi dmon` that prints values, and the last values of each GPU.

    Args:
        interval_s: Seconds between two prints.
    """

    def __init__(self, interval_s: float) -> None:
        self._last: dict[int, dict[str, float]] = {}
        self._process: subprocess.Popen[str] | None = None
        command = shutil.which("dcgmi")
        if command is None:
            return
        milliseconds = max(int(1000 * interval_s), 100)  # dcgmi samples no faster
        self._process = subprocess.Popen(
            [command, "dmon", "-e", ",".join(FIELDS), "-d", str(milliseconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, name="tfopt-dcgmi", daemon=True)
        self._thread.start()

    def last(self, gpu: int | None) -> dict[str, float]:
        """Returns the last values of a GPU, by its number on the bus; empty if there are none."""
        return {} if gpu is None else dict(self._last.get(gpu, {}))

    def close(self) -> None:
        """Ends `dcgmi`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (match := ROW.match(line)) is None:
                continue
            number, *values = match.groups()
            known = zip(FIELDS.values(), values, strict=True)
            self._last[int(number)] = {name: 100 * float(value) for name, value in known if _is_number(value)}


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None
