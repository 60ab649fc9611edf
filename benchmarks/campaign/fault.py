"""One fault: how it is made, its trial in a forked process with a deadline, and its outcome in a word.

The process that forks has imported TensorFlow, Keras and tfopt, and used none of them: no device has been started. So a
trial costs no import, and one that hangs or crashes ends alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.cli.exit_codes import OF_A_PATH, is_of_the_machine
from tfopt.errors import TfoptError, TfoptWarning

EQUAL, WORD, AS_IT_STANDS = "equal bits", "clear word", "as it stands"
SILENT, LOST, HANG, TRACEBACK, CRASH = "silent", "lost", "hang", "traceback", "crash"
GOOD = (EQUAL, WORD, AS_IT_STANDS)
OUTCOMES = (*GOOD, SILENT, LOST, HANG, TRACEBACK, CRASH)
EQUAL_OR_WORD = "equal bits, or a clear word"
OR_ABORT = (
    "equal bits, or a clear word; an abort of TensorFlow, which has no other end where its allocator or a thread finds "
    "no memory, loses nothing: a second attempt gives equal bits"
)
A_WORD = "a clear word"
FINITE = "finite results, or a clear word"
HARMLESS = "a clear word, or read without the effect"
NO_ACCIDENT = "a clear word, or what the file now says: it has no checksum"
LIMIT_S = 20.0
PREPARATION_S = 300.0
LONGEST = 300


class NotFinite(Exception):
    """A result is not finite, and nobody has said so."""


class Said(Exception):
    """The clear word of a report or of a command, which is no exception of tfopt."""


class Bad(Exception):
    """A bad outcome that the act itself has found: its name, and what was found."""

    def __init__(self, outcome: str, what: str) -> None:
        super().__init__(what)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: The kind of the fault, a line in the table: "files", "numbers".
        part: What it happens to, for example "manifest.json".
        how: What happens to it.
        act: Makes the fault in a directory of its own, does what a user does, and returns what came out of it.
        template: The directory of which that is a copy; None for an empty one.
        expected: The digest of what comes out without the fault; None if nothing may come out.
        must: What must hold.
        keeps: Whether all files must be in the end as the fault has left them: the act reads only.
        limit_s: Seconds after which it hangs.
    """

    kind: str
    part: str
    how: str
    act: Callable[[Path], Any]
    template: Path | None = None
    expected: str | None = None
    must: str = EQUAL_OR_WORD
    spoil: Callable[[Path], None] = field(default=lambda place: None)
    keeps: bool = True
    limit_s: float = LIMIT_S


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and its outcome, as the results hold it."""

    kind: str
    part: str
    how: str
    must: str
    outcome: str
    detail: str

    @property
    def is_good(self) -> bool:
        allowed = {
            A_WORD: (WORD,),
            EQUAL_OR_WORD: (EQUAL, WORD),
            OR_ABORT: (EQUAL, WORD),
            NO_ACCIDENT: GOOD,
            FINITE: GOOD,
            HARMLESS: GOOD,
        }
        return self.outcome in allowed.get(self.must, (EQUAL,))


def digest(value: Any) -> str:
    """Returns the digest of what came out: arrays, plain values, or structures of them."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, dict):
            for name in sorted(each, key=str):
                found.update(f"{name}=".encode("utf-8", "surrogatepass"))
                add(each[name])
        elif isinstance(each, list | tuple):
            found.update(f"{len(each)}:".encode())
            for one in each:
                add(one)
        elif hasattr(each, "dtype"):
            array = np.ascontiguousarray(each)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        else:
            found.update(repr(each).encode("utf-8", "surrogatepass"))

    add(value)
    return found.hexdigest()[:16]


def try_out(fault: Fault, place: Path) -> Row:
    """Returns the outcome of a fault, which happens in a process of its own in the directory `place`."""
    shutil.rmtree(place, ignore_errors=True)
    if fault.template is None:
        place.mkdir(parents=True)
    else:
        shutil.copytree(fault.template, place, symlinks=True)
    answer, log = place.with_name(f"{place.name}.json"), place.with_name(f"{place.name}.log")
    answer.unlink(missing_ok=True)
    ended = in_fork(lambda: _trial(fault, place, answer), log, fault.limit_s)
    outcome, detail = _judged(fault, ended, answer, log)
    shutil.rmtree(place, ignore_errors=True)
    return Row(kind=fault.kind, part=fault.part, how=fault.how, must=fault.must, outcome=outcome, detail=_short(detail))


def in_fork(act: Callable[[], object], log: Path, limit_s: float) -> int | None:
    """Calls a function in a forked process. Returns how the process ended; None if it had to be killed."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, each in enumerate((nothing, output, output)):
                os.dup2(each, number)
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - a forked process must never return into the campaign
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    with suppress(OSError):
        os.setpgid(process, process)
    ended: int | None = None
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            ended = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    with suppress(OSError):  # also what it has started
        os.killpg(process, signal.SIGKILL)
    if ended is None:
        os.waitpid(process, 0)
    return ended


def make_template(part: str, make: Callable[[], object], log: Path) -> None:
    """Makes what trials begin with, in a forked process. Raises SystemExit if that fails."""
    if in_fork(make, log, PREPARATION_S) != 0:
        raise SystemExit(f"{part} could not be made: {log.read_text()[-2000:]}")


def _trial(fault: Fault, place: Path, answer: Path) -> None:
    fault.spoil(place)
    before = _listing(place) if fault.keeps else {}
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found["digest"] = digest(fault.act(place))
        except Exception as error:  # noqa: BLE001 - what it is decides the outcome
            found["error"] = as_error(error)
    words = [str(each.message) for each in caught if issubclass(each.category, TfoptWarning)]
    found["words"] = " ".join(words)
    if fault.keeps:
        after = _listing(place)
        found["lost"] = sorted(name for name in before if after.get(name) != before[name])
        found["left"] = sorted(after.keys() - before.keys())
    answer.write_text(json.dumps(found))


def as_error(error: BaseException) -> dict[str, Any]:
    """Returns what an error says, where it was raised, and whether it is a clear word."""
    is_word = (
        isinstance(error, TfoptError | Said)
        or is_of_the_machine(error)
        or (isinstance(error, OSError) and error.errno in (*OF_A_PATH, errno.EFBIG))
    )
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    outcome = WORD if is_word else error.outcome if isinstance(error, Bad) else TRACEBACK
    return {"outcome": outcome, "text": f"{type(error).__name__}: {error}", "where": where}


def _judged(fault: Fault, ended: int | None, answer: Path, log: Path) -> tuple[str, str]:
    if ended is None:
        return HANG, f"over {fault.limit_s:g} s"
    if ended != 0 or not answer.is_file():
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return CRASH, f"exit code {ended}: {' '.join(lines[-3:])}"
    found = json.loads(answer.read_text())
    if found.get("lost") or found.get("left"):
        return LOST, f"changed or removed: {found['lost']}; left: {found['left']}"
    if "error" in found:
        error = found["error"]
        if error["text"].startswith(NotFinite.__name__):
            return (WORD, found["words"]) if found["words"] else (SILENT, error["text"])
        where = f" ({error['where']})" if error["outcome"] == TRACEBACK else ""
        return error["outcome"], error["text"] + where
    if found["digest"] == fault.expected:
        return EQUAL, found["words"]
    if found["words"]:
        return WORD, found["words"]
    return (AS_IT_STANDS if fault.must in (NO_ACCIDENT, FINITE, HARMLESS) else SILENT), ""


def _listing(place: Path) -> dict[str, tuple[int, str]]:
    listed = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        whole = path.is_file() and not path.is_symlink() and status.st_size < 2**22
        content = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
        listed[str(path.relative_to(place))] = (status.st_mode, content)
    return listed


def _short(text: str) -> str:
    words = " ".join(text.split()).encode("utf-8", "replace").decode()
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"


def expected(kind: str, act: Callable[[Path], Any], template: Path | None, place: Path) -> str:
    """Returns the digest of what comes out without a fault. It must be the same twice, or no fault could be told."""
    found = []
    for _ in range(2):
        shutil.rmtree(place, ignore_errors=True)
        if template is None:
            place.mkdir(parents=True)
        else:
            shutil.copytree(template, place, symlinks=True)
        answer, log = place.with_name(f"{place.name}.json"), place.with_name(f"{place.name}.log")
        answer.unlink(missing_ok=True)
        fault = Fault(kind=kind, part="", how="", act=act)
        ended = in_fork(lambda fault=fault, answer=answer: _trial(fault, place, answer), log, 300)  # type: ignore[misc]
        if ended != 0 or "digest" not in (result := json.loads(answer.read_text())):
            raise SystemExit(
                f"{kind} fails without a fault: {answer.read_text() if answer.is_file() else log.read_text()}"
            )
        found.append(result["digest"])
    if found[0] != found[1]:
        raise SystemExit(f"{kind} differs from call to call without a fault.")
    shutil.rmtree(place, ignore_errors=True)
    return found[0]
