"""The files that a user names."""

from __future__ import annotations

import stat
from pathlib import Path

from tfopt.errors import ConfigError

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_stored(what: str, path: str | Path) -> None:
    """Raises ConfigError if a path names a pipe, a socket or a device.

    Reading a pipe waits for a writer, without end if there is none, and cannot be repeated. A missing path is no error
    here: who opens it says so.

    Example:
        >>> check_stored("A table", "/dev/null")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A table must be a file on disk. Received: '/dev/null', a device. ...
    """
    try:
        kind = KINDS.get(stat.S_IFMT(Path(path).expanduser().stat().st_mode))
    except (OSError, ValueError):  # a path with a zero byte
        return
    if kind is not None:
        raise ConfigError(
            f"{what} must be a file on disk. Received: {str(path)!r}, {kind}. Write its content to a file, and "
            "name that."
        )
