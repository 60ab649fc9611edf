"""Writes ranges into a float graph as fake-quantization nodes.

The annotated graph is still a float graph, which TensorFlow runs on any device. It computes with the values that int8
would have. Exporters read only this form, whatever the source of the ranges:

- An activation is rounded by FakeQuantWithMinMaxArgs(min, max): to quint8 for [0, max], and with `narrow_range` to
  qint8 for [-max, max]. Only fusions and the ops that move values to them read the rounded tensor. Other ops read the
  float tensor, if a float op computes it.
- Weights are rounded by FakeQuantWithMinMaxVarsPerChannel(-max, max, narrow_range), with the channels as the last axis.
  A Reshape then adds the fourth axis to the weights of a depthwise convolution. Those of a grouped convolution have the
  same range in every channel.

Weights and biases that replace the float ones in int8 are stored apart from the float graph, as adjustments. So a node
that stays float keeps those that it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfopt.graph.edit import FLOAT32, INT32, AttrValue, GraphEditor, producer, text
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import FAKE_QUANT, FAKE_QUANT_WEIGHTS, Fusion
from tfopt.quantization.annotation.grids import Range, WeightGrid, steps_above_zero
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops, quantized_consumers

INT8 = steps_above_zero(8)
INT8_GRID = WeightGrid()


@dataclass(frozen=True, kw_only=True)
class AnnotatedGraph(FrozenGraph):
    """A graph with fake quantization, and its fusions in the order of computation, with the tensors they read in it."""

    fusions: Sequence[Fusion] = ()


def annotate(
    graph: FrozenGraph,
    fusions: Sequence[Fusion],
    ranges: Mapping[str, Range],
    steps: Mapping[str, np.ndarray] | None = None,
    *,
    weight_grid: WeightGrid = INT8_GRID,
) -> AnnotatedGraph:
    """Returns the graph with fake quantization of the fusions' weights and of the tensors that need a range.

    There may be more ranges than those of the tensors that `tensors_with_ranges` names. `steps` has the step between
    two quantized weights for each output channel, by the name of a fusion's op. An op without an entry gets the
    smallest step that covers its weights. Weights of fewer than 8 bits are rounded here: they are int8 weights that use
    only some of the values.
    """
    editor = GraphEditor(graph.graph_def)
    qmax = {fusion.op: weight_grid.qmax_of(editor, fusion, ranges) for fusion in fusions}
    shared_range_ops = find_shared_range_ops(editor, fusions, ranges)
    for tensor, readers in quantized_consumers(editor, fusions, shared_range_ops).items():
        name = add_fake_quant(editor, tensor, ranges[tensor])
        editor.redirect(tensor, name, keep=set(editor.consumers[producer(tensor)]) - readers)
    for fusion in fusions:
        _annotate_weights(editor, fusion, qmax[fusion.op], (steps or {}).get(fusion.op))
    return AnnotatedGraph(**vars(graph.edited(editor)), fusions=[fusion.within(editor) for fusion in fusions])


def add_fake_quant(editor: GraphEditor, tensor: str, value_range: Range) -> str:
    """Adds a fake-quantization node for a tensor and returns its name. Nothing reads the node yet."""
    return editor.add(
        FAKE_QUANT,
        f"{tensor.replace(':', '_')}/fake_quant",
        [tensor],
        min=AttrValue(f=value_range.low),
        max=AttrValue(f=value_range.limit),
        num_bits=AttrValue(i=8),
        narrow_range=AttrValue(b=value_range.signed),
    )


def is_fake_quant(node: Any) -> bool:
    """Whether a node is one of TensorFlow's fake-quantization ops."""
    return node.op.startswith("FakeQuantWithMinMax") and not node.op.endswith("Gradient")


def has_ranges(graph: FrozenGraph) -> bool:
    """Whether a graph holds fake quantization."""
    return any(is_fake_quant(node) for node in graph.graph_def.node)


def channels_last(weights: np.ndarray, op: str) -> np.ndarray:
    """Returns an op's weights with the output channels as their last axis."""
    return weights[..., 0] if op == "DepthwiseConv2dNative" else weights


def _annotate_weights(editor: GraphEditor, fusion: Fusion, qmax: int, steps: np.ndarray | None) -> None:
    held, source = editor.value(fusion.weights), fusion.weights
    weights = channels_last(held, editor.nodes[fusion.op].op)
    if steps is None:
        limits = np.abs(weights).reshape(-1, weights.shape[-1]).max(axis=0) * np.float32(INT8 / qmax)
    else:
        limits = (steps * INT8).astype(np.float32)
    if not fusion.per_channel:
        limits[:] = limits.max()
    limits[limits == 0] = 1.0  # a channel of zeros has no scale of its own
    if qmax < INT8:
        grid = limits / INT8
        weights = np.clip(np.rint(weights / grid), -qmax, qmax) * grid
    depthwise = weights.ndim < held.ndim  # fake quantization takes the channels from the last axis
    if depthwise or qmax < INT8:
        source = editor.add_constant(f"{fusion.op}/weights_on_grid", weights)
    name = editor.add(
        FAKE_QUANT_WEIGHTS,
        f"{fusion.op}/fake_quant_weights",
        [
            source,
            editor.add_constant(f"{fusion.op}/weights_min", -limits),
            editor.add_constant(f"{fusion.op}/weights_max", limits),
        ],
        num_bits=AttrValue(i=8),
        narrow_range=AttrValue(b=True),
    )
    if depthwise:
        sizes = editor.add_constant(f"{fusion.op}/weights_shape", np.asarray([*weights.shape, 1], np.int32))
        name = editor.add("Reshape", f"{fusion.op}/weights", [name, sizes], T=FLOAT32, Tshape=INT32)
    inputs = list(editor.nodes[fusion.op].input)
    editor.set_inputs(fusion.op, [inputs[0], name, *inputs[2:]])


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """The new weights of a quantized convolution or product, and the change of each channel's bias, if any."""

    weights: np.ndarray | None = None
    bias: np.ndarray | None = None


def apply_adjustments(
    graph: FrozenGraph, fusions: Sequence[Fusion], adjustments: Mapping[str, Adjustment]
) -> tuple[FrozenGraph, list[Fusion]]:
    """Returns the graph with adjusted weights and biases, and the fusions with their new constants.

    Adjustments are by the name of a fusion's op. A fusion whose bias is adjusted must have a bias.
    """
    editor = GraphEditor(graph.graph_def)
    adjusted = []
    for fusion in fusions:
        adjustment = adjustments.get(fusion.op, Adjustment())
        weights, bias = fusion.weights, fusion.bias
        if adjustment.weights is not None:
            weights = editor.add_constant(f"{fusion.op}/adjusted_weights", adjustment.weights)
            editor.set_inputs(fusion.op, [fusion.input, weights])
        if adjustment.bias is not None:
            bias = editor.add_constant(f"{fusion.op}/adjusted_bias", bias_of(editor, fusion) + adjustment.bias)
            editor.set_inputs(fusion.nodes[1], [fusion.op, bias])
        adjusted.append(replace(fusion, weights=weights, bias=bias))
    return graph.edited(editor), adjusted


def bias_of(editor: GraphEditor, fusion: Fusion) -> np.ndarray:
    assert fusion.bias is not None, fusion.op
    return editor.value(fusion.bias)


def with_biases(graph: FrozenGraph, fusions: Sequence[Fusion]) -> FrozenGraph:
    """Returns the graph with a bias of zeros for each fusion without a bias. int8 kernels have one anyway."""
    editor = GraphEditor(graph.graph_def)
    moved = {}
    for fusion in fusions:
        if fusion.bias is None:
            weights = editor.value(editor.nodes[fusion.op].input[1])
            outputs = weights.shape[2 if editor.nodes[fusion.op].op == "DepthwiseConv2dNative" else -1]
            zeros = editor.add_constant(f"{fusion.op}/no_bias", np.zeros(outputs, np.float32))
            name = f"{fusion.op}/bias_add"
            if fusion.per_channel:
                name = editor.add("BiasAdd", name, [fusion.op, zeros], T=FLOAT32, data_format=text("NHWC"))
            else:  # see tfopt.graph.convolutions
                name = editor.add("AddV2", name, [fusion.op, zeros], T=FLOAT32)
            editor.redirect(fusion.op, name, keep=[name])
            moved[fusion.op] = name
    return graph.edited(editor, moved)
