"""The annotated graph for runtimes that find int8 kernels by pairs: each operand has fake quantization of its own.

TensorFlow's kernel adds a sum before it rounds, and a pooling keeps a range. Another runtime computes both as ops of
their own, and finds an int8 kernel only where each operand was quantized directly before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfopt.graph import GraphEditor
from tfopt.graph.edit import producer
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.annotate import AnnotatedGraph, add_fake_quant
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, FAKE_QUANT, before_data_movement, int8_weights
from tfopt.quantization.annotation.grids import REDUCED_BITS, Range, adds_by_channel, steps_above_zero
from tfopt.quantization.quantized_model import requantize

EXTREMES = ("Max", "Min")
MOVED = {**dict.fromkeys(DATA_MOVEMENT_OPS, slice(1)), "ConcatV2": slice(None, -1), "Pack": slice(None)}


def without_zero_points(model: QuantizedModel) -> QuantizedModel:
    """Returns the model with signed ranges only, in which zero is the byte 0, as TensorRT takes them."""
    ranges = {
        name: each if each.signed else Range(limit=max(each.limit, -each.low), signed=True)
        for name, each in model.ranges.items()
    }
    return requantize(replace(model, ranges=ranges), {skip.name: skip.reason for skip in model.report.skipped})


def with_all_pairs(model: QuantizedModel) -> AnnotatedGraph:
    """Returns the annotated graph with fake quantization wherever other runtimes need it for an int8 kernel."""
    graph = model.graph
    editor = GraphEditor(graph.graph_def)
    for fusion in graph.fusions:
        if fusion.summand is None:
            continue
        place = next(place for place, name in enumerate(fusion.nodes) if fusion.summand in editor.nodes[name].input)
        before, addition = fusion.nodes[place - 1], fusion.nodes[place]
        if before in model.ranges:
            name = add_fake_quant(editor, before, model.ranges[before])
            editor.set_inputs(addition, [name if each == before else each for each in editor.nodes[addition].input])
    for fusion in graph.fusions:
        source = producer(editor.nodes[fusion.op].input[0])
        moved = before_data_movement(editor, source)
        if source != moved and editor.nodes[moved].op == FAKE_QUANT:
            name = editor.add(FAKE_QUANT, f"{source}/fake_quant", [source], **editor.nodes[moved].attr)
            editor.set_inputs(fusion.op, [name, *editor.nodes[fusion.op].input[1:]])
    return replace(graph, graph_def=graph.edited(editor).graph_def)


def rounded_before_extremes(graph: AnnotatedGraph) -> AnnotatedGraph:
    """Returns the graph with each range of a maximum or minimum in front of it, which changes no value.

    OpenVINO computes the rounding behind a ReduceMax or ReduceMin in the kernel of that, and wrongly. It also moves a
    rounding there that stands behind a concatenation, or behind what only moves values.
    """
    editor = GraphEditor(graph.graph_def)
    for name in [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT]:
        tensor = editor.nodes[name].input[0]
        if _reads_extreme(editor, tensor, set()):
            rounded = _rounded_before(editor, tensor, editor.nodes[name].attr, {})
            editor.redirect(name, rounded, keep=graph.output_nodes)
    return replace(graph, graph_def=graph.edited(editor).graph_def)


def _reads_extreme(editor: GraphEditor, tensor: str, visited: set[str]) -> bool:
    node = editor.nodes[producer(tensor)]
    if node.name in visited:
        return False
    visited.add(node.name)
    moved = [*node.input[MOVED[node.op]]] if node.op in MOVED else []
    return node.op in EXTREMES or any(_reads_extreme(editor, each, visited) for each in moved)


def _rounded_before(editor: GraphEditor, tensor: str, quantization: Any, found: dict[str, str]) -> str:
    """Returns a tensor that is rounded before each maximum, minimum, concatenation and move of values."""
    if tensor not in found:
        node = editor.nodes[producer(tensor)]
        places = range(len(node.input))[slice(1) if node.op in EXTREMES else MOVED.get(node.op, slice(0))]
        if places:
            inputs = [
                _rounded_before(editor, each, quantization, found) if place in places else each
                for place, each in enumerate(node.input)
            ]
            found[tensor] = editor.add(node.op, f"{node.name}/of_rounded", inputs, **node.attr)
        else:
            name = f"{node.name}/rounded"
            found[tensor] = editor.add(FAKE_QUANT, name, [tensor], **quantization)
    return found[tensor]


def rounded_weights(editor: GraphEditor, tensor: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the annotated weights that an op reads as the float32 numbers that int8 holds, and their steps."""
    integers, high = int8_weights(editor, tensor)
    steps = (high / 127).astype(np.float32)
    return integers.astype(np.float32) * steps, steps


def may_saturate(graph: AnnotatedGraph) -> bool:
    """Whether int8 products of a processor without VNNI or AMX may exceed 16 bits, as tfopt's grids explain."""
    editor = GraphEditor(graph.graph_def)
    nodes = [editor.nodes[fusion.op] for fusion in graph.fusions]
    weights = ((node.op, int8_weights(editor, node.input[1])[0]) for node in nodes)
    summed = (each for op, each in weights if not adds_by_channel(op, each))
    return any(int(np.abs(each.astype(np.int16)).max(initial=0)) > steps_above_zero(REDUCED_BITS) for each in summed)
