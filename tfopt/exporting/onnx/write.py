"""Writes an artifact's graph as model.onnx."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.gates import with_float_arguments, with_rounded_gates
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.onnx.convert import convert
from tfopt.exporting.onnx.pairs import (
    change_steps_of_one,
    close_pairs,
    own_zero_points,
    quantize_weights,
)
from tfopt.exporting.onnx.resizes import with_tiles
from tfopt.exporting.paired import rounded_before_extremes
from tfopt.graph import fold_constants
from tfopt.quantization.annotation.annotate import AnnotatedGraph

SMALLEST = 64  # values; with the node that decodes it, a smaller one takes as much space


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes model.onnx."""
    content = onnx_model(lowered, config).SerializeToString(deterministic=True)
    (directory / FORMATS["onnx"].file).write_bytes(content)


def onnx_model(lowered: Lowered, config: ExportConfig) -> onnx.ModelProto:
    """Returns an artifact's graph as a valid ONNX model, with its weights in the precision of the config."""
    graph, encode = lowered.graphs[DEFAULT_SIGNATURE], ENCODERS.get(lowered.precision)
    if isinstance(graph, AnnotatedGraph) and config.format == "openvino":
        graph = with_float_arguments(rounded_before_extremes(graph))
    elif isinstance(graph, AnnotatedGraph) and not config.tensorrt:
        graph = with_tiles(with_rounded_gates(graph))
    # Of stored weights, this computes what decodes them, and what is left of it is decoded constants.
    model = convert(fold_constants(graph) if encode else graph, signed=config.tensorrt)
    if isinstance(graph, AnnotatedGraph):
        quantize_weights(model, graph, biases=config.format == "onnx" and not config.tensorrt)
        if config.format == "openvino":
            close_pairs(model)
            change_steps_of_one(model)
        own_zero_points(model)
    elif encode:
        _store(model, encode)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedModelError(
            f"The ONNX file must be valid. Received: {graph.name!r} ({error}). Write format='saved_model'."
        ) from error
    return model


def _store(model: onnx.ModelProto, encode: Encoder) -> None:
    """Stores the weights that were rounded to fewer bits as such, each with the nodes behind it that decode it.

    These are the constants that fewer bits hold exactly. They are decoded by Cast and Mul, which runtimes compute once.
    DequantizeLinear would make ONNX Runtime round the activations to 8 bits too.
    """
    decoders = []
    for held in list(model.graph.initializer):
        if held.data_type != TensorProto.FLOAT or math.prod(held.dims) < SMALLEST:
            continue
        name, encoded = held.name, encode(numpy_helper.to_array(held))
        if encoded is None:
            continue
        stored, steps = encoded
        held.CopyFrom(numpy_helper.from_array(stored, f"{name}/stored"))
        result = name if steps is None else f"{name}/cast"
        decoders.append(helper.make_node("Cast", [held.name], [result], name=f"{name}/cast", to=TensorProto.FLOAT))
        if steps is not None:
            model.graph.initializer.append(numpy_helper.from_array(steps, f"{name}/steps"))
            decoders.append(helper.make_node("Mul", [result, f"{name}/steps"], [name], name=f"{name}/scaled"))
    nodes = [*decoders, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _halves(values: np.ndarray) -> tuple[np.ndarray, None] | None:
    """Returns values in float16 if that is exact."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return (half, None) if np.array_equal(half.astype(np.float32), values) else None


def _integers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns int8 integers and float32 steps whose products are exactly these values, if there are such.

    A step belongs to a place of one axis, the output channels, or to a place of all axes but one, as in a transposed
    convolution.
    """
    axes = set(range(values.ndim))
    for shared in (*(axes - {axis} for axis in axes), *({axis} for axis in axes)):
        largest = np.abs(values).max(axis=tuple(shared), keepdims=True)
        if 2 * largest.size > values.size:
            continue  # the steps would take more than they save
        nearest = np.where(largest == 0, 1, largest / 127).astype(np.float32)
        with np.errstate(invalid="ignore"):  # infinity, which masks have
            integers = np.rint(values / nearest)
        # The largest value was rounded when it was multiplied, so the step may be a neighbour of its quotient.
        steps = nearest
        for tried in (np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))):
            exact = (integers * tried == values).all(axis=tuple(shared), keepdims=True)
            steps = np.where(exact, tried, steps)
        if np.array_equal(integers * steps, values):
            return integers.astype(np.int8), steps
    return None


Encoder = Callable[[np.ndarray], "tuple[np.ndarray, np.ndarray | None] | None"]
ENCODERS: dict[str, Encoder] = {"float16": _halves, "int8_weight_only": _integers}
