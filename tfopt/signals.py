"""Handlers of signals for a while, and Ctrl-C that waits until an exception can be raised safely."""

from __future__ import annotations

import math
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
INSTALLED = tuple(f"{sysconfig.get_path(each)}{os.sep}" for each in ("stdlib", "platstdlib", "purelib", "platlib"))
GENERATED = ("<frozen ", "<string>", "<__array_function__")
BY_AUTOGRAPH = "__autograph_generated_file"
CTRL_C: Mapping[signal.Signals, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt}
LONGEST_WAIT_S, BETWEEN_LOOKS_S = 1.0, 0.01
LOST_WITHIN_S = 5.0  # an error that comes later was not made of the exception


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
    made of the exception gives way to it, and one that it has dropped is raised at the end. Signals with a handler of
    the user's keep it, and outside the main thread nothing changes, since Python allows no handler there.

    Yields:
        The exceptions that were raised, or wait to be.

    Example:
        >>> with raised_safely({signal.SIGTERM: SystemExit}):
        ...     signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        SystemExit
    """
    received: list[type[BaseException]] = []
    looks: list[threading.Timer] = []
    is_waiting = is_look = is_lost = has_ended = False
    latest = raised = -math.inf  # when it is raised anywhere, and when it was

    def look_again(number: int) -> None:
        nonlocal is_look
        if not has_ended:
            is_look = True
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_waiting, is_look, is_lost, latest, raised
        if not is_waiting:
            is_waiting = True
            received.append(raises[signal.Signals(number)])
            latest = time.monotonic() + (LONGEST_WAIT_S if time.monotonic() > raised + LOST_WITHIN_S else 0.0)
        elif not is_look:
            latest = -math.inf  # the user insists
        is_look = False
        if time.monotonic() < latest and not _is_safe(frame):
            look = threading.Timer(BETWEEN_LOOKS_S, look_again, [number])
            look.daemon = True
            with suppress(RuntimeError):  # there is no memory for a thread
                looks.append(look)
                look.start()
                return
        is_waiting, is_lost, raised = False, not _is_safe(frame), time.monotonic()
        raise received[-1]

    def is_due() -> bool:
        return is_waiting or time.monotonic() < raised + LOST_WITHIN_S

    def until_received(show: Callable[..., object]) -> Callable[..., object]:
        return lambda *what: None if is_due() else show(*what)

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
                has_ended = True
                for look in looks:
                    look.cancel()
                    if look.ident is not None:
                        look.join()
        if is_waiting or is_lost:
            raise received[-1]
    except Exception as error:
        if is_due():
            raise received[-1] from error
        raise
    finally:
        sys.excepthook, sys.unraisablehook = hooks


def _is_safe(frame: FrameType | None) -> bool:
    """Returns whether code is running that is no library's, and that TensorFlow has not called."""
    tensorflow, keras = _folder_of("tensorflow"), _folder_of("keras")
    if frame is not None and _is_of_library(frame.f_code.co_filename, (*INSTALLED, *tensorflow, *keras)):
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith(tensorflow):
            return False
        frame = frame.f_back
    return True


def _folder_of(package: str) -> tuple[str, ...]:
    """Returns where a package is, wherever it is installed; nothing if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return (f"{Path(file).parent}{os.sep}",) if file else ()


def _is_of_library(file: str, folders: tuple[str, ...]) -> bool:
    if file.startswith(OWN_CODE):
        return False
    return file.startswith((*folders, *GENERATED)) or BY_AUTOGRAPH in file
