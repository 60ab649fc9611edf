"""Writes artifacts: a model in one of the file formats, with a manifest beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.directories import MARK, check_target, staged_directory
from tfopt.atomic.scratch import scratch_directory
from tfopt.errors import ConfigError, TfoptError, UnsupportedModelError, warn
from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig, Format, Formats
from tfopt.exporting.formats import FORMATS, SAVED_MODEL, has_model
from tfopt.exporting.lowering import Lowered, lower
from tfopt.exporting.manifest import (
    MANIFEST_FORMAT,
    CheckRecord,
    Manifest,
    OutputRecord,
    SignatureRecord,
    digests,
    read_manifest,
    requirements,
)
from tfopt.exporting.parity import make_check
from tfopt.exporting.processing.answers import CLASSES, SCORES, with_best_classes
from tfopt.exporting.processing.config import PostprocessingConfig
from tfopt.exporting.verification.threads import measure_threads
from tfopt.exporting.verification.written import check_written
from tfopt.graph.frozen import free_graphs
from tfopt.quantization import QuantizedModel, quantize
from tfopt.quantization.keras_methods import KerasQuantized
from tfopt.report import PassReport, Record, ServingTimes
from tfopt.settings.validation import check_type, check_value
from tfopt.signals import CTRL_C, raised_safely

SECONDS = 0.3  # of each number of threads in one round
PROTOBUF_LIMIT = 2**31 - 2**20


@dataclass(frozen=True, kw_only=True)
class Artifact(Record):
    """The result of an export.

    Attributes:
        path: The artifact's directory.
        precision: The precision, as in ExportConfig.
        bytes_on_disk: The sum of the sizes of all its files.
        report: The nodes that were quantized and those that stayed float. None for float32.
        compute: The type of the products that are not in int8, as in ExportConfig; never "auto".
    """

    path: str
    precision: str
    bytes_on_disk: int
    report: PassReport | None = None
    compute: str = "float32"

    @property
    def computes(self) -> str:
        """The precision in words. Where products compute in a half type, it comes first."""
        if self.compute == "float32":
            return self.precision
        stored = "" if self.precision in ("float32", self.compute) else f", weights in {self.precision}"
        return self.compute + stored


@raised_safely(CTRL_C)
def export(
    model: keras.Model | QuantizedModel | str | Path,
    directory: str | Path,
    config: ExportConfig | None = None,
    *,
    calibration_data: Any = None,
    evaluation_data: Any = None,
    baseline: str | Path | None = None,
) -> Artifact:
    """Writes a model as a SavedModel with the signature "serving_default" and a manifest.json.

    The file holds each weight once, with batch normalisation folded into it. In int8, the
    convolutions and matrix products run TensorFlow's own int8 kernels (oneDNN, x86-64). Nodes that cannot be lowered
    stay float, and the report lists them. In the other precisions only the weights are stored in fewer bits. The file
    is then smaller, runs on every processor, and is as fast as float32. The products compute in float32, unless
    `compute` names a half type. The directory appears complete or not at all. An earlier artifact is replaced.

    Args:
        model: A built Keras model, the result of `tfopt.quantize`, a .keras file or a SavedModel directory.
        directory: Where the artifact goes.
        config: The settings. None means ExportConfig(), which is float32.
        calibration_data: For int8: batches of inputs, or of (inputs, labels). For other precisions it is optional, and
            the manifest's check uses its first batch.
        evaluation_data: Examples that are not calibrated on, as in `tfopt.quantize`. The error against the float model
            is recorded on some of them. By default these are examples of the calibration data behind the first
            calibration_examples.
        baseline: A float artifact. `tfopt.verify` compares this artifact with it by default.
    Raises:
        UnsupportedModelError: The model is not built, would touch files, the network or Python when it runs, or exceeds
            2 GiB, the limit of a protobuf.
        ConfigError: int8 has no usable calibration data, or the data do not fit the model, or they hold NaN. Or the
            model overflows in float16; the message names the node.
        ExportError: The directory cannot be written, holds other files, or is inside another artifact.
    Warns:
        TfoptWarning: The model calls layers with training=True, or is an artifact whose weights are rounded already.
    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> artifact = export(model, tempfile.mkdtemp() + "/tiny")
        >>> artifact.precision
        'float32'
    """
    config = ExportConfig() if config is None else config
    check_type("config", config, ExportConfig)
    final = Path(directory).resolve()
    _refuse_quantized(model)
    if baseline is not None and Path(baseline).resolve() == final:
        raise ConfigError(
            f"baseline must be an artifact that the export leaves in place. Received: {str(baseline)!r}, which is "
            "the directory to write. Name another directory, or leave baseline out."
        )
    if baseline is not None and not has_model(Path(baseline)):
        raise ConfigError(
            f"baseline must be the directory of an artifact. Received: {baseline}, which has no "
            f"{' or '.join(each.file for each in FORMATS.values())}. Pass the directory that tfopt.export wrote."
        )
    if baseline is not None and Path(baseline, MARK).is_file() and not read_manifest(Path(baseline)).is_float:
        raise ConfigError(
            f"baseline must be a float artifact. Received: {baseline}, whose precision is "
            f"{read_manifest(Path(baseline)).precision}. Export the model in float32 and name that artifact."
        )
    check_target(final)  # before the work, which can take long
    FORMATS[config.format].import_packages()
    lowered, check = _lower_and_record(model, config, calibration_data, evaluation_data)
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    with staged_directory(final, max(each.graph_def.ByteSize() for each in lowered.graphs.values())) as temporary:
        check = _write(lowered, temporary, check, config)
        free_graphs(graph.graph_def)
        record = SignatureRecord.of(graph, lowered.source)
        manifest = Manifest(
            format=MANIFEST_FORMAT,
            tfopt=version("tfopt"),
            tensorflow=tf.__version__,
            model=graph.name,
            precision=lowered.precision,
            requires=requirements(lowered.graphs, lowered.needs_vnni, lowered.compute, config.format),
            needs_vnni=lowered.needs_vnni,
            compute=lowered.compute,
            model_format=config.format,
            signatures=tuple(lowered.graphs),
            baseline=None if baseline is None else os.path.relpath(Path(baseline).resolve(), final),
            signature=record,
            files=digests(temporary),
            check=check,
            report=lowered.report.to_dict() if lowered.report else None,
            serving=_serving_times(temporary, record, check, config) if config.threads else None,
        )
        (temporary / MARK).write_text(json.dumps(with_checksum(manifest.to_dict())), encoding="utf-8")
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    return Artifact(
        path=str(directory),
        precision=lowered.precision,
        bytes_on_disk=size,
        report=lowered.report,
        compute=lowered.compute,
    )


@raised_safely(CTRL_C)
def export_formats(
    model: keras.Model | QuantizedModel | str | Path,
    directory: str | Path,
    formats: Sequence[Format],
    config: ExportConfig | None = None,
    *,
    calibration_data: Any = None,
    evaluation_data: Any = None,
    baseline: str | Path | None = None,
) -> dict[str, Artifact]:
    """Writes a model in several file formats, each as an artifact in a directory of the format's name.

    An int8 model is calibrated once, so all formats have the same ranges.

    Args:
        model, calibration_data, evaluation_data, baseline: As in `export`.
        directory: Where the directories of the artifacts go.
        formats: The formats, for example ("saved_model", "onnx").
        config: The settings. Those that belong to one format are left out for the others.
    Returns: The artifacts by format.
    Raises:
        ConfigError: A format does not exist, or cannot hold the precision. This is known before the work.
        UnsupportedModelError, ExportError: As in `export`. Artifacts of earlier formats stay.
    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> found = export_formats(model, tempfile.mkdtemp(), ["saved_model", "onnx"])
        >>> {name: Path(artifact.path).name for name, artifact in found.items()}
        {'saved_model': 'saved_model', 'onnx': 'onnx'}
    """
    config = ExportConfig() if config is None else config
    check_type("config", config, ExportConfig)
    if isinstance(formats, str):
        raise ConfigError(f"formats must be a list of formats. Received: formats={formats!r}. Pass [{formats!r}].")
    for name in formats:
        check_value("format", name, Format)
    configs = {name: config.of_format(name) for name in check_value("formats", tuple(formats), Formats)}
    for name in configs:
        FORMATS[name].import_packages()
        target = Path(directory, name).resolve()
        check_target(target)
        if isinstance(model, (str, Path)) and Path(model).resolve() == target:
            raise ConfigError(
                f"directory must not hold the model that is exported. Received: {str(model)!r}, which format {name!r} "
                "would replace. Choose another directory."
            )
    for key, value in (("calibration_data", calibration_data), ("evaluation_data", evaluation_data)):
        if isinstance(value, Iterator):
            raise ConfigError(
                f"{key} is read for each format. Received: an iterator, which is used up after the first one. Pass an "
                "array, a list of batches or a tf.data.Dataset."
            )
    if config.precision == "int8" and not isinstance(model, (QuantizedModel, KerasQuantized)):
        _refuse_quantized(model)
        quantized = quantize(
            model,
            config.quantization,
            calibration_data=calibration_data,
            evaluation_data=evaluation_data,
            trusted=config.trusted,
        )
        # Of a tf_keras model without data it is one to train: the export says what is missing.
        model = quantized if isinstance(quantized, QuantizedModel) else model
    data = {"calibration_data": calibration_data, "evaluation_data": evaluation_data, "baseline": baseline}
    return {name: export(model, Path(directory, name), each, **data) for name, each in configs.items()}


def check_export(model: Any, config: ExportConfig, calibration_data: Any) -> None:
    """Raises the errors that `tfopt.export` would raise about an untrained model and its data, and leaves no file.

    Where the values of a deep model fade before it is trained, 8 bits of another runtime hold none of them. So int8
    files must run; the values are compared in the float precisions.
    """
    FORMATS[config.format].import_packages()
    lowered, check = _lower_and_record(model, config, calibration_data, None)
    if config.format != SAVED_MODEL:  # the conversion may know no equivalent of an op
        with scratch_directory() as directory:
            _write(lowered, directory, check, config, values=config.precision != "int8")


def _lower_and_record(
    model: Any, config: ExportConfig, calibration_data: Any, evaluation_data: Any
) -> tuple[Lowered, CheckRecord]:
    """Returns what is to be written, and the manifest's record of its outputs."""
    lowered = lower(model, config, calibration_data, evaluation_data)
    for graph in lowered.graphs.values():
        if graph.graph_def.ByteSize() > PROTOBUF_LIMIT:
            raise UnsupportedModelError(
                f"The graph with its weights must be smaller than 2 GiB, the limit of a SavedModel's file. Received: "
                f"{graph.name!r} with {graph.graph_def.ByteSize():,} bytes. Export it, or its weights only, in int8."
            )
    check = make_check(lowered.source, lowered.graphs, lowered.sample, lowered.held_out, lowered.compute)
    return _with_best_classes(lowered, check, config.postprocessing)


def _with_best_classes(
    lowered: Lowered, check: CheckRecord, config: PostprocessingConfig | None
) -> tuple[Lowered, CheckRecord]:
    """Adds the best classes to what the artifact gives. Its check holds the output that they are chosen from."""
    if config is None or config.top_k is None:
        return lowered, check
    name = config.output or next(iter(lowered.source.outputs))
    graphs = {key: with_best_classes(graph, name, config) for key, graph in lowered.graphs.items()}
    unchecked = dict.fromkeys((CLASSES, SCORES), OutputRecord(values=()))
    outputs = {kind: {**recorded, **unchecked} for kind, recorded in check.outputs.items()}
    return replace(lowered, graphs=graphs), replace(check, outputs=outputs)


def _write(
    lowered: Lowered, directory: Path, check: CheckRecord, config: ExportConfig, *, values: bool = True
) -> CheckRecord:
    """Writes the model, and returns the check with the errors of what was written."""
    file_format = FORMATS[config.format]
    file_format.write(lowered, directory, config)
    if file_format.name == SAVED_MODEL:
        return check
    return check_written(directory, lowered, check, file_format, values=values)


def _serving_times(
    directory: Path, signature: SignatureRecord, check: CheckRecord, config: ExportConfig
) -> ServingTimes | None:
    try:
        found, reason = measure_threads(
            directory, signature, check, config.threads, config.batch_sizes, seconds=SECONDS, trusted=config.trusted
        )
    except TfoptError as error:  # the artifact itself is whole
        found, reason = None, str(error)
    if found is None:
        warn(f"threads: the artifact is written without times by threads: {reason}.")
    return found


def _refuse_quantized(model: Any) -> None:
    if isinstance(model, (str, Path)) and (Path(model) / MARK).is_file():
        manifest = read_manifest(Path(model))
        if not manifest.is_float:
            raise ConfigError(
                f"model must be a float model, because a quantized artifact cannot be exported again. "
                f"Received: {model}, whose precision is {manifest.precision}. Export the artifact or model it came "
                "from."
            )
        if manifest.compute != "float32":
            warn(
                f"{model} computes in {manifest.compute}, so its weights are rounded to it already, and the new "
                "artifact has these. Export the model that it came from."
            )
