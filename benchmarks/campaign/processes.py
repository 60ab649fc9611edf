"""Runs a program as users start it, strikes it with a signal, and looks for what it leaves behind.

Programs run in forks of the campaign, which has imported all and used none of it, or in real interpreters where the
import itself is struck. A process that calls `run` adopts what the program orphans, so nothing hides from it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing.process
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.002
STOPPED_S = 0.5  # between SIGSTOP and SIGCONT
GRACE_S = 20.0  # in which the children of a program that has ended must end too
TEMPORARY = re.compile(r"\..*\.(tmp|tfopt)-[0-9a-f]{16,32}")
TMP = "tmp"  # of the place: TMPDIR of the programs


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A signal, whom it meets, and when.

    Attributes:
        number: The signal. SIGCONT follows SIGSTOP.
        whom: "it"; "its group", as Ctrl-C does; "a child"; or "worker 0" of a launch.
        moment: The seconds after the start; None is a moment after the first temporary name.
        seed: Draws the child, and the moment in writing.
    """

    number: signal.Signals
    whom: str
    moment: float | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program has ended.

    Attributes:
        code: Its exit code, minus the signal's number; None if it had to be killed.
        seconds: How long it ran.
        output, errors: What it has printed.
        struck: Whether the signal met a process.
        left: The processes that were left after its end, and had to be killed.
    """

    code: int | None
    seconds: float
    output: str
    errors: str
    struck: bool
    left: tuple[str, ...]


def run(
    words: Sequence[str],
    place: Path,
    limit_s: float,
    strike: Strike | None = None,
    *,
    real: bool = False,
    meanwhile: Callable[[int, Path], None] = lambda process, folder: None,
    afterwards: Callable[[], None] = lambda: None,
) -> Ended:
    """Runs `python WORDS` in a directory until it ends, and all that it has started.

    Args:
        words: A script or "-m" and a module, and the arguments.
        place: The working directory. Its folder tmp is the program's TMPDIR.
        limit_s: The seconds after which it is killed.
        strike: The signal that it gets.
        real: Whether Python really starts; otherwise the program runs in a fork.
        meanwhile: Is called again and again with the process id and the folder of what it prints.
        afterwards: Is called when it has ended, before what it leaves is looked for.
    """
    (place / TMP).mkdir(exist_ok=True)
    adopt()
    process, folder = start(words, place, real=real)
    begin, struck, code = time.monotonic(), False, None
    while code is None and time.monotonic() < begin + limit_s:
        if strike is not None and not struck:
            struck = _struck(strike, process, place, time.monotonic() - begin)
        meanwhile(process, folder)
        time.sleep(POLL_S)
        code = exit_code(process)
    seconds = time.monotonic() - begin
    afterwards()
    left = end_the_rest(process, 0.0 if code is None else GRACE_S)
    return Ended(code=code, seconds=seconds, **printed(folder), struck=struck, left=left)


def together(programs: Sequence[Sequence[str]], delays: Sequence[float], place: Path, limit_s: float) -> list[Ended]:
    """Runs programs in one directory at the same time, each begun after a delay in seconds; see `run`."""
    (place / TMP).mkdir(exist_ok=True)
    adopt()
    begin = time.monotonic()
    waiting = sorted(zip(delays, range(len(programs)), strict=True))
    folders: dict[int, Path] = {}
    numbers: dict[int, int] = {}
    codes: dict[int, int | None] = {}
    seconds: dict[int, float] = {}
    while (waiting or None in codes.values()) and time.monotonic() < begin + limit_s:
        while waiting and time.monotonic() >= begin + waiting[0][0]:
            _, number = waiting.pop(0)
            process, folders[number] = start(programs[number], place)
            numbers[number], codes[process] = process, None
        for process in [each for each, code in codes.items() if code is None]:
            codes[process], seconds[process] = exit_code(process), time.monotonic() - begin
        time.sleep(POLL_S)
    left = end_the_rest(0, 0.0 if None in codes.values() else GRACE_S)
    return [
        Ended(code=codes[each], seconds=seconds[each], **printed(folders[number]), struck=False, left=left)
        for number, each in sorted(numbers.items())
    ]


def adopt() -> None:
    """Makes this process the parent of what its descendants orphan."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(words: Sequence[str], place: Path, *, real: bool = False) -> tuple[int, Path]:
    """Starts a program in a session of its own. Returns its process id, and the folder of what it prints."""
    folder = Path(tempfile.mkdtemp(prefix="output-", dir=place.parent))
    return (_started if real else _forked)(words, place, folder), folder


def exit_code(process: int) -> int | None:
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def printed(folder: Path) -> dict[str, str]:
    found = {name: (folder / name).read_text(errors="replace") for name in ("output", "errors")}
    shutil.rmtree(folder)
    return found


def _forked(words: Sequence[str], place: Path, folder: Path) -> int:
    ready, is_ready = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _become(words, place, folder, is_ready)
        except BaseException:  # noqa: BLE001 - a forked process must never return into the campaign
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    return process


def _become(words: Sequence[str], place: Path, folder: Path, is_ready: int) -> None:
    """Runs a program in this process as an interpreter does, from the first line to the functions at exit."""
    os.setsid()
    os.chdir(place)
    for number, name in enumerate((os.devnull, "output", "errors")):  # a path from the root stays as it is
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.environ |= _environment(place)
    tempfile.tempdir = None
    multiprocessing.process._children.clear()  # what packages have started at their import is not this program's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    warnings.showwarning = lambda *what, **more: print(warnings.formatwarning(*what[:4]), end="", file=sys.stderr)
    code: object = 0
    try:
        os.write(is_ready, b"1")
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _started(words: Sequence[str], place: Path, folder: Path) -> int:
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=place,
            env={**os.environ, **_environment(place)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` has ignored it
        ).pid


def _environment(place: Path) -> dict[str, str]:
    return {"TMPDIR": str(place / TMP), "PYTHONUNBUFFERED": "1"}


def _struck(strike: Strike, process: int, place: Path, seconds: float) -> bool:
    """Sends the signal if it is time and there is whom it shall meet. Returns whether it did."""
    draw = random.Random(strike.seed)
    if strike.moment is None:
        if not any(TEMPORARY.fullmatch(name) for _, folders, files in os.walk(place) for name in (*folders, *files)):
            return False
        time.sleep(draw.uniform(0, 0.05))
    elif seconds < strike.moment:
        return False
    if strike.whom == "its group":
        os.killpg(process, strike.number)
        return True
    whom = process
    if strike.whom != "it":
        found = children(process, strike.whom)
        if not found:
            return False
        whom = draw.choice(found)
    with contextlib.suppress(ProcessLookupError):
        os.kill(whom, strike.number)
        if strike.number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            os.kill(whom, signal.SIGCONT)
    return True


def children(process: int, which: str = "a child") -> list[int]:
    """Returns the processes that a program has started: all, or a worker of a launch."""
    found = []
    for each in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_worker = f'"index": {which.removeprefix("worker ")}' in each.environ().get("TF_CONFIG", "")
            if each.status() != psutil.STATUS_ZOMBIE and (which == "a child" or is_worker):
                found.append(each.pid)
    return sorted(found)


def end_the_rest(process: int, grace_s: float) -> tuple[str, ...]:
    """Waits for the descendants of this process, and kills them after a while. Returns what it has killed."""
    end = time.monotonic() + grace_s
    while True:
        running = _running()
        if not running or time.monotonic() > end:
            break
        time.sleep(0.05)
    words = []
    for each in running:
        with contextlib.suppress(psutil.Error):
            if each.pid != process:
                words.append(" ".join(each.cmdline())[:100])
            each.kill()
    while running and _running():
        time.sleep(0.01)
    return tuple(words)


def _running() -> list[psutil.Process]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found
