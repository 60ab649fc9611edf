"""Temporary directories that do not outlive their process: those of a killed one are removed by the next.

A directory is locked (flock) while it is used, as long as its process lives. One without a held lock was left behind.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfopt.atomic.files import hold
from tfopt.errors import ExportError

PREFIX = "tfopt-scratch-"
NAME = re.compile(re.escape(PREFIX) + "[a-z0-9_]{8}")


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Gives a temporary directory, which is removed at the end, with those that killed processes of this user left.

    Raises:
        ExportError: No directory can be made.
    Example:
        >>> with scratch_directory() as directory:
        ...     _ = (directory / "file").write_text("")
        >>> directory.exists()
        False
    """
    try:
        parent = Path(tempfile.gettempdir())
        _clear(parent)
        lock = None
        while lock is None:  # another process may remove the directory before it is locked
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = _lock(directory, just_made=True)
    except OSError as error:
        raise ExportError(
            f"The directory for temporary files must be writable. Received: {error}. Set TMPDIR to another."
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path, *, just_made: bool = False) -> int | None:
    """Returns the descriptor that locks a directory; None if another holds it or has removed the directory.

    Where the file system cannot lock directories, each counts as in use, except for the process that has just made it.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it has been removed, or is another user's
        return None
    try:
        held = hold(descriptor, directory)
    except OSError as error:
        held = just_made and not isinstance(error, BlockingIOError)
    if held:
        return descriptor
    os.close(descriptor)
    return None


def _clear(parent: Path) -> None:
    with suppress(OSError):  # it cannot be listed
        for each in [path for path in parent.iterdir() if NAME.fullmatch(path.name)]:
            descriptor = _lock(each)
            if descriptor is not None:
                shutil.rmtree(each, ignore_errors=True)
                os.close(descriptor)
