"""The user's own code in commands: names of the form package.module:name, and recipe files that hold such names.

A name that the user types is imported. A name in a file is imported only with the flag --allow-code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfopt.recipe import Recipe

FLAG = "--allow-code"
_ALLOWED = ContextVar("_ALLOWED", default=False)


@contextmanager
def code_of_files_allowed(allowed: bool) -> Iterator[None]:
    """Sets, for one command, whether recipe files may name code."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def read_recipe(*names: str) -> Recipe:
    """Returns the recipe of a name or a .toml file, with the settings of further ones laid over it."""
    from tfopt.recipes import compose

    allowed = _ALLOWED.get()
    if allowed:
        look_beside(*(name for name in names if name.endswith(".toml")))
    return compose(*names, allow_code=allowed)


def look_beside(*files: str) -> None:
    """Lets Python find modules beside files and in the working directory, as it does for a script."""
    folders = dict.fromkeys([*(str(Path(file).resolve().parent) for file in files), str(Path.cwd())])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
