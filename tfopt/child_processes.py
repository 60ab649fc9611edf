"""Child processes: how they are ended with all that they have started, and their exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from typing import Any

Process = subprocess.Popen[Any]
ENDED_FROM_OUTSIDE: dict[int, str] = {
    signal.SIGKILL: "was killed (SIGKILL), most often by the kernel when the memory is full",
    **{each: f"was ended by {each.name}" for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)},
}


def exit_code(code: int) -> int:
    """Returns an exit code as shells have it: 128 and the number of the signal after a signal.

    Example:
        >>> exit_code(3), exit_code(-signal.SIGKILL)
        (3, 137)
    """
    return 128 - code if code < 0 else code


def signal_group(process: Process, number: int) -> None:
    """Sends a signal to the group that a process leads: to it, and to all that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # they have ended
        os.killpg(process.pid, number)


def end(process: Process, seconds: float) -> None:
    """Ends a process that leads a group: with SIGTERM, and with SIGKILL where that takes longer than `seconds`.

    Example:
        >>> process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        >>> end(process, 5.0)
        >>> exit_code(process.returncode) == 128 + signal.SIGTERM
        True
    """
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        signal_group(process, signal.SIGKILL)
        process.wait()
