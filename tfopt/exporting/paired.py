"""The annotated graph for runtimes that find int8 kernels by pairs: each operand has fake quantization of its own.

TensorFlow's kernel adds a sum before it rounds, and a pooling keeps a range. Another runtime computes both as ops of
their own, and finds an int8 kernel only where each operand was quantized directly before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tfopt.graph import GraphEditor
from tfopt.graph.edit import producer
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.annotate import AnnotatedGraph, add_fake_quant
from tfopt.quantization.annotation.fusion import FAKE_QUANT, before_data_movement, int8_weights
from tfopt.quantization.annotation.grids import REDUCED_BITS, Range, adds_by_channel, steps_above_zero
from tfopt.quantization.quantized_model import requantize


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


def rounded_before_maximum(graph: AnnotatedGraph) -> AnnotatedGraph:
    """Returns the graph with each range of a maximum in front of it too, which changes no value.

    OpenVINO computes the rounding behind a ReduceMax in the kernel of that, and wrongly.
    """
    editor = GraphEditor(graph.graph_def)
    for name in [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT]:
        node = editor.nodes[name]
        reduced = editor.nodes[producer(node.input[0])]
        if reduced.op == "Max":
            rounded = editor.add(FAKE_QUANT, f"{reduced.name}/rounded", [reduced.input[0]], **node.attr)
            of_rounded = editor.add("Max", f"{reduced.name}/of_rounded", [rounded, reduced.input[1]], **reduced.attr)
            editor.redirect(name, of_rounded, keep=graph.output_nodes)
    return replace(graph, graph_def=graph.edited(editor).graph_def)


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
