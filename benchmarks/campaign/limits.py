"""Limits that a machine sets, in a process that is a fork and may be spoiled: room on a disk, sizes, memory, files.

A process may limit itself without asking anybody. A disk of its own takes a name space for mounts, which root may make,
and on most machines everybody: it ends with the process, so nothing has to be undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # the rights of root to files of others
CAPABILITIES_VERSION = 0x20080522


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    words = [each if each is None else os.fsencode(each) for each in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), options.encode())


def own_mounts() -> None:
    """Gives this process its own mounts; raises OSError where the machine allows none."""
    if os.geteuid() == 0:
        _call("unshare", CLONE_NEWNS)
    else:
        user, group = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", Path("/"), None, MS_REC | MS_PRIVATE)


def full_disk(directory: Path, room: int) -> Callable[[], None]:
    """Puts a directory and its content on a disk with so many bytes of room. Returns what makes room again."""
    own_mounts()
    content = directory.with_name(f"{directory.name}.before")
    shutil.copytree(directory, content, symlinks=True)
    used = sum(-(-path.stat().st_size // 4096) * 4096 for path in content.rglob("*") if path.is_file())
    size = -(-(used + room) // 4096) * 4096 + 4096
    _mount("tmpfs", directory, "tmpfs", 0, f"size={size}")
    shutil.copytree(content, directory, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(content)
    return lambda: _mount("tmpfs", directory, "tmpfs", MS_REMOUNT, f"size={size + 2**28}")


def read_only(directory: Path, *, own: bool = True) -> None:
    """Makes a directory one of a disk that cannot be written; `own` where the process has no mounts of its own yet."""
    if own:
        own_mounts()
    _mount(str(directory), directory, None, MS_BIND)
    _mount("none", directory, None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def writable_again(directory: Path) -> None:
    _mount("none", directory, None, MS_BIND | MS_REMOUNT)


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Takes root's rights to the files of others away, so that their modes count."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    before, limited = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    _call("capget", header, before)
    ctypes.memmove(limited, before, ctypes.sizeof(before))
    limited[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    _call("capset", header, limited)
    try:
        yield
    finally:
        _call("capset", header, before)


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Sets a limit of this process: RLIMIT_FSIZE, RLIMIT_AS, RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def address_space() -> int:
    """Returns the bytes of addresses that this process uses, which RLIMIT_AS counts."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def open_files() -> int:
    """Returns the least number that no file of this process has."""
    with Path(os.devnull).open() as file:
        return file.fileno()


@contextlib.contextmanager
def at_event(directory: Path, number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Calls a function before the n-th time that Python opens, renames, makes or removes something in a directory.

    Yields: A list whose only value counts these events. With number 0 they are counted alone.
    """
    counted, inside, on = [0], os.fsencode(directory), True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if not on or event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
            return
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike) and os.fsencode(path).startswith(inside):
            counted[0] += 1
            if counted[0] == number:
                act()

    sys.addaudithook(hook)  # which stays until the process ends
    try:
        yield counted
    finally:
        on = False
