"""Directories that appear whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfopt.errors import ExportError

MARK = "manifest.json"


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Gives a temporary directory beside `final` that takes its place when the block ends well.

    However the process ends, `final` holds what it held before, or nothing, or all of the new. What a killed process
    left behind under a temporary name is cleared away by the next one.

    Raises:
        ExportError: `final` cannot be written, or holds something that is not an artifact of ours.
    """
    check_target(final)
    temporary = final.with_name(_temporary_name(final))
    replaced = final.with_name(f".{final.name}.old-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
    except OSError as error:
        raise ExportError(f"The artifact could not be written. Received: directory={final} ({error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keeps other processes from working in a directory; it is made, and goes again if it is still empty at the end.

    Raises:
        ExportError: Another process works in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExportError(
                f"One run at a time may export to a directory. Received: directory={directory}, where another is at "
                "work. Wait for it, or choose another directory."
            ) from error
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # not empty: it holds what was made
            directory.rmdir()


def check_target(final: Path) -> None:
    """Raises ExportError unless an artifact may and can be written to `final`. Leaves nothing behind."""
    if set("[]*?") & set(str(final)):
        raise ExportError(
            "The export directory's path must hold none of [ ] * ?, which TensorFlow reads as a pattern. "
            f"Received: directory={final}. Choose another name."
        )
    try:
        if final.exists() and not _is_artifact(final) and not (final.is_dir() and not any(final.iterdir())):
            raise ExportError(
                f"The export directory must be new, empty or an earlier artifact (it would be replaced). "
                f"Received: directory={final}, which holds something else. Choose another directory."
            )
        _clear_leftovers(final)
        existing = next(parent for parent in final.absolute().parents if parent.exists())
        probe = existing / _temporary_name(final)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ExportError(
            f"The export directory must be writable. Received: directory={final} ({error}). "
            "Choose a directory you may write to."
        ) from error


def _is_artifact(directory: Path) -> bool:
    """Whether we wrote it, and all that is in it: what is another's must not go when the artifact is replaced."""
    try:
        manifest = json.loads((directory / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or "tfopt" not in manifest:
        return False
    ours = {MARK, *manifest["files"]}
    return all(path.relative_to(directory).as_posix() in ours for path in directory.rglob("*") if path.is_file())


def _temporary_name(final: Path) -> str:
    return f".{final.name}.tmp-{os.getpid()}"


def _clear_leftovers(final: Path) -> None:
    pattern = re.compile(re.escape(f".{final.name}.") + r"(tmp|old)-(\d+)")
    if not final.parent.is_dir():
        return
    for path in final.parent.iterdir():
        match = pattern.fullmatch(path.name)
        # In containers every run has the same process id: what is under our own was left by an earlier run.
        ours = match and int(match[2]) == os.getpid()
        if match and (ours or not Path(f"/proc/{match[2]}").exists()) and Path("/proc/self").exists():
            if match[1] == "old" and not final.exists() and _is_artifact(path):
                path.rename(final)  # killed between the two renames: what was there comes back
            else:
                shutil.rmtree(path, ignore_errors=True)
