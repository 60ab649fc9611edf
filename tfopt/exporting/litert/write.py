"""Writes an artifact's graph as model.tflite."""

from __future__ import annotations

from pathlib import Path

import flatbuffers
from ai_edge_litert import schema_py_generated as schema

from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.litert.convert import convert
from tfopt.exporting.litert.weights import keep_float, quantize_weights, store_in_half
from tfopt.exporting.lowering import Lowered
from tfopt.quantization.annotation.annotate import AnnotatedGraph

IDENTIFIER = b"TFL3"


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes model.tflite."""
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    content = convert(graph)
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    if isinstance(graph, AnnotatedGraph):
        quantize_weights(model, graph)
        keep_float(model, graph)
    elif lowered.precision == "float16":
        store_in_half(model)
    used = {tensor.buffer for subgraph in model.subgraphs for tensor in subgraph.tensors}
    used |= {metadata.buffer for metadata in model.metadata or ()}
    for place, buffer in enumerate(model.buffers):
        if place not in used:
            buffer.data = None
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    (directory / FORMATS["litert"].file).write_bytes(builder.Output())
