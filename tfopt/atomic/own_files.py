"""Whether tfopt wrote a file: only such a file is replaced or removed. A file of anybody else stays as it is.

tfopt keeps no list of the files that it wrote, so that they may be moved, copied and sent. A file is known by what it
holds: a `Form` tells the bytes of one kind of file from all others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tfopt.atomic import files
from tfopt.errors import ConfigError

Form = Callable[[bytes], bool]


def check_replaceable(path: Path, is_own: Form) -> None:
    """Raises ConfigError if `path` is something that tfopt did not write. An empty file may be replaced.

    Call it before hours of work, too: `write_own` would refuse only at their end.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "report.json"
        >>> check_replaceable(path, json_with("recipe"))
        >>> _ = path.write_text('{"mine": 1}')
        >>> check_replaceable(path, json_with("recipe"))
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A file may be replaced only if tfopt wrote it. Received: /...report.json, ...
    """
    if not os.path.lexists(path):
        return
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no regular file"
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            found = f"a file that cannot be read ({error.strerror})"
        else:
            if not content or is_own(content):
                return
            found = "a file that holds something else"
    raise ConfigError(
        f"A file may be replaced only if tfopt wrote it. Received: {path}, which is {found}. "
        "Move or rename it, or choose another place."
    )


def write_own(path: Path, content: str | bytes, is_own: Form) -> None:
    """Writes a file of tfopt, whole or not at all, unless the name belongs to a file that tfopt did not write.

    Raises:
        ConfigError: There is a file that tfopt did not write.
        ExportError: The file cannot be written. An earlier file stays as it is.
    """
    check_replaceable(path, is_own)
    files.write_bytes(path, content.encode() if isinstance(content, str) else content)


def json_with(*names: str) -> Form:
    """Returns the form of JSON objects that have all these names."""
    return lambda content: has_names(json_in(content), names)


def json_in(content: bytes) -> Any:
    """Returns the value that JSON holds; None if it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def has_names(values: Any, names: Collection[str]) -> bool:
    return isinstance(values, dict) and values.keys() >= set(names)
