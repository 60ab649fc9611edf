"""Writes files that appear whole or not at all.

A file is written under a temporary name and flushed to the disk. Then it gets its final name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tfopt.errors import ConfigError, ExportError, TfoptError

# The end of a temporary name. No other program uses such names, so a file with one may be removed.
TEMPORARY_SUFFIX = r"\.tfopt-[0-9a-f]{32}"
# Errors of a path that can be no directory: it is too long, it leads in a circle, it or a part of it is a file.
NO_DIRECTORY = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENOTDIR})
CANNOT_FLUSH = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Gives a file to write. It gets its final name when the block ends without an error.

    Until then, the file of that name stays as it is. The directory must exist.

    Raises:
        OSError: The file cannot be written.
    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.bin"
        >>> with whole_file(path) as file:
        ...     _ = file.write(b"1234")
        >>> path.read_bytes()
        b'1234'
    """
    temporary = path.with_name(f".{path.name}.tfopt-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            with suppress(OSError):  # the file system has no locks
                hold(file.fileno(), temporary)  # until it has its name: other processes see that it is still written
            yield file
            file.flush()
            _flush(file.fileno())
            temporary.replace(path)
        flush_to_disk(path.parent)
    finally:
        with suppress(OSError):  # it has its final name, or was never made
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file so that its name always holds a whole file.

    Raises:
        ExportError: The file cannot be written. An earlier file stays as it is.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes bytes as `write_text` writes text."""
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise ExportError(
            f"The file could not be written. Received: {path} ({error}); it takes {len(content):,} bytes. "
            "Make room, or choose another directory."
        ) from error


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turns an error of the system within the block into a word about the directory that the block writes to.

    Raises:
        ExportError: The system has refused something: the disk is full, read-only or broken.
        OSError: The path can be no directory.
    Example:
        >>> with writing_to(Path("/proc/no")):
        ...     Path("/proc/no").mkdir()
        Traceback (most recent call last):
        ...
        tfopt.errors.ExportError: The directory must be writable and have room. Received: /proc/no (...
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_DIRECTORY:
            raise
        raise ExportError(
            f"The directory must be writable and have room. Received: {directory} ({error}). Make room, or choose "
            "another directory."
        ) from error


def read_stored(path: Path) -> bytes:
    """Returns the content of a file on disk.

    A pipe waits for a writer, without end if there is none, and a device such as /dev/zero has no end.

    Raises:
        OSError: The file cannot be read, or is a pipe, a device, a socket or a directory.
    Example:
        >>> read_stored(Path("/dev/zero"))
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] it is no file on disk: '/dev/zero'
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe does not wait either
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file on disk", str(path))
        return file.read()


def clear_leftovers(directory: Path) -> None:
    """Removes the temporary files of killed processes in a directory, but none that a process is writing."""
    for path in directory.iterdir():
        if re.fullmatch(rf"\..+{TEMPORARY_SUFFIX}", path.name):
            with suppress(OSError), path.open("r+b") as file:  # NFS locks only what is open for writing
                if hold(file.fileno(), path):
                    path.unlink()


def check_utf8(what: str, path: Path | str, error: type[TfoptError] = ConfigError) -> None:
    r"""Raises an error if a path has bytes that are no UTF-8, which Python holds and TensorFlow refuses.

    Example:
        >>> check_utf8("directory", os.fsdecode(b"runs\xff"))
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: directory must be text in UTF-8, which TensorFlow needs. Received: 'runs\udcff'. ...
    """
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise error(
            f"{what} must be text in UTF-8, which TensorFlow needs. Received: {str(path)!r}. Choose another name."
        )


def hold(descriptor: int, path: Path) -> bool:
    """Takes the lock of an open file or directory, without waiting for it. It ends when the descriptor is closed.

    The kernel's lock ends with the process that holds it, even if that is killed. A process id in a file could not
    tell that the process still runs: containers repeat ids, and machines share directories.

    Returns: Whether it still has that name. Its last holder may have removed it.
    Raises:
        BlockingIOError: Another process, or another descriptor of this one, holds the lock.
        OSError: The file system has no locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the list of names of a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
