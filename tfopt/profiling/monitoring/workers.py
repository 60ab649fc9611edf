"""The timelines of several workers, put together from a directory that they share.

A worker adds a line to its file at each sample, so that the file is there also when the worker is killed. A worker that
is started again writes a second file. The lines are

    {"source": "NVML (A100)"}                        at the start of each fit
    {"names": ["gpu0_power_watts", ...]}             the series of the lines that follow
    [1700000000.0, 251.5, null, ...]                 the time of a sample, and its values
    {"unavailable": {...}, "notes": [...]}           at its end, if the worker was not killed
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tfopt.atomic.files import read_stored
from tfopt.errors import ArtifactError
from tfopt.report import Utilization

MOST_TIMES = 10**7  # a run of months
PREFIX = "utilization-"
Figures = Mapping[str, float | None]


class WorkerFile:
    """The timeline of this worker in a directory that all workers share.

    The directory is made if it is missing, and a file that is there is continued. After an error, for example of a full
    disk, nothing more is written, and `problem` is the reason.

    Example:
        >>> import tempfile
        >>> shared = tempfile.mkdtemp()
        >>> file = WorkerFile(worker_path(shared), "NVML (A100)")
        >>> file.write({"gpu0_power_watts": 250.0})
        >>> file.close({}, [])
        >>> list(merge_workers(shared).series)[0].endswith("_gpu0_power_watts")
        True
    """

    def __init__(self, path: Path, source: str) -> None:
        self.problem: str | None = None
        self._file: TextIO | None = None
        self._names: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            self.problem = str(error)
        self._write({"source": source})

    def write(self, figures: Figures) -> None:
        if figures and list(figures) != self._names:
            self._names = list(figures)
            self._write({"names": self._names})
        self._write([time.time(), *(figures.get(name) for name in self._names)])

    def close(self, unavailable: Mapping[str, str], notes: Sequence[str]) -> None:
        self._write({"unavailable": dict(unavailable), "notes": list(notes)})
        self._end()

    def _write(self, line: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()  # a worker that is killed leaves its last sample
        except OSError as error:
            self.problem = str(error)
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def worker_path(directory: str | Path) -> Path:
    """Returns a new file for the timeline of this process."""
    return Path(directory) / f"{PREFIX}{_worker()}-{uuid.uuid4().hex[:12]}.jsonl"


@dataclass
class _Timeline:
    """What one worker has written, in one life or in several."""

    source: str = ""
    times: list[float] = field(default_factory=list)
    samples: list[dict[str, float | None]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The usual time between two samples."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return max(statistics.median(gaps), 1e-3) if gaps else 1.0

    def go_on(self, later: _Timeline) -> None:
        """Adds the samples of a worker that was started again. Its energy goes on from that of before."""
        spent = {name: value for sample in self.samples for name, value in _joules(sample)}
        for sample in later.samples:
            sample |= {name: value + spent.get(name, 0.0) for name, value in _joules(sample)}
        self.times += later.times
        self.samples += later.samples
        self.unavailable |= later.unavailable
        self.notes += later.notes


def merge_workers(directory: str | Path) -> Utilization:
    """Returns one timeline of all workers. The name of a series begins with the worker, as in "worker1_gpu0_...".

    The samples of all workers are put on common times, which count from the first sample of all; so the clocks of the
    hosts must agree. A worker that was started again continues its series, and has no value in between. Two workers of
    one name at the same time, which do not know their number, are "host" and "host.2".

    Args:
        directory: The directory given to each worker's GpuMonitor.
    Raises:
        ArtifactError: The directory has no timeline, or a file is damaged.
    Example:
        >>> merge_workers("no_such_directory")
        Traceback (most recent call last):
        ...
        tfopt.errors.ArtifactError: The directory must hold timelines of GpuMonitor. Received: no_such_directory, ...
    """
    files = Path(directory).glob(f"{PREFIX}*.jsonl")
    lives = [(file.stem.removeprefix(PREFIX).rpartition("-")[0], _read(file)) for file in files]
    workers = _joined([(name, life) for name, life in lives if life.times])
    if not workers:
        raise ArtifactError(
            f"The directory must hold timelines of GpuMonitor. Received: {directory}, which has none. "
            "Pass directory=... to the GpuMonitor of each worker."
        )
    seconds = _common_times(list(workers.values()))
    begin = min(each.times[0] for each in workers.values())
    columns = {name: list(_on_times(each, [begin + moment for moment in seconds])) for name, each in workers.items()}
    kept = [place for place in range(len(seconds)) if any(column[place] for column in columns.values())]
    series = {
        f"{name}_{figure}": [columns[name][place].get(figure) for place in kept]
        for name, each in workers.items()
        for figure in dict.fromkeys(figure for sample in each.samples for figure in sample)
    }
    return Utilization(
        source="; ".join(f"{name}: {each.source}" for name, each in workers.items()),
        seconds=[seconds[place] for place in kept],
        series=series,
        unavailable={f"{name}_{key}": why for name, each in workers.items() for key, why in each.unavailable.items()},
        notes=[f"{name}: {note}" for name, each in workers.items() for note in each.notes],
    )


def _joined(lives: Sequence[tuple[str, _Timeline]]) -> dict[str, _Timeline]:
    """Returns the timeline of each worker from those of its lives."""
    workers: dict[str, _Timeline] = {}
    for name, life in sorted(lives, key=lambda each: each[1].times[0]):
        own, number = name, 1
        while own in workers and workers[own].times[-1] >= life.times[0]:  # another process of the same name
            number += 1
            own = f"{name}.{number}"
        if own in workers:
            workers[own].go_on(life)
        else:
            workers[own] = life
    return dict(sorted(workers.items()))


def _common_times(workers: Sequence[_Timeline]) -> list[float]:
    """Returns the times for all, since the first sample: a grid of the shortest step, where there are samples."""
    step = min(each.step_s for each in workers)
    begin, end = min(each.times[0] for each in workers), max(each.times[-1] for each in workers)
    last = math.ceil((end - begin) / step)
    count = sum(len(each.times) * 2 * each.step_s / step for each in workers)
    if count > MOST_TIMES:
        raise ArtifactError(
            f"Timelines must be of one run. Received: samples {end - begin:.3g} s apart, one every {step:.3g} s for a "
            "worker. A file of them is damaged or of another run: remove it."
        )
    places = {
        math.ceil((moment - begin) / step) + later
        for each in workers
        for moment in each.times
        for later in range(math.ceil(2 * each.step_s / step))
    }
    return [place * step for place in sorted(places) if place <= last]


def _on_times(worker: _Timeline, times: Sequence[float]) -> Iterator[Figures]:
    """Yields the last sample before each time; an empty one where the worker had none for two of its steps."""
    place, step = -1, worker.step_s
    for moment in times:
        while place + 1 < len(worker.times) and worker.times[place + 1] <= moment:
            place += 1
        is_fresh = place >= 0 and moment - worker.times[place] < 2 * step
        yield worker.samples[place] if is_fresh else {}


def _read(file: Path) -> _Timeline:
    found = _Timeline()
    names: list[str] = []
    try:
        lines = read_stored(file).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"A timeline must be readable. Received: {file} ({error}). Remove it.") from error
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if isinstance(line, list):
                moment, sample = float(line[0]), dict(zip(names, line[1:], strict=True))
                if not all(value is None or math.isfinite(value) for value in (moment, *sample.values())):
                    raise ValueError(f"line {number} has values that are not finite")
                found.times.append(moment)
                found.samples.append(sample)
                continue
            names = list(map(str, line.get("names", names)))
            found.source = str(line.get("source", found.source))
            found.unavailable |= {str(name): str(why) for name, why in line.get("unavailable", {}).items()}
            found.notes += map(str, line.get("notes", []))
        except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
            if number == len(lines):  # the worker was killed while it wrote
                continue
            raise ArtifactError(f"A timeline is damaged. Received: {file} ({error}). Remove it.") from error
    return found


def _joules(sample: Figures) -> list[tuple[str, float]]:
    return [(name, value) for name, value in sample.items() if value is not None and name.endswith("_joules")]


def _worker() -> str:
    """Returns "worker1" from TF_CONFIG or Slurm, or the name of the host."""
    try:
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
        return f"{task['type']}{task['index']}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    if "SLURM_STEP_NODELIST" in os.environ and "SLURM_PROCID" in os.environ:
        return f"worker{os.environ['SLURM_PROCID']}"
    return socket.gethostname()
