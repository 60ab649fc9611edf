"""Samples the machine while any program runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tfopt.child_processes import Process, exit_code
from tfopt.errors import ConfigError
from tfopt.profiling.monitoring.readers import open_reader
from tfopt.profiling.monitoring.sampling import Sampling, timeline
from tfopt.report import Utilization
from tfopt.signals import on_signals

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def monitor_command(command: Sequence[str], interval_s: float = 0.5) -> tuple[int, Utilization]:
    """Runs a program, and samples the GPUs or its processor load until it ends.

    Signals are handed on to the program. Its standard input and output are those of this process.

    Returns: The exit code, 128 and the number of the signal after a signal; and the timeline.
    Raises:
        ConfigError: The program cannot be started, or the interval is not above 0.
    Example:
        >>> import sys
        >>> code, load = monitor_command([sys.executable, "-c", "raise SystemExit(3)"], interval_s=0.1)
        >>> code, len(load.seconds) >= 1
        (3, True)
    """
    if not 0 < interval_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"interval_s must be above 0. Received: interval_s={interval_s}. Use 0.5, the default.")
    with _signals_handed_on() as hand_to:
        try:
            process = subprocess.Popen(list(command))
        except OSError as error:
            raise ConfigError(
                f"The command must be a program. Received: {command[0]} ({error}). Check its name."
            ) from error
        hand_to(process)
        sampling = Sampling(lambda: open_reader(interval_s, process.pid), interval_s)
        code = process.wait()
        sampling.stop()
    return exit_code(code), timeline([sampling])


@contextmanager
def _signals_handed_on() -> Iterator[Callable[[Process], None]]:
    """Hands signals on to a program, which would otherwise be left alone when they end this process.

    Yields:
        A function that takes the program.
    """
    started: list[Process] = []
    early: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        # The terminal sends Ctrl-C to the program too, and a second one would break off what the first one began.
        if number == signal.SIGINT and _is_in_foreground():
            return
        if not started:
            early.append(number)
        for process in started:
            process.send_signal(number)

    def take(process: Process) -> None:
        started.append(process)
        for number in early:
            process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield take
        return
    with on_signals(HANDED_ON, hand_on):
        yield take


def _is_in_foreground() -> bool:
    """Returns whether Ctrl-C in the terminal reaches this process and the programs that it starts."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
