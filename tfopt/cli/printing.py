"""How the command prints: JSON, rows of a list, and progress."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape


class ProgressConsole(Console):
    """A rich console that raises an error when the reader of the output has closed it."""

    def on_broken_pipe(self) -> None:
        """Leaves the exit code to `main`; rich would end the process with code 1."""
        raise BrokenPipeError


@contextmanager
def progress(words: str) -> Iterator[Callable[[str], None]]:
    """Shows a line on standard error while a command works, if that is a terminal.

    Yields: A function that shows what the command is doing.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda step: None
        return
    with console.status(words) as status:
        yield lambda step: status.update(escape(step))


def print_json(values: Any) -> None:
    """Prints values as JSON."""
    print(json.dumps(values, indent=2))  # noqa: T201


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints a list of names, each with its text beside it.

    The text wraps at the width of the terminal. A pipe or a file receives one line for each row.

    Example:
        >>> print_rows([("mlp", "Dense layers"), ("", "units=(256, 256)")])
        mlp  Dense layers
             units=(256, 256)
    """
    indent = max(len(name) for name, _ in rows) + 2
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, text in rows:
        lines = textwrap.wrap(
            text, columns, initial_indent=name.ljust(indent), subsequent_indent=" " * indent, break_on_hyphens=False
        )
        print("\n".join(lines or [name]))  # noqa: T201
