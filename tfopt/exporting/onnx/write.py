"""Writes an artifact's graph as model.onnx."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.onnx.convert import convert
from tfopt.exporting.onnx.pairs import quantize_weights
from tfopt.quantization.annotation.annotate import AnnotatedGraph

SMALLEST = 64  # values; with the node of a Cast, a smaller one takes as much space


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes model.onnx."""
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    model = convert(graph, signed=config.tensorrt)
    if isinstance(graph, AnnotatedGraph):
        quantize_weights(model, graph, biases=not config.tensorrt)
    elif lowered.precision == "float16":
        _store_in_half(model)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedModelError(
            f"The ONNX file must be valid. Received: {graph.name!r} ({error}). Write format='saved_model'."
        ) from error
    (directory / FORMATS["onnx"].file).write_bytes(model.SerializeToString(deterministic=True))


def _store_in_half(model: onnx.ModelProto) -> None:
    """Stores the weights that were rounded to float16 as such, each with a Cast behind it.

    The conversion has computed the Cast of the graph, so these are the constants that float16 holds exactly.
    """
    casts = []
    for held in model.graph.initializer:
        if held.data_type != TensorProto.FLOAT or math.prod(held.dims) < SMALLEST:
            continue
        values, name = numpy_helper.to_array(held), held.name
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values):
            held.CopyFrom(numpy_helper.from_array(half, f"{name}/half"))
            casts.append(helper.make_node("Cast", [held.name], [name], name=f"{name}/cast", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
