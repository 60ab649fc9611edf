"""Handlers of signals for a while, and Ctrl-C that waits until an exception can be raised safely."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

OWN_CODE = f"{Path(__file__).parent}{os.sep}"
LIBRARIES = tuple(f"{sysconfig.get_path(each)}{os.sep}" for each in ("stdlib", "platstdlib", "purelib", "platlib"))
TENSORFLOW = tuple(f"{each}tensorflow{os.sep}" for each in LIBRARIES)
GENERATED = ("<frozen ", "<string>", "<__array_function__")
BY_AUTOGRAPH = "__autograph_generated_file"
CTRL_C: Mapping[signal.Signals, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt}
LONGEST_WAIT_S, BETWEEN_LOOKS_S = 1.0, 0.01


@contextmanager
def on_signals(numbers: Sequence[int], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Calls a handler for signals within the block. Only the main thread may use it.

    Example:
        >>> received = []
        >>> with on_signals([signal.SIGTERM], lambda number, frame: received.append(number)):
        ...     signal.raise_signal(signal.SIGTERM)
        >>> received == [signal.SIGTERM]
        True
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def raised_safely(raises: Mapping[signal.Signals, type[BaseException]]) -> Iterator[list[type[BaseException]]]:
    """Raises signals as exceptions within the block, where no library can lose them.

    Code in C that calls Python turns an exception into an error of its own, or prints it and goes on, or breaks:
    TensorFlow ends in a segmentation fault now and then. So the exception waits until code of tfopt or of the user is
    met that TensorFlow has not called, for a second at most; a second signal does not wait. An error that a library has
    made of the exception gives way to it. Signals with a handler of the user's keep it, and outside the main thread
    nothing changes, since Python allows no handler there.

    Yields:
        The exceptions of the signals that came so far.

    Example:
        >>> with raised_safely({signal.SIGTERM: SystemExit}):
        ...     signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        SystemExit
    """
    received: list[type[BaseException]] = []
    is_raised = False
    looks: list[threading.Timer] = []
    looking, latest = threading.Event(), 0.0

    def look_again(number: int) -> None:
        looking.set()
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal latest, is_raised
        if not received:
            received.append(raises[signal.Signals(number)])
            latest = time.monotonic() + LONGEST_WAIT_S
        elif not looking.is_set():
            latest = 0.0  # the user insists
        looking.clear()
        if time.monotonic() < latest and not _is_safe(frame):
            look = threading.Timer(BETWEEN_LOOKS_S, look_again, [number])
            look.daemon = True
            with suppress(RuntimeError):  # there is no memory for a thread
                look.start()
                looks.append(look)
                return
        is_raised = True
        raise received[-1]

    def until_received(show: Callable[..., object]) -> Callable[..., object]:
        return lambda *what: None if received else show(*what)

    is_main = threading.current_thread() is threading.main_thread()
    usual = {signal.SIGINT: signal.default_int_handler}
    taken = [each for each in raises if is_main and signal.getsignal(each) == usual.get(each, signal.SIG_DFL)]
    if not taken:
        yield received
        return
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook, sys.unraisablehook = until_received(hooks[0]), until_received(hooks[1])
    try:
        with on_signals(taken, end):
            try:
                yield received
            finally:
                for look in looks:
                    look.cancel()
                    look.join()
        if received and not is_raised:
            raise received[-1]
    except Exception as error:
        if received:
            raise received[-1] from error
        raise
    finally:
        sys.excepthook, sys.unraisablehook = hooks


def _is_safe(frame: FrameType | None) -> bool:
    """Returns whether code is running that is no library's, and that TensorFlow has not called."""
    if frame is not None and _is_of_library(frame.f_code.co_filename):
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith(TENSORFLOW):
            return False
        frame = frame.f_back
    return True


def _is_of_library(file: str) -> bool:
    if file.startswith(OWN_CODE):
        return False
    return file.startswith((*LIBRARIES, *GENERATED)) or BY_AUTOGRAPH in file
