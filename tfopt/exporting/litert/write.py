"""Writes an artifact's graph as model.tflite."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np

from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.gates import SIGMOID_OF_LITERT, with_rounded_gates
from tfopt.exporting.litert.convert import convert
from tfopt.exporting.litert.weights import keep_float, quantize_weights, store_in_half
from tfopt.exporting.lowering import Lowered
from tfopt.graph import FrozenGraph
from tfopt.quantization.annotation.annotate import AnnotatedGraph

IDENTIFIER = b"TFL3"


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes model.tflite."""
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    if isinstance(graph, AnnotatedGraph):
        graph = with_rounded_gates(graph, SIGMOID_OF_LITERT)
    model = convert(graph, lowered.source, directory)
    _order(model, graph)
    if isinstance(graph, AnnotatedGraph):
        keep_float(model, graph, quantize_weights(model, graph))
    elif lowered.precision == "float16":
        store_in_half(model)
    _share_buffers(model)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    (directory / FORMATS["litert"].file).write_bytes(builder.Output())


def _order(model: Any, graph: FrozenGraph) -> None:
    """Gives the inputs and outputs of the file the model's order: callers of LiteRT often know them by place."""
    (signature,) = model.signatureDefs
    main = model.subgraphs[signature.subgraphIndex]
    for kind, names in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        named = {each.name.decode(): each for each in getattr(signature, kind)}
        own = [named[name] for name in names if name in named]
        places = [int(each.tensorIndex) for each in own]
        if sorted(places) == sorted(map(int, getattr(main, kind))):
            setattr(signature, kind, own)
            setattr(main, kind, np.array(places, np.int32))


def _share_buffers(model: Any) -> None:
    """Stores equal values once, and none that no operator reads."""
    first: dict[bytes, int] = {}
    used = {metadata.buffer for metadata in model.metadata or ()}
    for subgraph in model.subgraphs:
        parts = [part for each in subgraph.operators for part in (each.inputs, each.outputs) if part is not None]
        read = {int(place) for part in (*parts, subgraph.inputs, subgraph.outputs) for place in part}
        for place, tensor in enumerate(subgraph.tensors):
            data = model.buffers[tensor.buffer].data
            if place not in read:
                tensor.buffer = 0
            elif data is not None:
                tensor.buffer = first.setdefault(hashlib.sha256(bytes(data)).digest(), tensor.buffer)
            used.add(tensor.buffer)
    for place, buffer in enumerate(model.buffers):
        if place not in used:
            buffer.data = None
