"""The files of a model, and their size as they are and packed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def files_of(path: Path) -> list[Path]:
    """Returns the files of a model's directory, or a model's file with the weights that OpenVINO keeps beside it.

    Example:
        >>> files_of(Path("nowhere"))
        []
    """
    candidates = path.rglob("*") if path.is_dir() else [path, *([path.with_suffix(".bin")] * (path.suffix == ".xml"))]
    return sorted(file for file in candidates if file.is_file())


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
