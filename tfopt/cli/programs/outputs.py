"""Checks that outputs can be written, before a program runs for hours and shows that they cannot."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tfopt.atomic.own_files import Form, check_replaceable
from tfopt.errors import ConfigError


def writable_file(flag: str, out: str, is_own: Form) -> Path:
    """Returns the path of a file that can be written.

    Args:
        flag: The flag that names the file.
        out: Its value.
        is_own: The form of the files that may be replaced.
    Raises:
        ConfigError: It cannot be written, or is a file that tfopt did not write.
    Example:
        >>> writable_file("--out", "/proc/no/load.json", lambda content: True)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: --out must be a file that can be written. Received: --out /proc/no/load.json ...
    """
    path = Path(out).absolute()  # the program may change the working directory
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _refused(flag, out, "a file", error) from error
    check_replaceable(path, is_own)
    return path


def writable_directory(flag: str, out: str) -> Path:
    """Returns the path of a directory that can be written, and makes it if it is missing.

    Args:
        flag: The flag that names the directory.
        out: Its value.
    Raises:
        ConfigError: It cannot be written.
    Example:
        >>> writable_directory("--out", "/proc/no")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: --out must be a directory that can be written. Received: --out /proc/no ...
    """
    path = Path(out).absolute()  # the script may change the working directory
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _refused(flag, out, "a directory", error) from error
    return path


def _refused(flag: str, out: str, what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} must be {what} that can be written. Received: {flag} {out} ({error.strerror or error}). The program "
        "has not run. Choose another place."
    )
