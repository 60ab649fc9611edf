"""Writes directories that appear whole or not at all.

A new artifact is written beside the final name, in its own work directory:

    .NAME.tmp-0123456789abcdef/
        lock    locked (flock) while the export works here
        new/    the artifact that is being written; after an exchange, the earlier artifact
        old/    only without an exchange: the earlier artifact, between two renames

The new artifact is flushed to the disk. Then `new` and the earlier artifact exchange their names in one step. Where the
file system has no such step, there are two renames. If the export fails between them, it undoes the first one. If it is
killed between them, the next export does that.

A work directory without a held lock was left behind by a killed export.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from tfopt.atomic.files import check_utf8, flush_to_disk, hold, read_stored
from tfopt.errors import ExportError

MARK = "manifest.json"
LOCK, NEW, OLD = "lock", "new", "old"
ATTEMPTS = 100  # to replace a target that others replace at the same time
AT_FDCWD = -100  # paths are relative to the working directory
RENAME_EXCHANGE = 2
NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The part of a manifest that names the artifact's files."""

    tfopt: Any
    files: dict[str, Any]


LISTING = TypeAdapter(Listing)


@contextmanager
def staged_directory(final: Path, graph_bytes: int | None = None, *, replace: bool = True) -> Iterator[Path]:
    """Gives a temporary directory beside `final`, which replaces `final` when the block ends without an error.

    However the block ends, also by Ctrl-C, `final` holds either all of the earlier files or all of the new ones. That
    is also true after a kill, except on file systems without an exchange of names. There the earlier artifact may be
    left under the temporary name, and the next export moves it back. The next export also removes the files that a
    killed process left behind.

    Args:
        final: The directory to write.
        graph_bytes: Size of the graph that will be written. The error of a full disk names it.
        replace: Whether an earlier artifact may be replaced. Otherwise `final` must be new or empty.
    Raises:
        ExportError: `final` cannot be written, or holds files that do not belong to an artifact.
    """
    check_target(final)
    try:
        with _work_directory(final) as work:
            new = work / NEW
            new.mkdir()
            yield new
            for path in [*new.rglob("*"), new]:
                flush_to_disk(path)
            _check_replaceable(final)  # files may have been put there meanwhile
            if replace:
                _publish(new, final, work / OLD)
            else:
                new.rename(final)  # which fails if `final` holds anything
            flush_to_disk(final.parent)
    except OSError as error:
        room = ""
        if error.errno in NO_ROOM:
            size = "" if graph_bytes is None else f" The graph has {graph_bytes:,} bytes;"
            free = f" {shutil.disk_usage(final.parent).free:,} bytes are free there."
            room = (
                f"{size}{free} Make room, raise the limit on file sizes if there is one, or choose another directory."
            )
        raise ExportError(f"The artifact could not be written. Received: directory={final} ({error}).{room}") from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keeps other processes from working in a directory.

    The directory is made if needed. It is removed at the end if it is still empty.

    Raises:
        ExportError: Another process works in the directory, or the directory cannot be made.
    """
    descriptor = _held(directory)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            directory.rmdir()
        os.close(descriptor)


def _held(directory: Path) -> int:
    """Makes a directory if needed, and locks it. Returns its descriptor, which holds the lock."""
    missing = OSError(errno.EAGAIN, "others make and remove it all the time")
    for _ in range(ATTEMPTS):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError as error:
            missing = error  # its last holder has removed it meanwhile, or none can be made there, as in /proc
            continue
        except OSError as error:
            raise _not_writable(directory, error) from error
        try:
            held = hold(descriptor, directory)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ExportError(
                f"One run at a time may write to a directory. Received: directory={directory}, where another is "
                "at work. Wait for it, or choose another directory."
            ) from error
        except OSError:  # NFS cannot lock directories: two runs would mix their artifacts, but each would be whole
            held = True
        if held:
            return descriptor
        os.close(descriptor)  # the last holder has removed it: it was empty
    raise _not_writable(directory, missing)


def check_target(final: Path) -> None:
    """Raises ExportError unless an artifact may and can be written to `final`. Leaves nothing behind."""
    if set("[]*?") & set(str(final)):
        raise ExportError(
            "The export directory's path must hold none of [ ] * ?, which TensorFlow reads as a pattern. "
            f"Received: directory={final}. Choose another name."
        )
    check_utf8("The export directory's path", final, ExportError)
    outer = next((parent for parent in final.absolute().parents if _files_of_artifact(parent) is not None), None)
    if outer is not None:
        raise ExportError(
            "The export directory must not lie inside an artifact, whose files it would change. "
            f"Received: directory={final}, inside the artifact {outer}. Choose a directory beside it."
        )
    try:
        _check_replaceable(final)
        _clear_leftovers(final)
        existing = next(parent for parent in final.absolute().parents if parent.exists())
        with _work_directory(existing / final.name):
            pass  # it can be made
    except OSError as error:
        raise _not_writable(final, error) from error


def _check_replaceable(final: Path) -> None:
    for _ in range(ATTEMPTS):
        found = _identity(final)
        try:
            if found is None or _is_artifact(final) or (final.is_dir() and not any(final.iterdir())):
                return
        except FileNotFoundError:
            continue  # another export moved it meanwhile
        if _identity(final) == found:
            break
    raise ExportError(
        f"The export directory must be new, empty or an earlier artifact (it would be replaced). "
        f"Received: directory={final}, which holds something else. Choose another directory."
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what tells a file from another one of the same name, or None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_artifact(directory: Path) -> bool:
    """Whether a directory holds an artifact and no other files, which would be lost when the artifact is replaced."""
    files = _files_of_artifact(directory)
    if files is None:
        return False
    return all(path.relative_to(directory).as_posix() in files for path in directory.rglob("*") if path.is_file())


def _files_of_artifact(directory: Path) -> set[str] | None:
    """Returns the names of the manifest and of the files that it lists. None if there is no manifest of tfopt."""
    try:
        manifest = LISTING.validate_json(read_stored(directory / MARK))
    except (OSError, ValidationError):
        return None
    return {MARK, *manifest.files}


@contextmanager
def _work_directory(final: Path) -> Iterator[Path]:
    """Makes a directory beside `final` that no other export writes to, and removes it at the end."""
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = None
    while lock is None:  # another export may remove the directory before it is locked
        work = final.with_name(f".{final.name}.tmp-{secrets.token_hex(8)}")
        work.mkdir()
        try:
            lock = _take_lock(work, just_made=True)
        except OSError:  # the disk has no room even for an empty file
            shutil.rmtree(work, ignore_errors=True)
            raise
    try:
        yield work
    finally:
        _discard(work, final)
        lock.close()
        if work.exists():
            _remove_with_one_file(work)


def _take_lock(work: Path, *, just_made: bool = False) -> IO[bytes] | None:
    """Returns the open lock of a work directory, or None if another export holds it or has removed it.

    Where the file system has no locks, every directory counts as in use, except for the export that has just made it.
    """
    try:
        lock = (work / LOCK).open("ab")
    except FileNotFoundError:
        return None
    try:
        held = hold(lock.fileno(), work / LOCK)
    except OSError as error:  # another holds it, or the file system has no locks
        held = just_made and not isinstance(error, BlockingIOError)
    if held:
        return lock
    lock.close()
    return None


def _publish(new: Path, final: Path, old: Path) -> None:
    """Gives `new` the name `final`. An earlier artifact of that name is called `new` afterwards."""
    for attempt in range(ATTEMPTS):
        try:
            if not final.exists():
                new.rename(final)
            elif not _exchange(new, final):
                shutil.rmtree(old, ignore_errors=True)  # from an earlier attempt, in which another export was faster
                final.rename(old)
                new.rename(final)
                old.rename(new)
            return
        except OSError as error:  # another export made, moved or replaced `final` meanwhile
            if attempt == ATTEMPTS - 1 or error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the files or directories of two names, so that both names exist at all times.

    Linux can do that on its usual file systems (ext4, XFS, Btrfs, tmpfs). NFS and macOS have no such call: then this
    returns False.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a", "b"):
        ...     _ = (folder / name).write_text(name)
        >>> _exchange(folder / "a", folder / "b") == ((folder / "a").read_text() == "b")
        True
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _discard(work: Path, final: Path) -> None:
    """Removes a work directory. If `final` is missing, the earlier artifact in it gets its name back."""
    if (work / OLD).exists() and not final.exists():
        (work / OLD).rename(final)
    shutil.rmtree(work, ignore_errors=True)


def _remove_with_one_file(work: Path) -> None:
    """Removes a directory where the process has too many open files: shutil opens one for each level at once."""
    with suppress(OSError):
        for folder, folders, files in os.walk(work, topdown=False):
            for name in files:
                Path(folder, name).unlink(missing_ok=True)
            for name in folders:
                path = Path(folder, name)
                path.unlink() if path.is_symlink() else path.rmdir()
        work.rmdir()


def _clear_leftovers(final: Path) -> None:
    pattern = re.compile(re.escape(f".{final.name}.tmp-") + "[0-9a-f]{16}")
    if not final.parent.is_dir():
        return
    for work in final.parent.iterdir():
        if pattern.fullmatch(work.name):
            with suppress(PermissionError):  # it belongs to another user
                lock = _take_lock(work)
                if lock is not None:
                    _discard(work, final)
                    lock.close()


def _not_writable(directory: Path, error: OSError) -> ExportError:
    return ExportError(
        f"The directory must be writable. Received: directory={directory} ({error}). "
        "Choose a directory you may write to."
    )
