"""Too little memory, too few open files, a child that the kernel ends, and a clock that is set back.

Each act runs in a fork of its trial, since some ends of a process cannot be caught: TensorFlow aborts the process where
its allocator, or the start of one of its threads, finds no memory. Then no file may be lost, and a second attempt with
enough memory gives the usual result.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from campaign.fault import (
    EQUAL_OR_WORD,
    LOST,
    OR_ABORT,
    WORD,
    Bad,
    Fault,
    Said,
    as_error,
    digest,
    in_fork,
    make_template,
)
from campaign.limits import address_space, at_event, limited, open_files
from campaign.writing import (
    WRITERS,
    Measured,
    Writer,
    check_again,
    check_left,
    isolated,
    listing,
    made,
    measured,
    place_of,
    temporary_files,
)

KIND = "memory"
NO_DATA_OF_THREAD = 127  # with which glibc ends a process that has no memory for a new thread's data
ABORTED = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL, NO_DATA_OF_THREAD)
MIB = 2**20
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
DAY_S = 86_400.0


def _apart(writer: Writer, usual: Measured, place: Path, fault: Callable[[], Any]) -> Any:
    """Writes in a fork with a fault, and looks at what is left: the trial itself has memory."""
    disk, answer, log = place_of(place), place / "answer.json", place / "log.txt"
    before = listing(disk)

    def act() -> None:
        found = {}
        try:
            with fault():
                writer.write(disk, 1)
        except Exception as error:  # noqa: BLE001 - what it is decides the outcome
            found = as_error(error)
        answer.write_text(json.dumps(found))

    with isolated(place):
        code = in_fork(act, log, writer.seconds)
        if code is None:
            raise TimeoutError(f"over {writer.seconds:g} s")
        failed = json.loads(answer.read_text()) if answer.is_file() else {"text": f"ended with {code}"}
        if not failed:
            return writer.read(disk)
        if answer.is_file():
            check_left(writer, disk, before, failed["text"], usual.digest)
        elif code not in ABORTED:
            raise RuntimeError(f"exit code {code}: {log.read_text(errors='replace')[-300:]}")
        check_again(writer, disk, failed["text"], usual.digest)
        if answer.is_file():
            raise (
                Said(failed["text"])
                if failed["outcome"] == WORD
                else RuntimeError(f"{failed['text']} ({failed['where']})")
            )
        # What a process that was killed has left, the second attempt has removed.
        check_left(writer, disk, {}, None, usual.digest)
        return writer.read(disk)


def _with_memory(writer: Writer, usual: Measured, room: int) -> Callable[[Path], Any]:
    return lambda place: _apart(writer, usual, place, lambda: limited(resource.RLIMIT_AS, address_space() + room))


def _with_files(writer: Writer, usual: Measured, room: int) -> Callable[[Path], Any]:
    return lambda place: _apart(writer, usual, place, lambda: limited(resource.RLIMIT_NOFILE, open_files() + room))


def _groups() -> Path:
    """Returns the directory in which this process may make memory cgroups."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if line.split(":")[1] == "memory"), "")
    return Path("/sys/fs/cgroup/memory") / own.strip("/")


@contextlib.contextmanager
def _group(room: int) -> Iterator[None]:
    """Puts this process into a memory cgroup, whose kernel ends what takes more."""
    group = _groups() / f"campaign-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(room))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    yield


def _remove_groups() -> None:
    for group in _groups().glob("campaign-*"):
        with contextlib.suppress(OSError):  # another campaign is in it
            group.rmdir()


def _in_a_group(writer: Writer, usual: Measured, room: int) -> Callable[[Path], Any]:
    def act(place: Path) -> Any:
        try:
            return _apart(writer, usual, place, lambda: _group(room))
        finally:
            _remove_groups()

    return act


def _try_a_group() -> None:
    with _group(1024 * MIB):
        pass


def _dated(writer: Writer, seconds: float) -> Callable[[Path], Any]:
    """All that was written before was written at another time: the clock was set back, or had been wrong."""

    def act(place: Path) -> Any:
        then = time.time() + seconds
        for path in [place_of(place), *place_of(place).rglob("*")]:
            os.utime(path, (then, then))
        with isolated(place):
            writer.write(place_of(place), 1)
        return writer.read(place_of(place))

    return act


def _children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


@contextlib.contextmanager
def child_killed(after_s: float) -> Iterator[None]:
    """Ends the first child that this process starts, so many seconds later, as the kernel does for want of memory."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for child in _children(os.getpid()):
                time.sleep(after_s)
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _bench(place: Path) -> Any:
    import tfopt

    (row,) = tfopt.benchmark([place_of(place) / "model"], seconds=0.1).rows
    if row.failure:
        raise Said(row.failure)
    return ["measured"]


def _verify(place: Path) -> Any:
    import tfopt

    receipt = tfopt.verify(place_of(place) / "model")
    if not receipt.ok:
        raise Said(" ".join(receipt.problems))
    return ["measured"]


def _call_apart(place: Path) -> Any:
    from tfopt.trials.process import call_apart

    found = call_apart("math:gcd", {}, place / "trial", 100.0)
    if found.failure:
        raise Said(found.failure)
    return ["measured"]


PARENTS = {"verify": _verify, "bench": _bench, "a trial": _call_apart}


def _killed(parent: Callable[[Path], Any], after_s: float) -> Callable[[Path], Any]:
    def act(place: Path) -> Any:
        before = listing(place_of(place))
        with isolated(place):
            try:
                with child_killed(after_s):
                    return parent(place)
            finally:
                if (left := [*temporary_files()]) or listing(place_of(place)) != before:
                    raise Bad(LOST, f"left or changed: {left}")

    return act


def _clock_set_back(writer: Writer, event: int) -> Callable[[Path], Any]:
    """Sets the clock of a process back by ten days while it writes; that takes the library of faketime."""

    def act(place: Path) -> Any:
        with isolated(place):
            offset = place / "offset"
            offset.write_text("+0")
            faked = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
            words = [
                sys.executable,
                "-m",
                "campaign.memory",
                writer.part,
                str(place_of(place)),
                str(offset),
                str(event),
            ]
            paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
            settings = {**os.environ, **faked, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": paths}
            done = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-300:])
        return writer.read(place_of(place))

    return act


def _write_meanwhile(part: str, disk: str, offset: str, event: str) -> None:
    """The process whose clock is set back."""
    began = time.time()
    with at_event(Path(disk), int(event), lambda: Path(offset).write_text("-10d") and None):
        next(writer for writer in WRITERS if writer.part == part).write(Path(disk), 1)
    assert time.time() < began, "the clock was not set back"


def _trials(writer: Writer, usual: Measured, seed: int, share: float, groups: bool) -> Iterator[tuple[str, str, Any]]:
    draw = random.Random(seed)
    share *= writer.share

    def drawn(count: int) -> list[float]:
        count = max(round(count * share), 1)
        return [(number + draw.random()) / count for number in range(count)]

    for part in drawn(8):
        room = int(2 ** (10 * part) * MIB)  # from 1 MiB to 1 GiB
        yield f"{room // MIB:,} MiB more of addresses", OR_ABORT, _with_memory(writer, usual, room)
    for room in sorted({int(part * 14) for part in drawn(6)}):
        yield f"{room} more open files", OR_ABORT, _with_files(writer, usual, room)
    if groups:
        for part in drawn(3):
            room = int(2 ** (3 + 5 * part) * MIB)  # from 8 to 256 MiB
            yield f"a memory cgroup of {room // MIB:,} MiB", OR_ABORT, _in_a_group(writer, usual, room)
    if not writer.begins_anew and (share >= 0.5 or seed % 2):
        for words, seconds in (("in 10 years", 3650 * DAY_S), ("in 1970", -time.time() + DAY_S)):
            yield f"files dated {words}", EQUAL_OR_WORD, _dated(writer, seconds)
    if share >= 1 and Path(FAKETIME).is_file() and "export to" not in writer.part:
        event = max(usual.events // 2, 1)
        yield f"the clock is set back by 10 days at access {event}", EQUAL_OR_WORD, _clock_set_back(writer, event)


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the faults of each writer; with a share below 1 as many fewer of those that are drawn."""
    log = work / "groups.log"
    groups = in_fork(_try_a_group, log, 60) == 0
    _remove_groups()
    if not groups:
        print(f"no memory cgroups here: {log.read_text().splitlines()[-1]}", file=sys.stderr)
    for number, writer in enumerate(WRITERS):
        if only and only not in f"{KIND}: {writer.part}":
            continue
        template = work / f"writer-{number}"
        make_template(writer.part, partial(made, writer, template), work / f"writer-{number}.log")
        usual = measured(writer, KIND, template, work / "place")
        for how, must, act in _trials(writer, usual, number, share, groups):
            yield Fault(
                kind=KIND,
                part=writer.part,
                how=how,
                act=act,
                template=template,
                expected=usual.digest,
                must=must,
                keeps=False,
                limit_s=3 * writer.seconds,
            )
    yield from _ended_children(work, only)


def _ended_children(work: Path, only: str) -> Iterator[Fault]:
    template = work / "killed"
    for part, parent in PARENTS.items():
        if only and only not in f"{KIND}: {part}":
            continue
        if not template.is_dir():
            make_template(part, partial(made, WRITERS[0], template), work / "killed.log")
        for after_s in (0.05, 3.0):
            yield Fault(
                kind=KIND,
                part=part,
                how=f"its child is killed after {after_s:g} s",
                act=_killed(parent, after_s),
                template=template,
                expected=digest(["measured"]),
                keeps=False,
                limit_s=150,
            )


if __name__ == "__main__":
    _write_meanwhile(*sys.argv[1:])
