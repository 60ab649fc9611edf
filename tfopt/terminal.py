"""Text in a terminal: text from outside without its control characters, and a sign of life while something takes long.

A terminal obeys control characters: they move the cursor, change colours, set its title. Marks of writing direction
make a line read as what it does not say. So a name in a file, a path or a message goes through `printable` before it is
shown in a terminal or on a page.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

# Cc: control characters, such as escape; Cs: halves of characters; Zl, Zp: ends of lines and paragraphs.
HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LAYOUT = frozenset("\n\t")
SECONDS_BETWEEN_DRAWINGS = 0.5
COLORS = re.compile(r"\x1b\[[0-9;]*m")
ERASE = "\r\x1b[2K"
_shown = threading.Lock()


def printable(text: str) -> str:
    r"""Returns a text with its control characters and marks of direction written as escapes. Lines stay lines.

    Example:
        >>> printable("digits\x1b[2J\n\u202egnp.exe")
        'digits\\x1b[2J\n\\u202egnp.exe'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in LAYOUT or is_printable(character) else ascii(character)[1:-1] for character in text
    )


def without_colors(text: str) -> str:
    r"""Returns a text without escapes for colors and bold letters, as the errors of Keras have them.

    Example:
        >>> without_colors("\x1b[1mShapes differ.\x1b[0m")
        'Shapes differ.'
    """
    return COLORS.sub("", text)


def encodable(text: str, stream: TextIO) -> str:
    r"""Returns a text with the characters that a stream cannot hold written as escapes.

    Example:
        >>> import io
        >>> encodable("größe", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        'gr\\xf6\\xdfe'
    """
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_printable(text: str) -> bool:
    r"""Returns whether a text is one line without control characters and marks of direction.

    Example:
        >>> is_printable("größe"), is_printable("two\nlines")
        (True, False)
    """
    return not any(unicodedata.category(each) in HIDDEN or each in DIRECTIONS for each in text)


class PrintableConsole(Console):
    r"""A console that writes the control characters of a text as escapes. Its own, such as colours, stay.

    Example:
        >>> PrintableConsole().print("digits\x1b[2J")
        digits\x1b[2J
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Shows a sign of life while the block runs: what is being done, and for how many seconds.

    It is one line of standard error, drawn over itself by a thread, and only on a terminal. At the end it is erased.
    One within another one shows nothing.

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


@contextlib.contextmanager
def notices_hidden() -> Iterator[None]:
    """Hides what is written on standard error within it, also by libraries in C++, unless an error ends it."""
    try:
        notices = tempfile.TemporaryFile()  # noqa: SIM115 - the next block closes it
    except OSError:  # there is no room: then they show
        yield
        return
    with notices:
        stderr = os.dup(2)
        os.dup2(notices.fileno(), 2)
        try:
            yield
        except BaseException:
            notices.seek(0)
            os.write(stderr, notices.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
