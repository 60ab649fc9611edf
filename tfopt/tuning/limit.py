"""The memory that a training may take: which limit is the least, how a trial keeps it, and how much a trial took.

Three sizes of a process are limited, each by something else: the resident memory by containers and by the memory of the
machine, the data segment by RLIMIT_DATA, and the address space by RLIMIT_AS. TensorFlow reserves far more addresses
than it uses, so a limit of one says nothing about the others. A trial therefore measures the size that is limited. A
limit of the operating system lets an allocation fail, which TensorFlow reports or which ends the process. Any other
limit is watched: the process ends itself when it takes more, before the kernel ends others.
"""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfopt.atomic.files import write_text
from tfopt.report import Record
from tfopt.report.formatting import memory_size
from tfopt.trials.child import ANSWER

Size = Literal["resident", "data", "addresses", "gpu"]
FIELDS: dict[str, str] = {"resident": "VmRSS", "data": "VmData", "addresses": "VmSize"}  # in /proc/self/status
PEAKS: dict[str, str] = {"resident": "VmHWM", "addresses": "VmPeak"}
LIMITS = {"data": resource.RLIMIT_DATA, "addresses": resource.RLIMIT_AS}
SAMPLED_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Limit(Record):
    """A limit of memory.

    Attributes:
        bytes: The limit.
        margin: Share of it that stays free.
        size: What is limited: the resident memory, the data segment or the addresses of a process, or a GPU's memory.
        source: Where it comes from, in words.
        hard: Whether the operating system enforces it in the trials.
    """

    bytes: int
    margin: float
    size: Size = "resident"
    source: str
    hard: bool = False

    @property
    def usable(self) -> int:
        """The limit without its margin."""
        return int(self.bytes * (1 - self.margin))

    def __str__(self) -> str:
        margin = f", of which {self.margin:.0%} stay free" if self.margin else ""
        return f"{memory_size(self.bytes)} ({self.source}){margin}"


def find_limit(given: int | None, margin: float, *, hard: bool, sharing: int = 1) -> Limit:
    """Returns the limit that is given, or that of this machine, whose free memory several processes may share.

    Example:
        >>> print(find_limit(2**30, 0.1, hard=False))
        1.0 GiB (memory_limit_bytes), of which 10% stay free
        >>> find_limit(None, 0.1, hard=False).bytes > 0
        True
    """
    if hard and given is not None:
        return Limit(bytes=given, margin=margin, size="data", source="memory_limit_bytes, enforced", hard=True)
    from tfopt.data.sizes import available_memory_bytes  # here, because a script imports TensorFlow itself
    from tfopt.hardware import detect

    gpus = [gpu.memory_bytes for gpu in detect().gpus]
    if gpus:
        known = [size for size in gpus if size is not None]
        if given is not None or known:
            source = "the GPU's memory" if given is None else "memory_limit_bytes"
            return Limit(bytes=given or min(known), margin=margin, size="gpu", source=source)
    if given is not None:
        return Limit(bytes=given, margin=margin, source="memory_limit_bytes")
    source = "free memory, also of the container" + (f", shared by {sharing} workers" if sharing > 1 else "")
    least = Limit(bytes=available_memory_bytes() // sharing, margin=margin, source=source)
    for size, number in LIMITS.items():
        soft, _ = resource.getrlimit(number)
        # A limit of addresses has to be far larger than the resident memory to be no limit.
        if soft != resource.RLIM_INFINITY and soft < (4 if size == "addresses" else 1) * least.bytes:
            name = "RLIMIT_AS" if size == "addresses" else "RLIMIT_DATA"
            return Limit(bytes=soft, margin=margin, size=size, source=name, hard=True)  # type: ignore[arg-type]
    return least


def process_bytes(field: str) -> int:
    """Returns a size of this process, by its name in /proc/self/status.

    Example:
        >>> process_bytes("VmRSS") <= process_bytes("VmHWM")
        True
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


class Used:
    """The memory that a trial has taken so far."""

    def __init__(self, size: Size) -> None:
        self._size, self.sampled = size, 0

    def peak(self) -> int:
        """Returns the largest size until now, in bytes."""
        if self._size == "gpu":
            import tensorflow as tf

            names = [each.name.removeprefix("/device:") for each in tf.config.list_logical_devices("GPU")]
            return max((int(tf.config.experimental.get_memory_info(name)["peak"]) for name in names), default=0)
        known = process_bytes(PEAKS[self._size]) if self._size in PEAKS else process_bytes(FIELDS[self._size])
        return max(known, self.sampled)


@contextmanager
def kept(limit: Limit | None, directory: Path) -> Iterator[Used]:
    """Keeps a limit in this process, which is that of a trial, and measures what it takes.

    Args:
        limit: The limit; None only measures the resident memory.
        directory: The directory of the trial, where the process says why it ends itself.
    """
    limit = limit or Limit(bytes=2**62, margin=0.0, source="none")
    used, ended = Used(limit.size), threading.Event()
    if limit.hard:
        number = LIMITS[limit.size]
        _, most = resource.getrlimit(number)
        usable = limit.usable if most == resource.RLIM_INFINITY else min(limit.usable, most)
        resource.setrlimit(number, (usable, most))

    def watch() -> None:
        while not ended.wait(SAMPLED_S):
            used.sampled = max(used.sampled, process_bytes(FIELDS[limit.size]))
            if not limit.hard and used.sampled > limit.bytes:
                said = f"MemoryError: it took over {memory_size(limit.bytes)}, {limit.source}"
                write_text(directory / ANSWER, json.dumps({"error": said}))
                os._exit(1)

    if limit.size in FIELDS:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield used
    finally:
        ended.set()


def of_json(values: dict[str, object] | None) -> Limit | None:
    """Returns the limit of its dict."""
    return None if values is None else Limit(**values)  # type: ignore[arg-type]
