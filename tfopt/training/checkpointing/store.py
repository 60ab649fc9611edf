"""Checkpoints on disk: one file for each, complete or absent, and verified when it is read.

A checkpoint is an uncompressed zip of `.npy` members, as `numpy.savez` writes it, so `numpy.load` reads it anywhere.
The member `checkpoint.json` holds the step, the caller's record, the list of the arrays and its own checksum. The zip
keeps a CRC-32 of every member. A checkpoint is returned only if all members are right and none is missing. It contains
no pickle.

A file gets its final name when all of it is on the disk, so a process may be killed at any moment. Only one process,
the writer, changes the directory. Any number of processes may read at the same time. So reading leaves damaged files
where they are, and the next `save` renames them.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Registers bfloat16 and the float8 types with NumPy, so that np.dtype knows them by name.
import ml_dtypes as _  # noqa: F401
import numpy as np

from tfopt.atomic.checked_json import EDITED, is_as_written, with_checksum
from tfopt.atomic.files import clear_leftovers, whole_file
from tfopt.errors import ArtifactError, ConfigError, ExportError, warn

FORMAT = 1
RECORD = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})\.npz")
_LONGEST_NAME = 65_000  # bytes; a zip holds a name's length in 16 bits


@dataclass(frozen=True)
class Checkpoint:
    """The content of one file, of a training after so many steps."""

    path: Path
    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]  # the caller's record as JSON returns it: tuples are lists, keys are strings


class CheckpointStore:
    """A directory with the newest `keep` checkpoints of one training. The first `save` creates it.

    Raises:
        ConfigError: `keep` is not a positive integer.
    Example:
        >>> import tempfile
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()), keep=2)
        >>> for step in (10, 20, 30):
        ...     _ = store.save(step, {"weights": np.full(2, step)}, {"epoch": step // 10})
        >>> store.steps()
        [20, 30]
        >>> newest = store.load_newest()
        >>> newest.step, newest.arrays["weights"].tolist(), newest.meta
        (30, [30, 30], {'epoch': 3})
    """

    def __init__(self, directory: Path, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep must be an integer of at least 1. Received: keep={keep!r}.")
        self.directory = Path(directory)
        self.keep = keep
        self._damaged: set[Path] = set()

    def steps(self) -> list[int]:
        """Returns the steps that have a file, oldest first. The files are not read."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArtifactError(
                f"The checkpoint directory must be readable. Received: directory={self.directory} ({error})."
            ) from error
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def check_writable(self) -> None:
        """Creates the directory. Raises ConfigError if no file can be written in it: better now than after an epoch."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir must be a directory that can be written. Received: checkpoint_dir={self.directory} "
                f"({error.strerror or error}). Choose another directory, or None to train without checkpoints."
            ) from error

    def path(self, step: int) -> Path:
        """Returns the file of a step, whether or not it exists."""
        return self.directory / f"step-{step:08d}.npz"

    def save(self, step: int, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, then removes those that are too old. It replaces a checkpoint of the same step.

        Files of later steps stay: they come from a run that reached more steps than this one. Arrays may have any dtype
        but object, and the record `meta` must be what JSON can hold.

        Raises:
            ConfigError: An argument cannot be stored. Nothing was written.
            ExportError: The file cannot be written (disk full, no permission). Earlier checkpoints are unchanged.
        """
        step, members, record = _checked(step, arrays, meta)
        final = self.path(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.directory)
            if final.exists() and not _is_own(final):
                self._set_aside(final)
            with whole_file(final) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in members.items():
                    # ZipInfo has a fixed date, so that equal states give equal files.
                    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(RECORD), record)
            self._damaged.discard(final)
            self._rotate(step)
        except OSError as error:
            raise ExportError(
                f"The checkpoint of step {step} could not be written. Received: directory={self.directory} ({error}). "
                "Earlier checkpoints are untouched. Free space there, or choose a directory you may write to."
            ) from error
        return final

    def load_newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None if there are no files.

        For a damaged one, a TfoptWarning names the file and the reason, and the one before it is read.

        Raises:
            ArtifactError: There are checkpoints, but none can be read.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                checkpoint = read_checkpoint(path)
            except ArtifactError as error:
                reasons.append(str(error))
                self._damaged.add(path)
                continue
            for reason in reasons:
                warn(f"{reason} Going back to step {step}.")
            return checkpoint
        if reasons:
            raise ArtifactError(
                f"At least one checkpoint must be readable. Received: directory={self.directory}, where none is. "
                + " ".join(reasons)
                + " Restore one from a copy, or remove them to begin anew."
            )
        return None

    def _rotate(self, saved: int) -> None:
        for path in self._damaged:
            if path.exists():
                self._set_aside(path)
        self._damaged.clear()
        # Only files up to the saved step count, so that later files do not cause the removal of the new one.
        up_to = [step for step in self.steps() if step <= saved]
        for step in up_to[: -self.keep]:
            if _is_own(self.path(step)):
                self.path(step).unlink(missing_ok=True)

    def _set_aside(self, path: Path) -> None:
        """Renames a file that is no whole checkpoint, and replaces no other file by it."""
        names = (path.with_name(f"{path.name}.corrupt{number or ''}") for number in itertools.count())
        path.rename(next(name for name in names if not os.path.lexists(name)))


def check_mode(directory: str | Path, mode: bool | Literal["auto"]) -> None:
    """Raises ConfigError if a checkpoint directory contradicts the `resume` setting.

    Example:
        >>> check_mode("runs/none", "auto")
        >>> check_mode("runs/none", True)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: checkpoint_dir must hold a checkpoint with resume=True. Received: ...
    """
    found = CheckpointStore(Path(directory)).steps()
    if mode is False and found:
        raise ConfigError(
            f"checkpoint_dir must hold no checkpoints with resume=False. Received: checkpoint_dir={directory}, "
            f"with steps {', '.join(map(str, found))}. Set resume='auto' to go on from them, or another directory."
        )
    if mode is True and not found:
        raise ConfigError(
            f"checkpoint_dir must hold a checkpoint with resume=True. Received: checkpoint_dir={directory}. "
            "Set resume='auto' to begin anew where there is none."
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads one file and verifies all of it.

    Raises:
        ArtifactError: The file is missing, damaged, incomplete, or of another format. The message says which.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for a writer
            raise _Damage("it is no file")
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            contents = _read_members(archive, os.fstat(file.fileno()).st_size)
        if RECORD not in contents:
            raise _Damage(f"it holds no {RECORD}")
        record = json.loads(contents.pop(RECORD))
        if record["format"] != FORMAT:
            raise _Damage(f"its format is {record['format']!r}, and this version of tfopt reads {FORMAT}")
        if not is_as_written(record):
            raise _Damage(EDITED)
        if path.name != f"step-{record['step']:08d}.npz":
            raise _Damage(f"it holds step {record['step']}")
        dtypes = {f"{name}.npy": (name, dtype) for name, dtype in record["dtypes"].items()}
        if dtypes.keys() != contents.keys():
            raise _Damage("arrays are missing")
        arrays = {name: _from_npy(contents.pop(member), dtype) for member, (name, dtype) in dtypes.items()}
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise ArtifactError(f"A checkpoint must be readable and whole. Received: {path} ({reason}).") from error
    return Checkpoint(path, record["step"], arrays, record["meta"])


def _is_own(path: Path) -> bool:
    """Whether tfopt wrote a file; see tfopt.atomic.own_files. Its arrays are not read."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return RECORD in archive.namelist()
    except _DAMAGE:
        return False


class _Damage(Exception):
    """The reason why a file is not a complete checkpoint."""


# The errors that zipfile, json and NumPy raise for damaged bytes.
_DAMAGE = (
    _Damage,
    zipfile.BadZipFile,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    struct.error,
    NotImplementedError,  # zipfile: an unknown version or flag
    RuntimeError,  # zipfile: an encrypted member
)


def _checked(
    step: int, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> tuple[int, dict[str, np.ndarray], str]:
    """Returns the step, the arrays as they are stored, and the record, or raises ConfigError."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ConfigError(f"step must be an integer of at least 0. Received: step={step!r}.")
    members, dtypes = {}, {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if not isinstance(name, str) or "\0" in name or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise ConfigError(
                f"Array names must be strings of at most {_LONGEST_NAME} bytes without NUL. Received: {name!r:.100}."
            )
        if array.dtype.hasobject:
            raise ConfigError(f"arrays must not hold Python objects. Received: {name!r} with dtype={array.dtype}.")
        # NumPy cannot write the types that ml_dtypes adds: bfloat16, float8, int4.
        added = array.dtype.isbuiltin == 2
        members[name] = array.view(f"u{array.dtype.itemsize}") if added else array
        dtypes[name] = array.dtype.name if added else ""
    try:
        content = {"format": FORMAT, "step": int(step), "dtypes": dtypes, "meta": dict(meta)}
        record = json.dumps(with_checksum(content))
        record.encode(), "".join(dtypes).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"meta and array names must be what JSON can hold. Received: {error}.") from error
    return int(step), members, record


def _read_members(archive: zipfile.ZipFile, file_bytes: int) -> dict[str, bytes]:
    contents = {}
    for info in archive.infolist():
        # A damaged zip directory may contain any size. Memory of that size must not be allocated.
        if info.compress_type != zipfile.ZIP_STORED or max(info.file_size, info.compress_size) > file_bytes:
            raise _Damage(f"the entry of {info.filename!r:.100} is wrong")
        contents[info.filename] = archive.read(info)  # compares the CRC-32
    return contents


def _from_npy(data: bytes, added_dtype: str) -> np.ndarray:
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array.view(np.dtype(added_dtype)) if added_dtype else array
