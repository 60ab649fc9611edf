"""Reads the ranges of a graph that was trained with fake quantization.

In such a graph, batch norms follow rounded weights, products have the form in which Keras writes them, and fake
quantization stands between the layers. The lowering needs a folded graph, with products in one form and fake
quantization where its kernels need ranges. So fake quantization is removed first, and the range of each tensor is
recorded. Then the float graph is folded like any other graph, and annotated with the recorded ranges.

The float graph holds the rounded weights. Folding multiplies their channels and changes their axes, so their steps
change too. Folding treats all constants alike. So the graph is folded twice: once with the rounded weights, and once
with the step of each weight in its place. The second graph then holds the step of each folded weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import AttrValue, GraphDef, GraphEditor, attribute, producer
from tfopt.graph.fold import fold_constants
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.annotate import channels_last, is_fake_quant
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, Fusion, before_data_movement, find_fusions
from tfopt.quantization.annotation.grids import Range, steps_above_zero

NO_RANGE = "its weights were trained without a range"
NOT_ONE_RANGE = "grouped convolution: its int8 kernel has one range for all channels, which no training gives it"


@dataclass(frozen=True, kw_only=True)
class TrainedRanges:
    """A folded graph that was trained with fake quantization, without it; its weights are rounded.

    There are the ranges of tensors, the step between two quantized weights for each output channel, by the name of the
    op, and the ops that cannot be quantized, or were trained without fake quantization, each with the reason.
    """

    graph: FrozenGraph
    ranges: Mapping[str, Range]
    steps: Mapping[str, np.ndarray]
    kept_float: Mapping[str, str]


def read_ranges(graph: FrozenGraph, exclude: Iterable[str] = ()) -> TrainedRanges:
    """Returns the folded graph and the ranges of a graph with fake quantization. Excluded ops stay float."""
    plain, ranges, steps_of_weights = _remove_fake_quant(fold_constants(graph))
    folded = fold_constants(plain)
    editor = GraphEditor(folded.graph_def, folded.origins)
    before = GraphEditor(plain.graph_def)
    steps_editor = GraphEditor(fold_constants(_with_steps(plain, steps_of_weights)).graph_def)
    fusions, skipped = find_fusions(folded, editor, exclude)
    steps = {fusion.op: _steps(editor, steps_editor, fusion) for fusion in fusions}
    without = {op: NO_RANGE for op, found in steps.items() if found is None}
    without |= {fusion.op: NOT_ONE_RANGE for fusion in fusions if not fusion.per_channel and fusion.op not in without}
    return TrainedRanges(
        graph=folded,
        ranges={
            origin: value_range
            for tensor, value_range in ranges.items()
            if (origin := folded_tensor(editor, tensor, before))
        },
        steps={op: found for op, found in steps.items() if found is not None},
        kept_float={skip.name: skip.reason for skip in skipped} | without,
    )


def _remove_fake_quant(graph: FrozenGraph) -> tuple[FrozenGraph, dict[str, Range], dict[str, np.ndarray]]:
    """Returns the graph without it, the ranges by tensor, and the steps of weights by the name of the constant."""
    editor = GraphEditor(graph.graph_def)
    ranges: dict[str, Range] = {}
    steps: dict[str, np.ndarray] = {}
    moved: dict[str, str] = {}
    for name in editor.topological():
        node = editor.nodes[name]
        value_range = _range_ends(editor, node) if is_fake_quant(node) else None
        if value_range is None:
            continue
        low, high = value_range
        values = editor.constant(node.input[0])
        if values is not None:
            replacement = editor.add_constant(f"{name}/values", _compute(node, values, low, high))
            qmax = steps_above_zero(attribute(node, "num_bits").i or 8)
            steps[replacement] = np.broadcast_to(np.maximum(-low, high) / qmax, values.shape).astype(np.float32)
        else:
            replacement = node.input[0]
            limit = float(max(-low.min(), high.max()))
            ranges[replacement] = Range(limit=limit, signed=bool(low.min() < 0))
        editor.redirect(name, replacement)
        moved[name] = replacement
    return graph.edited(editor, moved), ranges, steps


def _range_ends(editor: GraphEditor, node: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the lower and upper ends of a node's range or ranges; None if they are not constants."""
    if node.op == "FakeQuantWithMinMaxArgs":
        return np.array([attribute(node, "min").f]), np.array([attribute(node, "max").f])
    low, high = (editor.constant(tensor) for tensor in node.input[1:3])
    return None if low is None or high is None else (np.atleast_1d(low), np.atleast_1d(high))


def _compute(node: Any, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns the weights as a fake-quantization node rounds them, computed by the same op."""
    if node.op == "FakeQuantWithMinMaxVarsPerChannel":
        operation, ends = tf.quantization.fake_quant_with_min_max_vars_per_channel, (low, high)
    else:
        operation, ends = tf.quantization.fake_quant_with_min_max_vars, (low[0], high[0])
    options = {"num_bits": attribute(node, "num_bits").i or 8, "narrow_range": attribute(node, "narrow_range").b}
    return operation(values, *ends, **options).numpy()


def _with_steps(plain: FrozenGraph, steps: Mapping[str, np.ndarray]) -> FrozenGraph:
    """Returns the graph with the step of each weight in place of the weight."""
    graph_def = GraphDef()
    graph_def.CopyFrom(plain.graph_def)
    for node in graph_def.node:
        if node.name in steps:
            node.attr["value"].CopyFrom(AttrValue(tensor=tf.make_tensor_proto(steps[node.name])))
    return replace(plain, graph_def=graph_def)


def _steps(editor: GraphEditor, steps_editor: GraphEditor, fusion: Fusion) -> np.ndarray | None:
    """Returns the step of each output channel of a fusion's weights; None if a channel has no step, or several."""
    weights = editor.value(fusion.weights)
    steps = steps_editor.value(steps_editor.nodes[fusion.op].input[1])
    if np.array_equal(weights, steps):  # the weights had no fake quantization
        return None
    columns = np.abs(channels_last(steps, editor.nodes[fusion.op].op))
    columns = columns.reshape(-1, columns.shape[-1])
    return columns[0] if np.allclose(columns, columns[0], rtol=1e-6, atol=0) else None


def folded_tensor(folded: GraphEditor, tensor: str, before: GraphEditor) -> str | None:
    """Returns the tensor of a folded graph that has the values of a tensor of the graph before, or None.

    Folding may replace the node: products become products of matrices, and sequences become images. Folding may also
    remove a node that only moves values: then the tensor that the node reads has the values. BatchToSpaceND is such a
    node too. It ends a dilated convolution, of which folding makes one node.
    """
    while True:
        found = tensor if producer(tensor) in folded.nodes else folded.replacement(tensor)
        if found is not None:
            return before_data_movement(folded, found)
        node = before.nodes.get(producer(tensor))
        if node is None or ":" in tensor or node.op not in (*DATA_MOVEMENT_OPS, "BatchToSpaceND"):
            return None
        tensor = node.input[0]
