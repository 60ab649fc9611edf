"""Reads the ranges of a graph that holds fake quantization, and annotates it for the exporters by these.

A model trained with fake quantization freezes to a graph in which batch norms lie behind rounded weights, products are
in whatever form Keras wrote them, and ranges lie wherever a layer could be. The lowering wants it folded, in one form,
with ranges where its kernels need them. So fake quantization is taken out first, each range noted by the tensor it is
of; then the plain float graph is folded like any other, and annotated by the ranges noted.

Weights are put in as they are rounded, and must get their scales back behind the folding, which multiplies channels and
changes axes. It does that to any constant alike. So the graph is folded twice: once with the rounded weights, and once
with each weight's step in its place, which then holds the step of each folded weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import AttrValue, GraphDef, GraphEditor, attribute
from tfopt.graph.fold import fold_constants
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.annotate import channels_last, is_fake_quant
from tfopt.quantization.annotation.fusion import Fusion, find_fusions, folded_tensor
from tfopt.quantization.annotation.range import Range, steps_above_zero


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a model trained with fake quantization knows of its quantization.

    Attributes:
        graph: Its graph, folded, without fake quantization, the weights as they are rounded.
        ranges: The range of each tensor of that graph that has one.
        steps: For each op, the step between two of its quantized weights, one for each output channel.
        kept_float: The ops that cannot be quantized, or were trained without, each with the reason.
    """

    graph: FrozenGraph
    ranges: Mapping[str, Range]
    steps: Mapping[str, np.ndarray]
    kept_float: Mapping[str, str]


def read_ranges(graph: FrozenGraph, exclude: Iterable[str] = ()) -> Trained:
    """Returns the graph folded, with the ranges that it holds.

    Args:
        graph: A frozen graph with fake quantization, for example of a model that `tfopt.quantize` made for training.
        exclude: Names or shell-style patterns of ops that stay float.
    """
    plain = _take_out(fold_constants(graph))
    folded = fold_constants(plain.graph)
    editor = GraphEditor(folded.graph_def, folded.origins)
    before = GraphEditor(plain.graph.graph_def)
    steps_editor = GraphEditor(fold_constants(_with_steps(plain)).graph_def)
    fusions, skipped = find_fusions(folded, editor, exclude)
    steps = {fusion.op: _steps(editor, steps_editor, fusion) for fusion in fusions}
    without = {op: "its weights were trained without a range" for op, found in steps.items() if found is None}
    return Trained(
        graph=folded,
        ranges={
            origin: span for tensor, span in plain.ranges.items() if (origin := folded_tensor(editor, tensor, before))
        },
        steps={op: found for op, found in steps.items() if found is not None},
        kept_float={skip.name: skip.reason for skip in skipped} | without,
    )


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """A graph without fake quantization, and what that said: ranges by tensor, steps by constant of weights."""

    graph: FrozenGraph
    ranges: Mapping[str, Range]
    steps: Mapping[str, np.ndarray]


def _take_out(graph: FrozenGraph) -> _Plain:
    editor = GraphEditor(graph.graph_def)
    ranges: dict[str, Range] = {}
    steps: dict[str, np.ndarray] = {}
    outputs = {tensor: tensor for tensor, _ in graph.outputs.values()}
    for name in editor.topological():
        node = editor.nodes[name]
        span = _span(editor, node) if is_fake_quant(node) else None
        if span is None:
            continue
        low, high = span
        values = editor.constant(node.input[0])
        if values is not None:
            replacement = editor.add_constant(f"{name}/values", _compute(node, values, low, high))
            top = steps_above_zero(attribute(node, "num_bits").i or 8)
            steps[replacement] = np.broadcast_to(np.maximum(-low, high) / top, values.shape).astype(np.float32)
        else:
            replacement = node.input[0]
            limit = float(max(-low.min(), high.max()))
            ranges[replacement] = Range(limit=limit, signed=bool(low.min() < 0))
        editor.redirect(name, replacement)
        outputs = {old: replacement if new == name else new for old, new in outputs.items()}
    kept = {key: (outputs[tensor], spec) for key, (tensor, spec) in graph.outputs.items()}
    return _Plain(graph=replace(graph, outputs=kept).edited(editor), ranges=ranges, steps=steps)


def _span(editor: GraphEditor, node: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the ends of a node's range, of weights one for each channel; None where they are computed from inputs."""
    if node.op == "FakeQuantWithMinMaxArgs":
        return np.array([attribute(node, "min").f]), np.array([attribute(node, "max").f])
    low, high = (editor.constant(tensor) for tensor in node.input[1:3])
    return None if low is None or high is None else (np.atleast_1d(low), np.atleast_1d(high))


def _compute(node: Any, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns what a fake-quantization node makes of weights: by the same op, so that all roundings are the model's."""
    per_channel = node.op == "FakeQuantWithMinMaxVarsPerChannel"
    operation = (
        tf.quantization.fake_quant_with_min_max_vars_per_channel
        if per_channel
        else tf.quantization.fake_quant_with_min_max_vars
    )
    ends = (low, high) if per_channel else (low[0], high[0])
    options = {"num_bits": attribute(node, "num_bits").i or 8, "narrow_range": attribute(node, "narrow_range").b}
    return operation(values, *ends, **options).numpy()


def _with_steps(plain: _Plain) -> FrozenGraph:
    """Returns the graph with each weight's step in its place."""
    graph_def = GraphDef()
    graph_def.CopyFrom(plain.graph.graph_def)
    for node in graph_def.node:
        if node.name in plain.steps:
            node.attr["value"].CopyFrom(AttrValue(tensor=tf.make_tensor_proto(plain.steps[node.name])))
    return replace(plain.graph, graph_def=graph_def)


def _steps(editor: GraphEditor, steps_editor: GraphEditor, fusion: Fusion) -> np.ndarray | None:
    """Returns the step of each output channel of a fusion's weights; None where they have none, or several."""
    weights = editor.value(fusion.weights)
    steps = steps_editor.value(steps_editor.nodes[fusion.op].input[1])
    if np.array_equal(weights, steps):  # nothing was put in its place
        return None
    columns = np.abs(channels_last(steps, editor.nodes[fusion.op].op))
    columns = columns.reshape(-1, columns.shape[-1])
    return columns[0] if np.allclose(columns, columns[0], rtol=1e-6, atol=0) else None
