"""Writes SavedModels that need nothing but TensorFlow, each weight once, with a manifest beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.data.batches import iterate_batches, peek
from tfopt.errors import UnsupportedModelError
from tfopt.exporting.atomic import MARK, check_target, staged_directory
from tfopt.exporting.config import ExportConfig
from tfopt.exporting.int8 import lower_to_int8
from tfopt.graph import FrozenGraph, freeze
from tfopt.quantization import QuantizedModel, quantize
from tfopt.report import PassReport, Record

MANIFEST_FORMAT = 1
PROTOBUF_LIMIT = 2**31 - 2**20
CHECKED_EXAMPLES = 2
CHECKED_VALUES = 64
OPEN_SIZE = 64  # of an axis that the model leaves open and no example shows


@dataclass(frozen=True, kw_only=True)
class Artifact(Record):
    """What an export wrote.

    Attributes:
        path: The artifact's directory.
        precision: "float32" or "int8".
        bytes_on_disk: Sum of the sizes of all its files.
        report: What was quantized and what was left float; None for float32.
    """

    path: str
    precision: str
    bytes_on_disk: int
    report: PassReport | None = None


def export(
    model: keras.Model | QuantizedModel | str | Path,
    directory: str | Path,
    config: ExportConfig | None = None,
    *,
    calibration_data: Any = None,
    baseline: str | Path | None = None,
) -> Artifact:
    """Writes a model as a SavedModel with the signature "serving_default" and a manifest.json.

    The graph holds the weights as constants, each once, with batch normalisation folded into them. In int8, the
    convolutions and matrix products run TensorFlow's own int8 kernels (oneDNN, x86-64); what cannot be lowered stays
    float and is listed in the report. The directory appears whole or not at all; an earlier artifact is replaced.

    Args:
        model: A built Keras model, what `tfopt.quantize` returned, or a SavedModel directory.
        directory: Where the artifact goes.
        config: The settings; None means ExportConfig(), float32.
        calibration_data: For int8: batches of inputs, or of (inputs, labels). For float32 optional.
        baseline: A float artifact that `tfopt.verify` compares this one with by default.
    Raises:
        UnsupportedModelError: The model is not built, keeps look-up tables, or exceeds the 2 GiB of a protobuf.
        ConfigError: int8 without usable calibration data.
        ExportError: The directory cannot be written or holds something else.
    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> artifact = export(model, tempfile.mkdtemp() + "/tiny")
        >>> artifact.precision
        'float32'
    """
    config = config or ExportConfig()
    final = Path(directory).resolve()
    check_target(final)  # before the work, which can take long
    sample, calibration_data = peek(calibration_data)
    if config.precision == "int8" and not isinstance(model, QuantizedModel):
        model = quantize(model, config.quantization, calibration_data=calibration_data)
    if isinstance(model, QuantizedModel):
        precision, report = "int8", model.report
        source, graph = model.float_graph, lower_to_int8(model.graph)
    else:
        precision, report = "float32", None
        source, graph = freeze(model, fold=False), freeze(model)
    if graph.graph_def.ByteSize() > PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"The graph with its weights must be smaller than 2 GiB, the limit of a SavedModel's file. "
            f"Received: {graph.name!r} with {graph.graph_def.ByteSize():,} bytes. Export it in int8."
        )
    check = _check(source, graph, sample)
    with staged_directory(final) as temporary:
        tf.saved_model.save(tf.Module(), str(temporary), signatures=graph.as_function())
        manifest = {
            "format": MANIFEST_FORMAT,
            "tfopt": version("tfopt"),
            "tensorflow": tf.__version__,
            "model": graph.name,
            "precision": precision,
            "requires": _requirements(precision),
            "baseline": None if baseline is None else os.path.relpath(Path(baseline).resolve(), final),
            "signature": {
                "inputs": {name: _describe(spec) for name, spec in graph.inputs.items()},
                "outputs": {name: _describe(spec) for name, (_, spec) in graph.outputs.items()},
            },
            "files": _digests(temporary),
            "check": check,
            "report": report.to_dict() if report else None,
        }
        (temporary / MARK).write_text(json.dumps(manifest), encoding="utf-8")
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    return Artifact(path=str(directory), precision=precision, bytes_on_disk=size, report=report)


def _requirements(precision: str) -> str:
    if precision == "int8":
        return "TensorFlow on x86-64 with oneDNN (its default there); int8 instructions (VNNI, AMX) for speed"
    return "TensorFlow"


def _describe(spec: tf.TensorSpec) -> dict[str, Any]:
    return {"shape": spec.shape.as_list() if spec.shape.rank is not None else None, "dtype": spec.dtype.name}


def _digests(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_inputs(inputs: Mapping[str, Mapping[str, Any]], check: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the inputs of the check, the same in every process: seeded, uniform over the range of real inputs."""
    generator = np.random.default_rng(0)
    values = {}
    for name, spec in inputs.items():
        low, high = check["ranges"][name]
        values[name] = generator.uniform(low, high, check["shapes"][name]).astype(np.dtype(spec["dtype"]))
    return values


def _check(source: FrozenGraph, graph: FrozenGraph, data: Any) -> dict[str, Any]:
    """Records what the source and the artifact's graph give on the same inputs, for verify to compare with."""
    specs = {name: _describe(spec) for name, spec in graph.inputs.items()}
    check = {
        "ranges": {name: [0.0, 1.0] for name in specs},
        "shapes": {name: [size or OPEN_SIZE for size in (spec["shape"] or [None])] for name, spec in specs.items()},
    }
    batch = None if data is None else next(iterate_batches(data, inputs=len(specs)), None)
    if batch is not None:
        fed = {name: value.numpy() for name, value in graph.feed(batch[0]).items()}
        check["ranges"] = {name: [float(value.min()), float(value.max())] for name, value in fed.items()}
        check["shapes"] = {name: list(value.shape) for name, value in fed.items()}
    for name, shape in check["shapes"].items():
        shape[:1] = [(specs[name]["shape"] or [None])[0] or CHECKED_EXAMPLES]
    inputs = check_inputs(specs, check)
    try:
        outputs = {"source": source.predict(inputs), "artifact": graph.predict(inputs)}
    except tf.errors.OpError as error:
        raise UnsupportedModelError(
            f"The model must run on inputs of the shapes {check['shapes']}. Received: {graph.name!r}, which fails "
            f"({str(error).splitlines()[0]}). Pass calibration_data with examples of a size that it takes."
        ) from error
    return check | {kind: {name: _sample(value) for name, value in values.items()} for kind, values in outputs.items()}


def _sample(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values.reshape(-1)[:CHECKED_VALUES].astype(np.float64)]
