"""Weights and biases that suit int8 better than the float ones, kept apart from the float graph.

A node that is left float in the end keeps what it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, dtype_attr, text
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.chains import Chain


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What a quantized convolution or product computes with in place of its own.

    Attributes:
        weights: The weights, or None for its own.
        bias: What is added to its bias, one value per output channel, or None.
    """

    weights: np.ndarray | None = None
    bias: np.ndarray | None = None


def adjust(
    graph: FrozenGraph, chains: Sequence[Chain], adjustments: Mapping[str, Adjustment]
) -> tuple[FrozenGraph, list[Chain]]:
    """Returns the graph with the weights and biases of its chains adjusted, and the chains with their new constants.

    Args:
        graph: The float graph.
        chains: Its chains; one whose bias is adjusted has one.
        adjustments: By the name of a chain's op.
    """
    editor = GraphEditor(graph.graph_def)
    adjusted = []
    for chain in chains:
        adjustment = adjustments.get(chain.op, Adjustment())
        weights, bias = chain.weights, chain.bias
        if adjustment.weights is not None:
            weights = editor.add_constant(f"{chain.op}/adjusted_weights", adjustment.weights)
            editor.set_inputs(chain.op, [chain.input, weights])
        if adjustment.bias is not None:
            bias = editor.add_constant(f"{chain.op}/adjusted_bias", bias_of(editor, chain) + adjustment.bias)
            editor.set_inputs(chain.nodes[1], [chain.op, bias])
        adjusted.append(replace(chain, weights=weights, bias=bias))
    return graph.edited(editor), adjusted


def bias_of(editor: GraphEditor, chain: Chain) -> np.ndarray:
    assert chain.bias is not None, chain.op
    return editor.value(chain.bias)


def with_biases(graph: FrozenGraph, chains: Sequence[Chain]) -> FrozenGraph:
    """Returns the graph with a bias of zeros for each chain that has none. int8 kernels have one anyway."""
    editor = GraphEditor(graph.graph_def)
    moved = {}
    for chain in chains:
        if chain.bias is None:
            weights = editor.value(chain.weights)
            outputs = weights.shape[2 if editor.nodes[chain.op].op == "DepthwiseConv2dNative" else -1]
            zeros = editor.add_constant(f"{chain.op}/no_bias", np.zeros(outputs, np.float32))
            name = f"{chain.op}/bias_add"
            name = editor.add("BiasAdd", name, [chain.op, zeros], T=dtype_attr(tf.float32), data_format=text("NHWC"))
            editor.redirect(chain.op, name, keep=[name])
            moved[chain.op] = name
    outputs = {key: (moved.get(tensor, tensor), spec) for key, (tensor, spec) in graph.outputs.items()}
    biased = replace(graph, outputs=outputs)
    return biased.edited(editor)
