"""Exchanges two names of a file system in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

AT_FDCWD = -100  # paths are relative to the working directory
RENAME_EXCHANGE = 2
NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the files or directories of two names, so that both names exist at all times.

    Linux can do that on its usual file systems (ext4, XFS, Btrfs, tmpfs). NFS and macOS have no such call.

    Args:
        one: A file or directory.
        other: Another one on the same file system.
    Returns: True if they were exchanged. False if the system or the file system has no such call.
    Raises:
        OSError: One of the names does not exist, or this process may not change it.
    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a", "b"):
        ...     _ = (folder / name).write_text(name)
        >>> exchange(folder / "a", folder / "b") == ((folder / "a").read_text() == "b")
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
