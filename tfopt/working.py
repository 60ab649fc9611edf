"""A sign of life on standard error while something takes long: what is being done, and for how many seconds.

It is one line, drawn over itself by a thread, and only on a terminal. At the end it is erased.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfopt.printable import printable

SECONDS_BETWEEN_DRAWINGS = 0.5
ERASE = "\r\x1b[2K"
_shown = threading.Lock()


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Shows a sign of life while the block runs. One within another one shows nothing.

    Args:
        words: What is being done, for example "measuring the step".
    Yields:
        A function that changes the words.
    Example:
        >>> with working("measuring the step") as now:
        ...     now("measuring the step: input")
    """
    current = [words]
    if sys.stderr is None or not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield lambda words: None
        return
    ended = threading.Event()
    began = time.monotonic()

    def draw() -> None:
        while not ended.wait(SECONDS_BETWEEN_DRAWINGS):
            _write(f"{ERASE}tfopt: {printable(current[0])}, {time.monotonic() - began:.0f} s")

    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield lambda words: current.__setitem__(0, words)
    finally:
        ended.set()
        drawing.join()
        _write(ERASE)
        _shown.release()


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        sys.stderr.write(text)
        sys.stderr.flush()
