"""The size of a model's files, as they are and packed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tfopt.exporting.formats import files_of


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def gzip_bytes(path: Path) -> int:
    """Returns the size of a model's files as a .tar.gz."""
    inside = path if path.is_dir() else path.parent
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in files_of(path):
            archive.add(file, arcname=file.relative_to(inside))
    return buffer.getbuffer().nbytes
