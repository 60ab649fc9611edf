"""Puts artifacts into a model repository, from which servers load them.

    REPOSITORY/
        NAME/
            config.pbtxt    for Triton; it is about all versions
            1/              the files of an artifact, and its manifest
            2/

TensorFlow Serving, OpenVINO Model Server and Triton all read numbered directories, and take the largest number by
default. A version is an artifact itself: its manifest lists what was added for a server, and `tfopt.verify` measures
it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.directories import MARK, check_target, exclusive, staged_directory
from tfopt.errors import ConfigError
from tfopt.exporting.formats import FORMATS, SAVED_MODEL
from tfopt.exporting.manifest import (
    MANIFEST_FORMAT,
    Manifest,
    SignatureRecord,
    digests,
    read_intact_manifest,
    read_manifest,
)
from tfopt.exporting.publishing import tensorflow_serving, triton
from tfopt.exporting.serving_settings import TUNE_HERE, many_requests
from tfopt.report import Change, ManyRequests, PassReport, Record, Skip
from tfopt.report.formatting import short_bytes
from tfopt.report.serving import flags
from tfopt.settings.validation import check_value

NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # safe in a path, in a URL, and in the files of all servers
VERSIONS = re.compile("[1-9][0-9]*")
LARGEST = 2**63 - 1  # servers hold a version in 64 bits
Version = Annotated[int, Ge(1), Le(LARGEST)]
BatchSizes = Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)]
WARMED = (1, 8)  # examples in the requests that warm a model up


@dataclass(frozen=True, kw_only=True)
class PublishedVersion(Record):
    """A version of a served model.

    Attributes:
        path: Its directory, REPOSITORY/NAME/VERSION.
        name: The name by which clients call the model.
        version: Its number.
        report: The files that were written for servers, and those that were left out with the reason.
    """

    path: str
    name: str
    version: int
    report: PassReport


def publish(
    artifact: str | Path,
    directory: str | Path,
    *,
    name: str | None = None,
    version: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    warm_up: bool = True,
    any_machine: bool = False,
) -> PublishedVersion:
    """Copies an artifact into a model repository, as a new version of a served model.

    The version appears complete or not at all, and an earlier version is never changed, so servers may watch the
    repository. A SavedModel is for TensorFlow Serving, an ONNX file for OpenVINO Model Server and Triton. Beside the
    model this writes:

    - for TensorFlow Serving, requests that warm the model up: the server calls them before it serves a version
    - for Triton, config.pbtxt with the inputs and outputs, joined requests, and calls that warm the model up. If there
      is one already, it stays as it is
    - settings of threads and batches, if `tfopt.tune_serving` has measured them on this machine, or the export
      (`ExportConfig.threads`)

    Nothing of the model runs.

    Args:
        artifact: A directory that `tfopt.export` wrote, or a version in another repository.
        directory: The repository. It is made if needed.
        name: The name of the served model. None means the name of the artifact's directory, or of the version's model.
        version: Its number. None means the next one after the largest number.
        batch_sizes: Examples in the requests that warm the model up. None means 1, 8 and the batch that was measured to
            be best. The largest is the most that Triton joins, or a larger one that was measured to be best. A model
            with a fixed batch size has only that.
        warm_up: Whether to write requests that warm the model up.
        any_machine: Whether to use what `tfopt.tune_serving` measured on another machine than this one: for a
            repository of servers that are like that machine.
    Returns: The version, with a report of what was written and left out.
    Raises:
        ArtifactError: The artifact is incomplete, or has changed since it was written.
        ConfigError: There is such a version already, earlier versions take other inputs or give other outputs, or the
            name is not one. Or a SavedModel is to be warmed up and the package tensorflow-serving-api is missing.
        ExportError: The repository cannot be written, or is inside an artifact.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.export import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> folder = tempfile.mkdtemp()
        >>> published = publish(export(model, folder + "/tiny").path, folder + "/repository")
        >>> published.name, published.version
        ('tiny', 1)
    """
    source, repository = Path(artifact), Path(directory)
    sizes = check_value("batch_sizes", WARMED if batch_sizes is None else batch_sizes, BatchSizes)
    check_value("version", version, Version | None)
    manifest = read_intact_manifest(source)
    name = _name_of(source.resolve()) if name is None else name
    if not (isinstance(name, str) and NAMES.fullmatch(name)):
        raise ConfigError(
            "name must be made of letters, digits, and _ . - in between, as it is part of paths and URLs. Received: "
            f"name={name!r}. Pass another name."
        )
    if manifest.model_format == SAVED_MODEL and warm_up:
        tensorflow_serving.check_package()
    best, unused = many_requests(manifest, any_machine=any_machine)
    if batch_sizes is None and best is not None and best.batches_pay:
        sizes = (*WARMED, best.batch_size)  # the batches that the server will make
    model = repository.resolve() / name
    check_target(model / "0")  # before anything is made; no version has this number
    with exclusive(model):
        number = _free_number(model, version)
        _check_interface(model, manifest)
        final = model / str(number)
        notes: list[Change | Skip] = [
            Change(name=f"{name}/{number}", kind=FORMATS[manifest.model_format].what, detail=_size(manifest))
        ]
        with staged_directory(final, sum(each.bytes for each in manifest.files.values()), replace=False) as new:
            for file in manifest.files.keys() - tensorflow_serving.FILES:
                (new / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file, new / file)
            if manifest.model_format == SAVED_MODEL:
                notes += tensorflow_serving.write(new, name, manifest, sizes if warm_up else (), best)
            baseline = _baseline_from(source, manifest, final)
            # What was read is in the present format, whatever it was written in.
            copied = replace(manifest, format=MANIFEST_FORMAT, files=digests(new), baseline=baseline)
            (new / MARK).write_text(json.dumps(with_checksum(copied.to_dict())), encoding="utf-8")
            notes += triton.write(model, manifest, sizes, warm_up=warm_up, best=best)
    if unused:
        remedy = f"{TUNE_HERE}, or publish for such servers with any_machine=True (--any-machine)"
        notes.append(Skip(name="settings of tfopt tune", kind="all servers", reason=f"{unused}; {remedy}"))
    report = PassReport(
        name="publish",
        changed=[each for each in notes if isinstance(each, Change)],
        skipped=[each for each in notes if isinstance(each, Skip)],
        notes=_flags(manifest, best),
    )
    return PublishedVersion(path=str(repository / name / str(number)), name=name, version=number, report=report)


def _flags(manifest: Manifest, best: ManyRequests | None) -> list[Change]:
    """Returns the flags that no file of a version holds, where they were measured."""
    if best is None or manifest.model_format != SAVED_MODEL:
        return []
    return [Change(name="flags", kind="TensorFlow Serving", detail=flags(SAVED_MODEL, best))]


def _name_of(artifact: Path) -> str:
    return artifact.parent.name if VERSIONS.fullmatch(artifact.name) else artifact.name


def _free_number(model: Path, wanted: int | None) -> int:
    """Returns the wanted number, or the one after the largest. Raises ConfigError if the version exists."""
    taken = _versions(model)
    if wanted is not None and wanted in taken:
        raise ConfigError(
            f"version must be new, since servers may have loaded the earlier one. Received: version={wanted}, and "
            f"{taken[wanted]} exists. Leave version out for {max(taken) + 1}."
        )
    return wanted or check_value("version", max(taken, default=0) + 1, Version)


def _versions(model: Path) -> dict[int, Path]:
    """Returns the directories of versions by number. Servers read a name with leading zeros, as 00000123, too."""
    numbered = {int(each.name): each for each in model.iterdir() if re.fullmatch("[0-9]+", each.name)}
    return {number: each for number, each in numbered.items() if 0 < number <= LARGEST}


def _check_interface(model: Path, manifest: Manifest) -> None:
    """Raises ConfigError unless the largest version that tfopt wrote has the same format, inputs and outputs."""
    written = {number: each for number, each in _versions(model).items() if (each / MARK).is_file()}
    if not written:
        return
    earlier = written[max(written)]
    other = read_manifest(earlier)
    if other.model_format == manifest.model_format and _alike(other.signature, manifest.signature):
        return
    received, wanted = (f"{each.model_format}, {_interface(each.signature)}" for each in (manifest, other))
    raise ConfigError(
        "All versions of a served model must be in one format, and take and give the same tensors, because clients do "
        f"not choose the version. Received: {received}; {earlier} is {wanted}. Pass another name."
    )


def _alike(one: SignatureRecord, other: SignatureRecord) -> bool:
    # Clients send what the earlier version took. Of outputs, one version may know more sizes.
    same = one.inputs == other.inputs and one.outputs.keys() == other.outputs.keys()
    return same and all(spec.fits(other.outputs[name]) for name, spec in one.outputs.items())


def _interface(signature: SignatureRecord) -> str:
    taken, given = (
        ", ".join(f"{name} {spec}" for name, spec in specs.items()) for specs in (signature.inputs, signature.outputs)
    )
    return f"{taken} -> {given}"


def _baseline_from(source: Path, manifest: Manifest, final: Path) -> str | None:
    """Returns the path from the new place to the float baseline, which the manifest names from the artifact's."""
    if manifest.baseline is None:
        return None
    return os.path.relpath((source.resolve() / manifest.baseline).resolve(), final)


def _size(manifest: Manifest) -> str:
    files = manifest.files.values()
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {short_bytes(sum(each.bytes for each in files))}"
