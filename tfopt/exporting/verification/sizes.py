"""The size of a model's files, as they are and packed."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from tfopt.exporting.formats import files_of


class _Counter:
    """A file that keeps the number of the bytes written to it, and none of them."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        return len(data)


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def gzip_bytes(path: Path) -> int:
    """Returns the size of a model's files as a .tar.gz, with what links lead to. It is packed in pieces."""
    inside = path if path.is_dir() else path.parent
    written: Any = _Counter()
    with tarfile.open(fileobj=written, mode="w|gz", dereference=True) as archive:
        for file in files_of(path):
            archive.add(file, arcname=file.relative_to(inside))
    return int(written.count)
