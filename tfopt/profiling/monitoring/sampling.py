"""The thread that reads all values, from before the first step to after the last.

What is watched never waits for the thread, except at the start for the first answer and at the end for the last sample,
each for some seconds at most: a driver that hangs must not stop a training. It is one thread for the whole time, which
also opens and closes what it reads.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tfopt.compat.frames import frame_of_thread
from tfopt.profiling.monitoring.readers import Figures, Reader
from tfopt.profiling.monitoring.workers import WorkerFile
from tfopt.report import Utilization

NOT_SAMPLED = "not sampled yet"
ANSWER_S = 10.0
# An interval may be an hour long. The end of the watched call is noticed after this time at most.
LONGEST_WAIT_S = 0.5
# A sample of eight GPUs takes some 13 kB. At two samples per second so many are the first two hours.
MOST = 2**14

Sample = tuple[float, Figures]


class Samples:
    """Samples in the order of time. When there are too many, each two that are neighbours become one.

    So the times between samples double, from then on too. A figure becomes the mean, a figure that counts up the last.

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
        with self._lock:
            return [*self._kept, *self._latest]


class Sampling:
    """Reads all values until it is stopped, or until the call that it watches has ended.

    The thread calls `open_reader`, which returns what is read. The times of the samples count from `began`, a
    `time.perf_counter()`, or from now. When the call `during` has ended without a word, because it raised an error,
    sampling ends too. The file at `path` receives each sample; see WorkerFile.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        interval_s: float,
        *,
        began: float | None = None,
        during: FrameType | None = None,
        path: Path | None = None,
    ) -> None:
        self.source = f"no answer within {ANSWER_S:.0f} s"
        self.samples = Samples()
        self.failures: Counter[str] = Counter()
        self._open_reader, self._interval_s, self._path = open_reader, interval_s, path
        self._reader: Reader | None = None
        self._file: WorkerFile | None = None
        self._began = time.perf_counter() if began is None else began
        # The frame itself, and not its id: after the call, another one may get the same id.
        self._during, self._caller = during, threading.get_ident()
        self._answered, self._stopping = threading.Event(), threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="tfopt-GpuMonitor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._cannot_read(error)
        else:
            self._answered.wait(ANSWER_S)

    @property
    def unavailable(self) -> dict[str, str]:
        return {} if self._reader is None else dict(self._reader.unavailable)

    @property
    def notes(self) -> list[str]:
        notes = [] if self._reader is None else self._reader.notes()
        return [*notes, *(f"{words} ({count} times)" for words, count in self.failures.most_common(3))]

    @property
    def unwritable(self) -> str | None:
        """Why the file could not be written; None if it could."""
        return None if self._file is None else self._file.problem

    def stop(self) -> None:
        """Takes the last sample and ends sampling."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():
            self._given_up = True
            self.failures[f"no answer for {ANSWER_S:.0f} s from {self.source}"] += 1

    def _run(self) -> None:
        try:
            reader = self._open_reader()
            self._reader, self.source, self.failures = reader, reader.source, reader.failures
        except Exception as error:  # noqa: BLE001 - what is watched goes on after any error
            self._cannot_read(error)
            self._answered.set()
            return
        if self._path is not None:
            self._file = WorkerFile(self._path, reader.source)
        try:
            due = time.monotonic()
            while True:
                self._sample(reader)
                self._answered.set()
                # A reading that takes longer than the interval must not keep a core busy.
                due = max(due + self._interval_s, time.monotonic() + self._interval_s / 2)
                if not self._wait(due):
                    break
            self._sample(reader)
        finally:
            self._during = None
            with suppress(Exception):  # nothing is left to be lost
                reader.close()
            if self._file is not None:
                self._file.close(self.unavailable, self.notes)

    def _wait(self, due: float) -> bool:
        """Waits for the next sample. Returns False if there is none, because sampling ends."""
        while True:
            left = due - time.monotonic()
            if self._stopping.wait(min(max(left, 0.0), LONGEST_WAIT_S)):
                return False
            if self._during is not None and not _is_running(self._during, self._caller):
                return False
            if left <= LONGEST_WAIT_S:
                return True

    def _sample(self, reader: Reader) -> None:
        try:
            figures = reader.read()
        except Exception as error:  # noqa: BLE001 - what is watched goes on; a warning at its end reports the error
            self.failures[f"{type(error).__name__}: {error}"] += 1
            figures = {}
        if not self._given_up:
            self.samples.add(time.perf_counter() - self._began, figures)
            if self._file is not None:
                self._file.write(figures)

    def _cannot_read(self, error: Exception) -> None:
        self.source = f"unavailable ({type(error).__name__}: {error})"
        self.failures[f"{type(error).__name__}: {error}"] += 1


def timeline(samplings: Iterable[Sampling]) -> Utilization:
    """Returns the samples of one sampling after the other as one record."""
    every = list(samplings)
    samples = [sample for each in every for sample in each.samples.so_far()]
    names = dict.fromkeys(name for _, figures in samples for name in figures)
    unavailable: dict[str, str] = {}
    for each in every:
        unavailable |= each.unavailable
    return Utilization(
        source=every[-1].source if every else NOT_SAMPLED,
        seconds=[seconds for seconds, _ in samples],
        series={name: [figures.get(name) for _, figures in samples] for name in names},
        unavailable=unavailable,
        notes=list(dict.fromkeys(note for each in every for note in each.notes)),
    )


def _is_running(call: FrameType, thread: int) -> bool:
    """Returns whether a call is still on the stack of a thread."""
    frame = frame_of_thread(thread)
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False


def _joined(samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    names = dict.fromkeys(name for _, figures in samples for name in figures)
    joined: Figures = {}
    for name in names:
        known = [value for _, figures in samples if (value := figures.get(name)) is not None]
        joined[name] = None if not known else known[-1] if name.endswith("_joules") else statistics.fmean(known)
    return samples[-1][0], joined
