"""Times the garbage collections of Python."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


class Collections:
    """The time in which Python collects garbage.

    A collection of all objects takes some hundred milliseconds and comes once in thousands of steps. Among the few
    steps that are watched it would count far too much, so it is left out.
    """

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def note(self, phase: str, info: dict[str, int]) -> None:
        """Is called by Python at the start and at the end of a collection."""
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._seconds += now - self._began

    def seconds(self) -> float:
        """Returns the seconds since it was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@contextlib.contextmanager
def collections_timed() -> Iterator[Collections]:
    """Times the collections that happen inside.

    Example:
        >>> with collections_timed() as collections:
        ...     _ = gc.collect(0)
        >>> collections.seconds() > 0
        True
    """
    found = Collections()
    gc.callbacks.append(found.note)
    try:
        yield found
    finally:
        gc.callbacks.remove(found.note)
