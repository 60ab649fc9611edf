"""Writes an artifact's graph as model.onnx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.manifest import MODEL_FILES
from tfopt.exporting.onnx.convert import convert
from tfopt.exporting.onnx.pairs import quantize_weights
from tfopt.quantization.annotation.annotate import AnnotatedGraph

HALF_SIZE = 1024  # values; smaller weights stay as they are


def write_onnx(lowered: Lowered, directory: Path, *, tensorrt: bool = False) -> None:
    """Writes model.onnx. Arguments are those of `tfopt.export`, lowered."""
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    model = convert(graph, signed=tensorrt)
    if isinstance(graph, AnnotatedGraph):
        quantize_weights(model, graph, biases=not tensorrt)
    elif lowered.precision == "float16":
        _store_in_half(model)
    onnx.checker.check_model(model, full_check=True)
    (directory / MODEL_FILES["onnx"]).write_bytes(model.SerializeToString(deterministic=True))


def _store_in_half(model: onnx.ModelProto) -> None:
    """Stores large weights in float16, each with a Cast behind it."""
    casts = []
    for held in model.graph.initializer:
        if held.data_type == TensorProto.FLOAT and int(np.prod(held.dims)) >= HALF_SIZE:
            name = held.name
            held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held).astype(np.float16), f"{name}/half"))
            casts.append(helper.make_node("Cast", [held.name], [name], name=f"{name}/cast", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
