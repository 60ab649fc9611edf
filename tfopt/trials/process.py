"""Calls a function in a process of its own, whose crash, hang or want of memory is an outcome like any other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tfopt.atomic.checked_json import read_as_written, with_checksum
from tfopt.atomic.files import clear_leftovers, write_text, writing_to
from tfopt.atomic.own_files import json_in
from tfopt.child_processes import ENDED_FROM_OUTSIDE, Process, end, exit_code, signal_group
from tfopt.errors import ConfigError, TrainingError
from tfopt.report import Record
from tfopt.trials.child import ANSWER, REQUEST

PYTHON = sys.executable  # what runs a trial; the tests put one here that has imported tfopt before
OUTCOME, LOG, TEMPORARY = "outcome.json", "log.txt", "tmp"
GRACE_S = 3.0  # from SIGTERM to SIGKILL
LOOK_S = 0.5  # between two questions whether a call is worth its time


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """What became of a call in a process of its own.

    Attributes:
        result: What the function returned; None if it failed.
        failure: Why there is no result; empty if there is one.
        seconds: How long the process ran.
        given_up: Whether the caller has ended it as not worth its time. `failure` is the reason.
    """

    result: Any
    failure: str = ""
    seconds: float
    given_up: bool = False


_OUTCOME = TypeAdapter(Outcome)


def call_apart(
    function: str,
    arguments: Mapping[str, Any],
    directory: Path,
    limit_s: float,
    why_give_up: Callable[[], str] = lambda: "",
) -> Outcome:
    """Calls a function in a fresh Python process, and ends the process if that takes too long.

    The process and all that it has started end with this one, and its temporary files are removed. Its output is in
    log.txt, and the outcome is in outcome.json too, where `read_outcome` finds it. GPU memory is taken as needed,
    because other processes may hold some.

    Args:
        function: The function's name, package.module:name. It takes and returns what JSON can hold.
        arguments: Its keyword arguments.
        directory: A directory of its own. It is made if it is missing.
        limit_s: The seconds after which it is ended.
        why_give_up: Is asked again and again, and returns why the process is not worth its time; nothing if it is.
    Raises:
        ExportError: The directory cannot be written.
    Example:
        >>> import tempfile
        >>> call_apart("math:gcd", {}, Path(tempfile.mkdtemp()), 60.0).result
        0
    """
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        clear_leftovers(directory)
        for name in (ANSWER, OUTCOME):
            (directory / name).unlink(missing_ok=True)
        write_text(directory / REQUEST, json.dumps({"function": function, "arguments": dict(arguments)}))
        temporary = directory.resolve() / TEMPORARY
        shutil.rmtree(temporary, ignore_errors=True)  # of a call that was killed
        temporary.mkdir(exist_ok=True)
        log = (directory / LOG).open("wb")
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(temporary),
    }
    words = [PYTHON, "-m", "tfopt.trials.child", str(directory)]
    start, ended, given_up = time.monotonic(), "", False
    process: Process | None = None
    try:  # Ctrl-C may come as soon as it has started
        with log:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            ended, given_up = _watch(process, limit_s, why_give_up)
    finally:
        if process is not None:
            end(process, GRACE_S)
            signal_group(process, signal.SIGKILL)  # what a crash has left of its group
            assert process.stdin is not None
            process.stdin.close()
        shutil.rmtree(temporary, ignore_errors=True)
    with writing_to(directory):
        clear_leftovers(directory)  # of the process
        answer = _answer(directory)
    outcome = Outcome(
        result=answer.get("result"),
        failure=ended if ended and not answer else _failure(answer, process.returncode),
        seconds=time.monotonic() - start,
        given_up=given_up and not answer,
    )
    write_text(directory / OUTCOME, json.dumps(with_checksum(outcome.to_dict())))
    return outcome


def raise_own(failure: str) -> None:
    """Raises the error of tfopt's own that ended a call, which says the cause and the remedy. Others are left alone.

    Example:
        >>> raise_own("ValueError: bad shape")
        >>> raise_own("ConfigError: data must be batches. Received: none. Pass batches.")
        Traceback (most recent call last):
        tfopt.errors.ConfigError: data must be batches. Received: none. Pass batches.
    """
    kind, _, words = failure.partition(": ")
    for each in (ConfigError, TrainingError):
        if kind == each.__name__:
            raise each(words)


def read_outcome(directory: Path) -> Outcome | None:
    """Returns the outcome of an earlier call with this directory, or None if it did not end.

    Raises:
        ArtifactError: The file is damaged.
    """
    file = directory / OUTCOME
    if not file.is_file():
        return None
    return read_as_written(
        file, _OUTCOME, "The outcome of a trial", f"Remove {directory}: the trial is then made again."
    )


def _watch(process: Process, limit_s: float, why_give_up: Callable[[], str]) -> tuple[str, bool]:
    """Waits for a process. Returns why it must be ended, if it must, and whether that is the caller's reason."""
    last = time.monotonic() + limit_s
    while (left := last - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(LOOK_S, left))
            return "", False
        if reason := why_give_up():
            return reason, True
    return f"it took over {limit_s:.0f} s", False


def _answer(directory: Path) -> dict[str, Any]:
    file = directory / ANSWER
    found = json_in(file.read_bytes()) if file.is_file() else None
    return found if isinstance(found, dict) else {}


def _failure(answer: Mapping[str, Any], code: int) -> str:
    if answer:
        return str(answer.get("error", ""))
    ended = ENDED_FROM_OUTSIDE.get(exit_code(code) - 128)  # after SIGTERM the process exits by itself, with 143
    return f"its process {ended or f'crashed with exit code {code}'}"
