"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    replaced = final.with_name(f".{final.name}.old-{os.getpid()}")
    _clear_leftovers(final)
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


def check_target(final: Path) -> None:
    """Raises ExportError unless an artifact may and can be written to `final`. Leaves nothing behind."""
    if final.exists() and not (final / MARK).is_file() and (final.is_file() or any(final.iterdir())):
        raise ExportError(
            f"The export directory must be new, empty or an earlier artifact (it would be replaced). "
            f"Received: directory={final}, which holds something else. Choose another directory."
        )
    existing = next(parent for parent in final.absolute().parents if parent.exists())
    probe = existing / f".tfopt-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ExportError(
            f"The export directory must be writable. Received: directory={final} ({error.strerror} at {existing}). "
            "Choose a directory you may write to."
        ) from error


def _clear_leftovers(final: Path) -> None:
    pattern = re.compile(re.escape(f".{final.name}.") + r"(?:tmp|old)-(\d+)")
    if not final.parent.is_dir():
        return
    for path in final.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
