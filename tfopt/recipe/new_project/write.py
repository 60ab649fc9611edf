"""Writes the files of a new project."""

from __future__ import annotations

import os
from pathlib import Path

from tfopt.atomic.files import write_text
from tfopt.errors import ConfigError

# The name of each file in a project, and of its text beside this module.
FILES = {"train.py": "train.py.txt", "recipe.toml": "recipe.toml"}


def write_project(directory: str | Path) -> list[Path]:
    """Writes a script, train.py, and its settings, recipe.toml, into a directory. Both run as they are.

    Args:
        directory: A directory, which is made if it is missing.
    Returns: The paths of the files.
    Raises:
        ConfigError: The directory has a file of that name, or is no directory. Nothing is written then.
    Example:
        >>> import tempfile
        >>> [path.name for path in write_project(tempfile.mkdtemp())]
        ['train.py', 'recipe.toml']
    """
    if not str(directory).strip():
        raise ConfigError(f"directory must be a path. Received: {str(directory)!r}. '.' is the working directory.")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"directory must be a directory. Received: {folder}, which is a file. Name another one.")
    found = [name for name in FILES if os.path.lexists(folder / name)]
    if found:
        raise ConfigError(
            f"The directory of a new project must not have its files yet. Received: {folder} with {', '.join(found)}. "
            "Name another directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        write_text(folder / name, Path(__file__).with_name(text).read_text(encoding="utf-8"))
    return [folder / name for name in FILES]
