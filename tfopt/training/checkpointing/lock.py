"""Allows one training at a time in a checkpoint directory.

The lock is the kernel's lock (flock) on a file in the directory. It ends with the process that holds it, even if that
process is killed, so a restart never waits for a dead process. A process id in a file would not work: containers
repeat ids, and other machines share the directory. The file names the process that holds the lock, for the error
message only. That process removes the file when its training ends. A file left by a killed process does no harm.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tfopt.errors import ConfigError, warn

NAME = ".tfopt-training.lock"
_held: set[int] = set()  # descriptors of this process


@contextlib.contextmanager
def only_training(directory: Path) -> Iterator[None]:
    """Keeps other trainings out of a checkpoint directory. Creates the directory if it does not exist.

    A directory that cannot be written is not locked, since no training can save there.

    Raises:
        ConfigError: Another training uses the directory.
    Warns:
        TfoptWarning: The directory cannot be locked, for example because the file system has no locks.
    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> with only_training(directory):
        ...     with only_training(directory):
        ...         pass
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: checkpoint_dir must be used by one training at a time. Received: ...
    """
    _close_in_forks()
    descriptor = _locked(directory)
    if descriptor is None:
        yield
        return
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # a fork has closed it
            # The file is removed before the lock ends, so that no other process can lock a file that is then removed.
            with contextlib.suppress(OSError):
                (directory / NAME).unlink()
            _held.discard(descriptor)
            os.close(descriptor)


def _locked(directory: Path) -> int | None:
    """Returns the descriptor of the locked file, or None if the directory cannot be locked."""
    while True:
        descriptor = _open(directory)
        if descriptor is None:
            return None
        try:
            if not _lock(descriptor, directory):
                os.close(descriptor)
                return None
        except BaseException:
            os.close(descriptor)
            raise
        if _is_named(descriptor, directory / NAME):
            return descriptor
        os.close(descriptor)  # a training has just ended and removed this file


def _open(directory: Path) -> int | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if os.access(directory, os.W_OK):  # for example, the file belongs to another user
            _warn_unlocked(directory, error)
        return None


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, directory: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"checkpoint_dir must be used by one training at a time. Received: checkpoint_dir={directory}, "
            f"where {_holder(descriptor)}. Wait until it ends or end it, or set another checkpoint_dir."
        ) from error
    except OSError as error:
        _warn_unlocked(directory, error)
        return False
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):  # on a full disk, only the error message of another training lacks these words
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
    return True


def _warn_unlocked(directory: Path, error: OSError) -> None:
    warn(f"checkpoint_dir={directory} cannot be locked ({error}). Make sure that no other training uses it.")


def _holder(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {record['process']} on {record['host']} has been training since {record['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the process has the lock and has not written this yet
        return "another process is training"


@functools.cache
def _close_in_forks() -> None:
    """Makes forks release the lock: data loaders that outlive a killed training must not keep its directory locked."""

    def close() -> None:
        for descriptor in _held:
            os.close(descriptor)
        _held.clear()

    os.register_at_fork(after_in_child=close)
