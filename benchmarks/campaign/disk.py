"""The disk in the middle of each write: full, too small a limit, read-only, gone, of somebody else; and odd names.

A failure is told in a clear word, the earlier state stays as it was, no temporary file is left, and a second attempt on
a sound disk gives what comes out without the fault.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaign.fault import EQUAL_OR_WORD, Fault, Said, digest, in_fork, make_template
from campaign.limits import as_anybody, at_event, full_disk, limited, own_mounts, read_only, writable_again
from campaign.writing import WRITERS, Measured, Writer, attempt, isolated, made, measured, place_of

KIND = "disk"
NOBODY = 65534

Trial = Callable[[Path], Any]  # acts in the place of a fault, and returns what came out


@dataclass(frozen=True, kw_only=True)
class _Tried:
    writer: Writer
    usual: Measured

    def on_a_full_disk(self, share: float) -> Trial:
        def act(place: Path) -> Any:
            larger = full_disk(place_of(place), int(share * self.usual.bytes))
            return self._attempt(place, contextlib.nullcontext(), larger)

        return act

    def with_files_up_to(self, share: float) -> Trial:
        most = max(int(share * self.usual.largest), 1)
        return lambda place: self._attempt(place, limited(resource.RLIMIT_FSIZE, most))

    def with_an_error_at(self, event: int) -> Trial:
        def act(place: Path) -> Any:
            def fail() -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(place_of(place)))

            return self._attempt(place, at_event(place_of(place), event, fail))

        return act

    def removed_at(self, event: int) -> Trial:
        """The directory and all in it is removed by somebody: nothing earlier can stay."""

        def act(place: Path) -> Any:
            disk = place_of(place)
            was_whole = []

            def remove() -> None:
                with contextlib.suppress(Exception):  # half of it is there
                    was_whole.append(digest(self.writer.read(disk)) == self.usual.digest)
                shutil.rmtree(disk, ignore_errors=True)

            with isolated(place), at_event(disk, event, remove):
                self.writer.write(disk, 1)
            if was_whole == [True]:
                raise Said("all was written when it was removed")
            return self.writer.read(disk)

        return act

    def read_only(self, place: Path) -> Any:
        read_only(place_of(place))
        return self._attempt(place, contextlib.nullcontext(), lambda: writable_again(place_of(place)))

    def of_somebody_else(self, mode: int, *, files: bool) -> Trial:
        """The directory, or only what is in it, belongs to another user, and has this mode."""

        def act(place: Path) -> Any:
            disk = place_of(place)
            before = {path: path.stat() for path in [disk, *disk.rglob("*")]}
            for path in before:
                if path != disk or not files:
                    os.chown(path, NOBODY, NOBODY)
                    path.chmod(mode)
                elif files:
                    os.chown(path, NOBODY, NOBODY)
                    path.chmod(0o777)

            def undo() -> None:
                for path, status in before.items():
                    if path.exists():
                        os.chown(path, status.st_uid, status.st_gid)
                        path.chmod(status.st_mode & 0o7777)

            return self._attempt(place, as_anybody(), undo)

        return act

    def named(self, name: bytes) -> Trial:
        """The directory has an odd name. A name that is no path of this system has nothing before it."""

        def act(place: Path) -> Any:
            disk = place / os.fsdecode(name)
            with contextlib.suppress(OSError):
                disk.parent.mkdir(parents=True, exist_ok=True)
                place_of(place).rename(disk)
            with isolated(place):
                return attempt(self.writer, disk, contextlib.nullcontext())

        return act

    def in_an_environment(self, change: Callable[[Path], Callable[[], None]]) -> Trial:
        def act(place: Path) -> Any:
            with isolated(place):
                undo = change(place)
                return attempt(self.writer, place_of(place), contextlib.nullcontext(), undo, self.usual.digest)

        return act

    def _attempt(self, place: Path, fault: Any, undo: Callable[[], None] = lambda: None) -> Any:
        with isolated(place):
            return attempt(self.writer, place_of(place), fault, undo, self.usual.digest)


def _temporary(make: Callable[[Path], Any]) -> Callable[[Path], Callable[[], None]]:
    """TMPDIR leads to a directory that cannot be written. The usual ones of the system cannot be written either."""

    def change(place: Path) -> Callable[[], None]:
        directory = place / "other"
        make(directory)
        os.environ["TMPDIR"] = str(directory)
        tempfile.tempdir = None
        tempfile._candidate_tempdir_list = lambda: [str(directory)]  # type: ignore[attr-defined]

        def undo() -> None:
            again = place / "another"
            again.mkdir()
            os.environ["TMPDIR"] = tempfile.tempdir = str(again)

        return undo

    return change


def _full(directory: Path) -> None:
    directory.mkdir()
    full_disk(directory, 0)
    with contextlib.suppress(OSError):
        (directory / "ballast").write_bytes(bytes(2**20))


def _read_only(directory: Path) -> None:
    directory.mkdir()
    read_only(directory)


def _home(value: str | None) -> Callable[[Path], Callable[[], None]]:
    def change(place: Path) -> Callable[[], None]:
        earlier = os.environ.pop("HOME", "/")
        if value is not None:
            os.environ["HOME"] = value
        return lambda: os.environ.update(HOME=earlier)

    return change


NAMES = {
    "a name with spaces": b"my disk ",
    "a name with a newline": b"my\ndisk",
    "a name with quotes and a dollar": b'it\'s "$HOME" `id`;%s{}',
    "a name that begins with a dash": b"-rf",
    "a name in another script": "データ-ünï".encode(),
    "a name with bytes that are no UTF-8": b"disk\xff\xfe",
    "a name of 4,000 characters": b"n" * 4000,
    "a path of 4,000 characters": b"/".join([b"n" * 199] * 20),
    "a name with a pattern": b"disk[*]?",
}
TEMPORARY_PLACES = {"is full": _full, "is missing": lambda directory: None, "is read-only": _read_only}
HOMES = {"HOME is not set": None, "HOME is missing": "/nonexistent/home", "HOME is a file": "/dev/null"}


def _trials(tried: _Tried, seed: int, share: float, mounts: bool) -> Iterator[tuple[str, Trial]]:
    draw = random.Random(seed)
    share *= tried.writer.share

    def drawn(count: int, most: float) -> list[float]:
        count = max(round(count * share), 1)
        return [(number + draw.random()) / count * most for number in range(count)]

    events = sorted({max(round(each), 1) for each in drawn(10, tried.usual.events)})
    if mounts:
        for part in drawn(14, 1.1):
            size = int(part * tried.usual.bytes)
            yield f"a disk with room for {size:,} bytes", tried.on_a_full_disk(part)
        yield "a read-only disk", tried.read_only
    for part in drawn(8, 1.0):
        yield f"files of at most {int(part * tried.usual.largest):,} bytes", tried.with_files_up_to(part)
    for event in events:
        yield f"an input/output error at access {event}", tried.with_an_error_at(event)
    for event in events[:: 1 if len(events) < 4 else 3]:
        yield f"the directory is removed at access {event}", tried.removed_at(event)
    rest = list(_undrawn(tried, mounts))
    yield from rest[seed % round(1 / min(share, 1)) :: round(1 / min(share, 1))]


def _undrawn(tried: _Tried, mounts: bool) -> Iterator[tuple[str, Trial]]:
    if os.geteuid() == 0:
        for files in (True, False):
            what = "files" if files else "directory"
            for mode in (0o500, 0o755):
                yield f"the {what} of another user, mode {mode:o}", tried.of_somebody_else(mode, files=files)
    for how, name in NAMES.items():
        yield how, tried.named(name)
    for how, make in TEMPORARY_PLACES.items():
        if mounts or how == "is missing":
            yield f"TMPDIR {how}", tried.in_an_environment(_temporary(make))
    for how, value in HOMES.items():
        yield how, tried.in_an_environment(_home(value))


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the faults of each writer; with a share below 1 as many fewer of those that are drawn."""
    log = work / "mounts.log"
    mounts = in_fork(own_mounts, log, 60) == 0
    if not mounts:
        print(f"no disks of their own here: {log.read_text().splitlines()[-1]}", file=sys.stderr)
    for number, writer in enumerate(WRITERS):
        if only and only not in f"{KIND}: {writer.part}":
            continue
        template = work / f"writer-{number}"
        make_template(writer.part, partial(made, writer, template), work / f"writer-{number}.log")
        usual = measured(writer, KIND, template, work / "place")
        for how, act in _trials(_Tried(writer=writer, usual=usual), number, share, mounts):
            yield Fault(
                kind=KIND,
                part=writer.part,
                how=how,
                act=act,
                template=template,
                expected=usual.digest,
                must=EQUAL_OR_WORD,
                keeps=False,
                limit_s=writer.seconds,
            )
        shutil.rmtree(template, ignore_errors=True)
