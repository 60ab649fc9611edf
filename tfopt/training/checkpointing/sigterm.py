"""SIGTERM as a request to save the training and to end the process."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from tfopt.terminal import printable

TERMINATED = 128 + signal.SIGTERM


@dataclass
class Sigterm:
    """Whether SIGTERM came during a `fit`.

    Attributes:
        received: SIGTERM came to this process.
        ending: The training is saved, and the process is about to end.
    """

    received: bool = False
    ending: bool = False

    def end(self, saved: str) -> NoReturn:
        """Ends the process with exit code 143. `saved` is the checkpoint in words."""
        self.ending = True
        print(f"tfopt: SIGTERM: saved {printable(saved)}", file=sys.stderr)  # noqa: T201
        raise SystemExit(TERMINATED)


@contextlib.contextmanager
def sigterm_requests() -> Iterator[Sigterm]:
    """Notes SIGTERM while it lasts. Outside the main thread it notes nothing, since Python allows no handler there.

    Example:
        >>> with sigterm_requests() as sigterm:
        ...     sigterm.received
        False
    """
    sigterm = Sigterm()
    if threading.current_thread() is not threading.main_thread():
        yield sigterm
        return

    def request(number: int, frame: FrameType | None) -> None:
        sigterm.received = True

    before = signal.signal(signal.SIGTERM, request)
    try:
        yield sigterm
    finally:
        # With several workers, the SIGTERM of another worker may have ended the training. This worker's own signal
        # may come while the process ends, and must not interrupt that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if sigterm.ending else before)
