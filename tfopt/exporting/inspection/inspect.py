"""`tfopt.inspect`: what a model file holds, without running anything of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfopt.atomic.directories import MARK
from tfopt.errors import ArtifactError, ConfigError, TfoptError
from tfopt.exporting.formats import FORMATS, SAVED_MODEL, check_one_model, files_of
from tfopt.exporting.inspection.contents import Contents
from tfopt.exporting.inspection.record import Inspection, NodeChoice
from tfopt.exporting.manifest import Manifest, read_intact_manifest, read_manifest

OPEN_SIZE = 128


PACKAGES = {SAVED_MODEL: (), "onnx": ("onnx",), "litert": ("ai_edge_litert",), "openvino": ("openvino",)}
"""What reads each format; tfopt's extra of its name has it. The module of the format's name here reads the file."""


def inspect(path: str | Path, *, open_size: int = OPEN_SIZE) -> Inspection:
    """Reads what a model file holds: tensors, operators with their types, parameters, multiply-adds, largest layers.

    Nothing of the model runs, so that a file from an unknown source can be inspected. Of an artifact of tfopt, the
    manifest tells which nodes are in int8 and which are in float, and why, and whether the files are as written.

    Args:
        path: The directory of an artifact or of a SavedModel, or an .onnx, .tflite or .xml file (of OpenVINO).
        open_size: What an open size other than the batch, such as the length of a sequence, counts as. The batch is
            one example. A LiteRT file has its shapes for open sizes of 1 only.
    Returns: The record. Its `problems` tell whether the files of an artifact are damaged.
    Raises:
        ArtifactError: There is no model at the path, or it cannot be read.
        ConfigError: A package that reads the format is missing, or open_size is not positive.
    Example:
        >>> import keras, tempfile, tfopt
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False)])
        >>> artifact = tfopt.export(model, tempfile.mkdtemp() + "/tiny")
        >>> inspection = inspect(artifact.path)
        >>> inspection.parameters, inspection.multiply_adds, inspection.as_written
        (8, 8, True)
    """
    if isinstance(open_size, bool) or not isinstance(open_size, int) or open_size < 1:
        raise ConfigError(
            f"open_size must be a whole number of at least 1. Received: open_size={open_size!r}. Pass a length."
        )
    given = Path(path)
    name, file = _model_at(given)
    manifest, problems = _manifest(given)
    try:
        contents = _read(name, file, open_size)
    except ArtifactError as error:
        if problems:  # they say more of an artifact
            raise ArtifactError(problems[0]) from error
        raise
    whole = file.parent if file.name == FORMATS[SAVED_MODEL].file else given
    return Inspection(
        path=str(path),
        format=name,
        precision=manifest.precision if manifest else None,
        inputs=contents.inputs,
        outputs=contents.outputs,
        operators=contents.operators,
        weights=contents.weights,
        choices=tuple(_choices(manifest.report or {})) if manifest else (),
        sizes=contents.sizes,
        bytes_on_disk=sum(each.stat().st_size for each in files_of(whole)),
        versions=({"exported by": f"tfopt {manifest.tfopt}"} if manifest else {}) | dict(contents.versions),
        requires=manifest.requires if manifest else None,
        tuned=manifest.tuned if manifest else None,
        as_written=not problems if manifest or problems else None,
        outside=contents.outside,
        open_loops=contents.open_loops,
        notes=contents.notes,
        problems=problems,
    )


def _model_at(path: Path) -> tuple[str, Path]:
    """Returns the format of the model at a path, and its file."""
    check_one_model(path)
    for name in PACKAGES:
        each = FORMATS[name]
        if (path / each.file).is_file():
            return name, path / each.file
        ending = name != "saved_model" and path.suffix.lower() == Path(each.file).suffix  # a .pb may be many things
        if path.is_file() and (path.name == each.file or ending):
            return name, path
    known = ", ".join(FORMATS[name].file for name in PACKAGES)
    rule = "path must be a directory that holds a model, or the model's file"
    if not path.exists():
        raise ArtifactError(f"{rule}. Received: {path}, which does not exist. Check the path.")
    if path.is_dir():
        raise ArtifactError(f"{rule}. Received: {path}, which holds none of {known}. Name the directory of a model.")
    if path.suffix == ".keras":
        raise ArtifactError(
            f"{rule}. Received: {path}, which holds layers and no graph. Export it: tfopt export IN OUT."
        )
    raise ArtifactError(
        f"{rule}. Received: {path}, whose name is neither saved_model.pb nor ends in .onnx, .tflite or .xml. "
        "Name a model's file."
    )


def _manifest(path: Path) -> tuple[Manifest | None, tuple[str, ...]]:
    """Returns the manifest of an artifact, and what is wrong with its files."""
    if not os.path.lexists(path / MARK):  # a pipe or a broken link is a damaged manifest
        return None, ()
    try:
        return read_intact_manifest(path), ()
    except ArtifactError as error:
        problem = str(error)
    try:
        return read_manifest(path), (problem,)
    except ArtifactError:
        return None, (problem,)


def _read(name: str, file: Path, open_size: int) -> Contents:
    packages = PACKAGES[name]
    missing = [each for each in packages if find_spec(each) is None]
    if missing:
        raise ConfigError(
            f"A model in the format {name!r} needs the packages {', '.join(packages)} to be read. Received: an "
            f"environment without {', '.join(missing)}. Install them: pip install 'tfopt[{name}]'."
        )
    reader: Any = import_module(f"tfopt.exporting.inspection.{name}")
    try:
        contents: Contents = reader.read(file, open_size)
    except (TfoptError, MemoryError, PermissionError):
        raise
    except Exception as error:  # a damaged file fails in many ways, from IndexError to DecodeError
        reason = " ".join(str(error).split())[:200] or "it is damaged"
        raise ArtifactError(
            f"path must be a readable model. Received: {file} ({type(error).__name__}: {reason}). Write it again."
        ) from error
    return contents


def _choices(report: Mapping[str, Any]) -> Iterator[NodeChoice]:
    for each in report.get("changed", ()):
        yield NodeChoice(name=each["name"], kind=each["kind"], quantized=True, reason=each["detail"])
    for each in report.get("skipped", ()):
        yield NodeChoice(name=each["name"], kind=each["kind"], quantized=False, reason=each["reason"])
