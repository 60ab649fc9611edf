"""Writes SavedModels that need only TensorFlow. Each has its weights once, and a manifest beside it.

Each signature is a function, and a SavedModel stores the constants of every function. So the constants that several
graphs share are in one function without arguments, which all signatures call. TensorFlow inlines the calls before it
optimizes. So each graph has its constants again, and the file holds them once.

Weights that are decoded at every call are in variables instead. From constants, TensorFlow would decode them once and
keep the result.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.directories import MARK, check_target, staged_directory
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE, XLA_SIGNATURE, ExportConfig
from tfopt.exporting.lowering import Lowered, lower
from tfopt.exporting.manifest import (
    MANIFEST_FORMAT,
    MODEL_FILE,
    CheckRecord,
    Manifest,
    SignatureRecord,
    digests,
    read_manifest,
    requirements,
)
from tfopt.exporting.parity import make_check
from tfopt.graph import FrozenGraph
from tfopt.graph.edit import GraphDef, NodeDef
from tfopt.graph.frozen import free_graphs
from tfopt.quantization import QuantizedModel
from tfopt.report import PassReport, Record
from tfopt.settings.validation import check_type

PROTOBUF_LIMIT = 2**31 - 2**20
SHARED_SIZE = 1024  # bytes; smaller constants may be stored twice
# The errors of TensorFlow's file system for a full disk and for a limit on the size of files.
FILE_ERRORS = {tf.errors.ResourceExhaustedError: errno.ENOSPC, tf.errors.OutOfRangeError: errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class Artifact(Record):
    """The result of an export.

    Attributes:
        path: The artifact's directory.
        precision: The precision, as in ExportConfig.
        bytes_on_disk: The sum of the sizes of all its files.
        report: The nodes that were quantized and those that stayed float. None for float32.
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
    evaluation_data: Any = None,
    baseline: str | Path | None = None,
) -> Artifact:
    """Writes a model as a SavedModel with the signature "serving_default" and a manifest.json.

    The graph holds the weights as constants, each once, with batch normalisation folded into them. In int8, the
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
    if baseline is not None and not Path(baseline, MODEL_FILE).is_file():
        raise ConfigError(
            f"baseline must be the directory of a SavedModel. Received: {baseline}, which has no "
            f"{MODEL_FILE}. Pass the directory that tfopt.export wrote."
        )
    if baseline is not None and Path(baseline, MARK).is_file() and not read_manifest(Path(baseline)).is_float:
        raise ConfigError(
            f"baseline must be a float artifact. Received: {baseline}, whose precision is "
            f"{read_manifest(Path(baseline)).precision}. Export the model in float32 and name that artifact."
        )
    check_target(final)  # before the work, which can take long
    lowered, check = _lower_and_record(model, config, calibration_data, evaluation_data)
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    with staged_directory(final, max(each.graph_def.ByteSize() for each in lowered.graphs.values())) as temporary:
        _save(lowered, temporary)
        free_graphs(graph.graph_def)
        manifest = Manifest(
            format=MANIFEST_FORMAT,
            tfopt=version("tfopt"),
            tensorflow=tf.__version__,
            model=graph.name,
            precision=lowered.precision,
            requires=requirements(lowered.graphs, lowered.needs_vnni, lowered.compute),
            needs_vnni=lowered.needs_vnni,
            compute=lowered.compute,
            signatures=tuple(lowered.graphs),
            baseline=None if baseline is None else os.path.relpath(Path(baseline).resolve(), final),
            signature=SignatureRecord.of(graph, lowered.source),
            files=digests(temporary),
            check=check,
            report=lowered.report.to_dict() if lowered.report else None,
        )
        (temporary / MARK).write_text(json.dumps(with_checksum(manifest.to_dict())), encoding="utf-8")
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    return Artifact(path=str(directory), precision=lowered.precision, bytes_on_disk=size, report=lowered.report)


def check_export(model: Any, config: ExportConfig, calibration_data: Any) -> None:
    """Raises the errors that `tfopt.export` would raise about the model and its data, without writing anything."""
    _lower_and_record(model, config, calibration_data, None)


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
    return lowered, make_check(lowered.source, lowered.graphs, lowered.sample, lowered.held_out, lowered.compute)


def _save(lowered: Lowered, directory: Path) -> None:
    # Custom gradients, for example of swish, are for training. Those of a frozen graph cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    module, signatures = _make_signatures(lowered.graphs, in_variables=lowered.in_variables)
    try:
        tf.saved_model.save(module, str(directory), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        raise OSError(FILE_ERRORS.get(type(error), errno.EIO), error.message) from error


def _refuse_quantized(model: Any) -> None:
    if isinstance(model, (str, Path)) and (Path(model) / MARK).is_file():
        manifest = read_manifest(Path(model))
        if not manifest.is_float:
            raise ConfigError(
                f"model must be a float model, because a quantized artifact cannot be exported again. "
                f"Received: {model}, whose precision is {manifest.precision}. Export the artifact or model it came "
                "from."
            )


def _make_signatures(
    graphs: Mapping[str, FrozenGraph], *, in_variables: bool = False
) -> tuple[tf.Module, dict[str, Callable[..., Any]]]:
    """Returns the module to save, and a concrete function for each graph, by signature name.

    The graphs have the same inputs and outputs. XLA compiles the one named `XLA_SIGNATURE`. With `in_variables` the
    module holds the large constants as variables.
    """
    module = tf.Module()
    module.tables = [table.held for graph in graphs.values() for table in graph.tables.values()]
    if len(graphs) == 1 and not in_variables:
        return module, {name: graph.as_function() for name, graph in graphs.items()}
    large = {name: _large_constants(graph) for name, graph in graphs.items()}
    counts = Counter(digest for found in large.values() for digest in found)
    shared = {
        digest: node for found in large.values() for digest, node in found.items() if in_variables or counts[digest] > 1
    }
    if in_variables:
        values = [tf.make_ndarray(node.attr["value"].tensor) for node in shared.values()]
        module.stored = [tf.Variable(value, trainable=False) for value in values]
        stored = _reader_of(module.stored)
    else:
        stored = _function_of(list(shared.values()))
    return module, {
        name: _call_with(stored, graph, list(shared), name == XLA_SIGNATURE) for name, graph in graphs.items()
    }


def _large_constants(graph: FrozenGraph) -> dict[str, Any]:
    """Returns the large constants of a graph, by a digest of their type, shape and values."""
    nodes = (node for node in graph.graph_def.node if node.op == "Const")
    return {_digest(node): node for node in nodes if node.attr["value"].tensor.ByteSize() >= SHARED_SIZE}


def _digest(node: Any) -> str:
    return hashlib.sha256(node.attr["value"].SerializeToString(deterministic=True)).hexdigest()


def _reader_of(variables: list[tf.Variable]) -> Callable[[], list[tf.Tensor]]:
    return lambda: [variable.read_value() for variable in variables]


def _function_of(constants: list[Any]) -> Callable[[], list[tf.Tensor]]:
    graph_def = GraphDef()
    for number, constant in enumerate(constants):
        graph_def.node.append(constant)
        graph_def.node[-1].name = f"stored_{number}"

    def stored() -> list[tf.Tensor]:
        names = [f"{node.name}:0" for node in graph_def.node]
        return tf.graph_util.import_graph_def(graph_def, return_elements=names, name="") if names else []

    return tf.function(stored, autograph=False).get_concrete_function()


def _call_with(
    stored: Callable[[], list[tf.Tensor]], graph: FrozenGraph, shared: list[str], jit_compile: bool
) -> Callable[..., Any]:
    """Returns the graph's function. It gets the constants in `shared` from `stored`."""
    light = type(graph.graph_def)(versions=graph.graph_def.versions, library=graph.graph_def.library)
    inputs = dict(graph.inputs)
    places: dict[str, int] = {}
    for node in graph.graph_def.node:
        digest = _digest(node) if node.op == "Const" else None
        if digest in shared:
            argument = f"tfopt_stored_{len(places)}"
            places[argument] = shared.index(digest)
            dtype, value = node.attr["dtype"], node.attr["value"].tensor
            inputs[argument] = tf.TensorSpec(value.tensor_shape, dtype.type, name=node.name)
            light.node.append(NodeDef(name=node.name, op="Placeholder", attr={"dtype": dtype}))
        else:
            light.node.append(node)
    compute = replace(graph, graph_def=light, inputs=inputs).as_function()
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in graph.inputs.items()}

    def serve(**fed: tf.Tensor) -> Any:
        values = stored()
        return compute(**fed, **{name: values[place] for name, place in places.items()})

    function = tf.function(serve, autograph=False, jit_compile=jit_compile).get_concrete_function(**specs)
    if not jit_compile:
        return function
    # XLA compiles a function that another function calls. It does not compile the function of a signature itself.
    return tf.function(lambda **fed: function(**fed), autograph=False).get_concrete_function(**specs)
