"""Allows one training at a time in a checkpoint directory.

The lock is the kernel's lock on a file in the directory, so a restart never waits for a dead process; see
tfopt.atomic.files.hold. The file names the process that holds the lock, for the error message only. That process
removes the file when its training ends. A file left by a killed process does no harm.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tfopt.atomic.files import hold
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
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if os.access(directory, os.W_OK):  # for example, the file belongs to another user
                _warn_unlocked(directory, error)
            return None
        is_named = None
        try:
            is_named = hold(descriptor, directory / NAME)
        except BlockingIOError as error:
            raise ConfigError(
                f"checkpoint_dir must be used by one training at a time. Received: checkpoint_dir={directory}, "
                f"where {_holder(descriptor)}. Wait until it ends or end it, or set another checkpoint_dir."
            ) from error
        except OSError as error:
            _warn_unlocked(directory, error)
            return None
        finally:
            if not is_named:
                os.close(descriptor)
        if is_named:  # otherwise a training has just ended and removed this file
            _write_holder(descriptor)
            return descriptor


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):  # on a full disk, only the error message of another training lacks these words
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)


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
