"""Weights and biases that replace the float ones in int8, stored apart from the float graph.

A node that stays float keeps the weights and the bias that it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, dtype_attr, text
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import Fusion


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """The changed weights and bias of a quantized convolution or product.

    Attributes:
        weights: The new weights, or None for no change.
        bias: The change of the bias, one value per output channel, or None for no change.
    """

    weights: np.ndarray | None = None
    bias: np.ndarray | None = None


def apply_adjustments(
    graph: FrozenGraph, fusions: Sequence[Fusion], adjustments: Mapping[str, Adjustment]
) -> tuple[FrozenGraph, list[Fusion]]:
    """Returns the graph with adjusted weights and biases, and the fusions with their new constants.

    Args:
        graph: The float graph.
        fusions: Its fusions. A fusion whose bias is adjusted must have a bias.
        adjustments: The adjustment of each fusion, by the name of its op.
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
            name = editor.add("BiasAdd", name, [fusion.op, zeros], T=dtype_attr(tf.float32), data_format=text("NHWC"))
            editor.redirect(fusion.op, name, keep=[name])
            moved[fusion.op] = name
    outputs = {key: (moved.get(tensor, tensor), spec) for key, (tensor, spec) in graph.outputs.items()}
    biased = replace(graph, outputs=outputs)
    return biased.edited(editor)
