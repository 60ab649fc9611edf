"""How the command prints: text, JSON, rows of a list, and progress. Control characters are shown, not obeyed."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from tfopt.terminal import PrintableConsole, encodable, printable


class OutputError(Exception):
    """Standard output cannot be written, for example because the disk is full."""


class ProgressConsole(PrintableConsole):
    """A rich console that raises an error when the reader of the output has closed it."""

    def on_broken_pipe(self) -> None:
        """Leaves the exit code to `main`; rich would end the process with code 1."""
        raise BrokenPipeError


def say(value: object = "", *, end: str = "\n", error: bool = False, flush: bool = False) -> None:
    r"""Prints a value on standard output, or on standard error.

    A character that the output cannot hold is written as an escape.

    Raises:
        BrokenPipeError: The reader has closed standard output.
        OutputError: Standard output cannot be written. An error of standard error has nowhere to be told.
    Example:
        >>> say("digits\x1b[2J")
        digits\x1b[2J
    """
    stream = sys.stderr if error else sys.stdout
    if stream.closed:  # by a script that tfopt has run
        if error:
            return
        raise OutputError("the script has closed it")
    try:
        text = encodable(printable(str(value)), stream)
        print(text, end=end, file=stream, flush=flush)
    except OSError as problem:
        if error:
            return
        if isinstance(problem, BrokenPipeError):
            raise
        raise OutputError(problem.strerror) from problem


def print_json(values: Any) -> None:
    """Prints values as JSON. An object that JSON cannot hold, such as a function, is given by its repr."""
    say(json.dumps(values, indent=2, default=repr))


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
        say("\n".join(lines or [name]))
