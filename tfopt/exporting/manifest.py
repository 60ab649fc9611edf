"""The manifest beside an artifact: its precision, its needs, the digests of its files, and its outputs at export.

The JSON is read once, into a validated record. No other module reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pydantic
import tensorflow as tf

from tfopt.atomic.checked_json import EDITED, is_as_written
from tfopt.atomic.directories import MARK
from tfopt.atomic.files import read_stored
from tfopt.errors import ArtifactError
from tfopt.exporting.config import DEFAULT_SIGNATURE, FLOAT_SIGNATURE, PRECISIONS
from tfopt.exporting.formats import FORMATS, SAVED_MODEL, has_model
from tfopt.exporting.int8.weights import PRODUCT
from tfopt.graph import FrozenGraph
from tfopt.graph.output_ops import output_ops
from tfopt.report import Record, ServingTimes, TunedServing

MANIFEST_FORMAT = 2
FIRST_FORMAT = 1  # the format of tfopt 0.1.0, which `_upgraded` reads
SOURCE, ARTIFACT = "source", "artifact"  # the check has their outputs, and those of further signatures
RANDOM = "random inputs"
RECOMBINED = f"{RANDOM} with the values of calibration_data"
# What a machine needs for products in a half type.
NEEDS = {
    "bfloat16": "bfloat16 products run on every processor; they need AMX or AVX512_BF16, or a GPU of compute "
    "capability 8.0, to be faster than in float32, and are slower elsewhere",
    "float16": "float16 products run on every processor; they need AMX_FP16 or AVX512_FP16, or a GPU of compute "
    "capability 7.0, to be faster than in float32, and are slower elsewhere",
}


@dataclass(frozen=True, kw_only=True)
class TensorRecord(Record):
    """An input or output of the signature.

    Attributes:
        shape: Its sizes. An open size is None. The whole shape is None where the rank is open.
        dtype: The dtype, by TensorFlow's name.
        op: For an output, the op that computes it in the float model, for example "Sigmoid".
    """

    shape: tuple[int | None, ...] | None
    dtype: str
    op: str | None = None

    @classmethod
    def of(cls, spec: tf.TensorSpec, op: str | None = None) -> TensorRecord:
        shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
        return cls(shape=shape, dtype=spec.dtype.name, op=op)

    def fits(self, other: TensorRecord) -> bool:
        """Whether one tensor can have both types: the dtype is equal, and no size contradicts the other."""
        return self.dtype == other.dtype and bool(tf.TensorShape(self.shape).is_compatible_with(other.shape))

    def __str__(self) -> str:
        sizes = "of any shape" if self.shape is None else list(self.shape)
        return f"{self.dtype} {sizes}"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(tf.as_dtype(self.dtype).as_numpy_dtype)


@dataclass(frozen=True, kw_only=True)
class SignatureRecord(Record):
    """The inputs and outputs by name, in the model's order."""

    inputs: dict[str, TensorRecord]
    outputs: dict[str, TensorRecord]

    @classmethod
    def of(cls, graph: FrozenGraph, source: FrozenGraph) -> SignatureRecord:
        """Returns the record of an artifact's graph. The ops of its outputs are those of the source model."""
        ops = output_ops(source)
        return cls(
            inputs={name: TensorRecord.of(spec) for name, spec in graph.inputs.items()},
            outputs={name: TensorRecord.of(spec, ops.get(name)) for name, (_, spec) in graph.outputs.items()},
        )


@dataclass(frozen=True, kw_only=True)
class FileRecord(Record):
    """The size and the digest of a file when it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(bytes=file.tell(), sha256=digest)


@dataclass(frozen=True, kw_only=True)
class OutputRecord(Record):
    """An output on the inputs of the check.

    Attributes:
        values: Some of its values, spread evenly over the whole output.
        sums: Sums over consecutive parts of it, each value with a random sign. Any changed value changes one sum.
        norm: The Euclidean norm of all its values.
        infinite: The number of infinite values. They count as 0 in the fields above.
        scale: The root mean square of the output's values on usual inputs, or that of sure decisions if its values are
            probabilities. Errors are shares of it, so that an output near zero does not make them large.
    """

    values: tuple[float, ...]
    sums: tuple[float, ...] = ()
    norm: float = 0.0
    infinite: int = 0
    scale: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ErrorRecord(Record):
    """The difference between an artifact's outputs and the source model's, on examples at export.

    `relative` is the difference of an output as a share of its scale; of several outputs the largest.
    """

    max_abs: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class CheckRecord(Record):
    """How to draw the inputs of the check again, and the outputs that they gave at export.

    Attributes:
        ranges: The least and the greatest value of each input. For strings, these are places in its words.
        outputs: The outputs of the source model, of the artifact and of its further signatures, each by its name.
        examples: The inputs of `errors` in words: examples that were not calibrated on, or random inputs.
        errors: The error of the artifact and of its further signatures on these. Empty where there were no data.
        words: The words to draw from, of each input of strings.
        format: The manifest's format, which decides how inputs and values are chosen.
    """

    ranges: dict[str, tuple[float, float]]
    shapes: dict[str, tuple[int, ...]]
    outputs: dict[str, dict[str, OutputRecord]]
    examples: str = ""
    errors: dict[str, ErrorRecord] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def compared(self) -> list[str]:
        """The outputs that are compared and scored: all but those that choose from another one, as the best classes."""
        return [name for name, recorded in self.outputs[SOURCE].items() if recorded.values]

    @property
    def held_out(self) -> bool:
        """Whether the errors are those on examples that were not calibrated on."""
        return bool(self.errors) and not self.examples.startswith(RANDOM)


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """The content of a manifest. A field that was added later has a default, so that older artifacts can be read."""

    format: int
    tfopt: str
    tensorflow: str
    model: str
    precision: str
    requires: str
    needs_vnni: bool | None = None
    compute: str = "float32"
    model_format: str = "saved_model"
    signatures: tuple[str, ...] = (DEFAULT_SIGNATURE,)
    baseline: str | None = None
    signature: SignatureRecord
    files: dict[str, FileRecord]
    check: CheckRecord
    report: dict[str, Any] | None = field(default=None)
    serving: ServingTimes | None = None
    tuned: TunedServing | None = None  # what a server should set, as `tfopt.tune_serving` measured it

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        for spec in content["signature"]["inputs"].values():
            del spec["op"]  # of outputs only
        return content

    @property
    def compared_outputs(self) -> dict[str, TensorRecord]:
        """The specs of the outputs that are compared and scored."""
        return {name: spec for name, spec in self.signature.outputs.items() if name in self.check.compared}

    @property
    def is_float(self) -> bool:
        """Whether its weights are floating-point numbers."""
        return not self.precision.startswith("int")


_ADAPTER = pydantic.TypeAdapter(Manifest)


def check_is_artifact(path: Path) -> None:
    """Raises ArtifactError unless a directory holds a manifest of tfopt, or a SavedModel with an unreadable manifest.

    `read_manifest` finds all other errors in the manifest.

    Example:
        >>> check_is_artifact(Path("nowhere"))
        Traceback (most recent call last):
        ...
        tfopt.errors.ArtifactError: artifact must be a directory that tfopt.export wrote. Received: nowhere, which ...
    """
    try:
        _content(path)
    except ArtifactError as error:
        # A file that is not JSON is a damaged manifest. JSON of another program means that this is no artifact.
        if not (isinstance(error.__cause__, ValueError) and has_model(path)):
            raise


def read_manifest(path: Path) -> Manifest:
    """Returns an artifact's manifest.

    Raises:
        ArtifactError: There is no manifest, or it has changed since `tfopt.export` wrote it.
    """
    content = _content(path)
    try:
        # As JSON: there, strict refuses strings and booleans as numbers, but accepts lists as tuples.
        manifest = _ADAPTER.validate_json(json.dumps(_upgraded(content)), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _not_as_written(path, f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}") from error
    problem = next(_contradictions(manifest), None)
    if problem is None and not is_as_written(content):
        problem = EDITED
    if problem is not None:
        raise _not_as_written(path, problem)
    return manifest


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_stored(path / MARK).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"artifact must be a directory that tfopt.export wrote. Received: {path}, which holds no {MARK}."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"The manifest must be readable JSON. Received: {path / MARK} ({error}). Export {path} again."
        ) from error
    formats = (FIRST_FORMAT, MANIFEST_FORMAT)
    if not isinstance(content, dict) or content.get("format") not in formats or "tfopt" not in content:
        raise ArtifactError(
            f"The manifest must be one that tfopt.export wrote, of format {' or '.join(map(str, formats))}. "
            f"Received: {path / MARK}, which has another format. Export {path} again."
        )
    return content


def read_intact_manifest(path: Path, role: str = "artifact") -> Manifest:
    """Returns an artifact's manifest, and checks that the directory holds exactly the files that it lists.

    Errors name the artifact by its role, for example "baseline".

    Raises:
        ArtifactError: There is no manifest, or a file is missing, was added, has changed or cannot be read.
    """
    manifest = read_manifest(path)
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {MARK}
    for name, recorded in manifest.files.items():
        file = path / name
        if name not in found:
            raise ArtifactError(
                f"The {role} must be complete. Received: {file}, which is missing. Export {path} again."
            )
        try:
            found_record = FileRecord.of(file)
        except OSError as error:
            raise ArtifactError(
                f"The {role} must be readable. Received: {file} ({error.strerror}). Allow it to be read, or restore it."
            ) from error
        if found_record != recorded:
            raise ArtifactError(
                f"The {role} must be as it was written. Received: {file}, which has changed. Export {path} again."
            )
    added = sorted(found.difference(manifest.files))
    if added:
        raise ArtifactError(
            f"The {role} must hold no file that its manifest does not list. Received: {path / added[0]}. Remove it, "
            f"or export {path} again."
        )
    return manifest


def requirements(
    graphs: Mapping[str, FrozenGraph], needs_vnni: bool, compute: str = "float32", model_format: str = SAVED_MODEL
) -> str:
    """Returns the software and hardware that an artifact needs for serving."""
    needs = FORMATS[model_format].needs
    if model_format != SAVED_MODEL:
        return needs + ("; on x86-64 int8 instructions (VNNI, AMX) for right results" if needs_vnni else "")
    products = "" if compute == "float32" else f"; {NEEDS[compute]}"
    # Not every build of TensorFlow has kernels for the ops whose names begin so.
    nodes = graphs[DEFAULT_SIGNATURE].graph_def.node
    kernels = sorted({node.op for node in nodes if node.op.startswith("_")})
    if kernels:
        needs += f" with oneDNN's int8 kernels, as in its builds for x86-64 ({', '.join(kernels)})"
        needs += f"; int8 instructions (VNNI, AMX) for {'right results' if needs_vnni else 'speed'}{products}"
        if any(node.op == PRODUCT and node.attr["Tout"].type == tf.bfloat16.as_datatype_enum for node in nodes):
            needs += "; AVX512 for int8 kernels that write bfloat16, without which TensorFlow ends the process"
        return needs + (f". Signature {FLOAT_SIGNATURE!r} needs TensorFlow only" if FLOAT_SIGNATURE in graphs else "")
    return needs + products


def digests(directory: Path) -> dict[str, FileRecord]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): FileRecord.of(path) for path in files}


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest of the first format in the present format. Errors in it stay."""
    check = content.get("check")
    if content["format"] != FIRST_FORMAT or not isinstance(check, dict):
        return content
    outputs = {
        kind: {name: {"values": values} for name, values in check[kind].items()}
        for kind in check.keys() - {"ranges", "shapes"}
        if isinstance(check[kind], dict)
    }
    kept = {key: check[key] for key in ("ranges", "shapes") if key in check}
    return content | {"check": kept | {"outputs": outputs, "format": FIRST_FORMAT}}


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yields the errors of a manifest whose fields all have the right types."""
    check, inputs, outputs = manifest.check, manifest.signature.inputs, manifest.signature.outputs
    if manifest.precision not in PRECISIONS:
        yield f"precision is {manifest.precision!r}, which is none of {', '.join(PRECISIONS)}"
    if manifest.compute not in ("float32", *NEEDS):
        yield f"compute is {manifest.compute!r}, which is none of float32, {', '.join(NEEDS)}"
    if DEFAULT_SIGNATURE not in manifest.signatures:
        yield f"signatures do not hold {DEFAULT_SIGNATURE!r}"
    if manifest.model_format not in FORMATS:
        yield f"model_format is {manifest.model_format!r}, which is none of {', '.join(FORMATS)}"
    elif FORMATS[manifest.model_format].file not in manifest.files:
        yield f"files do not list {FORMATS[manifest.model_format].file}"
    for path in map(PurePosixPath, manifest.files):
        if path.is_absolute() or ".." in path.parts:
            yield f"files list {path}, which is outside of the artifact"
    for name, spec in (inputs | outputs).items():
        if not _is_dtype(spec.dtype):
            yield f"signature gives {name!r} the dtype {spec.dtype!r}, which TensorFlow does not have"
    if manifest.tuned and manifest.tuned.batch_size not in (each.batch_size for each in manifest.tuned.curve):
        yield f"tuned.curve lacks the batch size {manifest.tuned.batch_size}"
    if not inputs.keys() == check.ranges.keys() == check.shapes.keys():
        yield f"check has inputs other than the signature's, {list(inputs)}"
        return
    for name, spec in inputs.items():
        low, high = check.ranges[name]
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            yield f"check.ranges of {name!r} is ({low}, {high}), which is not a range"
        words = len(check.words.get(name, ()))
        if spec.dtype == "string" and (low < 0 or high >= words):
            yield f"check.ranges of {name!r} is ({low}, {high}), and check.words has {words} words"
        if not spec.fits(replace(spec, shape=check.shapes[name])):
            yield f"check.shapes of {name!r} is {check.shapes[name]}, where the signature has {spec.shape}"
    kinds = {SOURCE, ARTIFACT, *manifest.signatures} - {DEFAULT_SIGNATURE}
    if check.outputs.keys() != kinds:
        yield f"check.outputs are those of {sorted(check.outputs)}, not of {sorted(kinds)}"
    if not check.errors.keys() <= kinds:
        yield f"check.errors are those of {sorted(check.errors)}, not of {sorted(kinds)}"
    if any(recorded.keys() != outputs.keys() for recorded in check.outputs.values()):
        yield f"check.outputs are not the signature's, {list(outputs)}"


def _is_dtype(name: str) -> bool:
    try:
        return bool(tf.as_dtype(name).name == name)
    except TypeError:
        return False


def _not_as_written(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(
        f"The manifest must be as tfopt.export wrote it. Received: {path / MARK} ({problem}). Export {path} again."
    )
