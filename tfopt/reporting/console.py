"""A rich console for text from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from tfopt.printable import printable


class PrintableConsole(Console):
    r"""A console that writes the control characters of a text as escapes. Its own, such as colours, stay.

    Example:
        >>> PrintableConsole().print("digits\x1b[2J")
        digits\x1b[2J
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
