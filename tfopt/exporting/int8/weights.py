"""The constants of an int8 kernel: its weights with one range per output channel, and its bias.

Without the instructions VNNI or AMX, the sums of some kernels saturate: see tfopt.quantization.annotation.grids. The
values of a kernel's weights tell whether that can happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.int8.activations import Quantized
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute
from tfopt.graph.fold import CONVOLUTIONS
from tfopt.quantization.annotation.fusion import Fusion, int8_weights, weights_quantizer
from tfopt.quantization.annotation.grids import REDUCED_BITS, steps_above_zero

LARGEST_REDUCED = steps_above_zero(REDUCED_BITS)


@dataclass(frozen=True, kw_only=True)
class KernelWeights:
    """The int8 weights of a fusion.

    Attributes:
        fusion: The fusion.
        steps: The weights as integers.
        high: The largest weight of each output channel that 127 steps can represent.
    """

    fusion: Fusion
    steps: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, editor: GraphEditor, fusion: Fusion) -> KernelWeights:
        """Reads the weights from the annotated graph."""
        node = weights_quantizer(editor, fusion.weights)
        assert node is not None, fusion.op  # annotate gives each fusion one
        steps, high = int8_weights(editor, node)
        return cls(fusion=fusion, steps=steps, high=high)

    def add(self, editor: GraphEditor, entering: Quantized) -> tuple[str, str, str]:
        """Adds the weights, their lowest values and their highest values."""
        name, op, steps, high = self.fusion.op, editor.nodes[self.fusion.op].op, self.steps, self.high
        if op in CONVOLUTIONS and entering.dtype == tf.qint8 and np.abs(steps).max() <= LARGEST_REDUCED:
            # Without VNNI such a kernel halves its weights, and an odd weight would lose half a step.
            steps, high = 2 * steps, high / 2
        if op == "DepthwiseConv2dNative":
            steps = steps[..., None]
        return (
            editor.add_constant(f"{name}/int8_weights", steps, tf.qint8),
            editor.add_constant(f"{name}/int8_weights_min", -high),
            editor.add_constant(f"{name}/int8_weights_max", high),
        )

    def add_bias(self, editor: GraphEditor, entering: Quantized, offset: float = 0.0) -> str:
        """Adds the bias of each channel. It removes the offset of `entering` from the result, and adds `offset`."""
        bias = np.zeros_like(self.high) if self.fusion.bias is None else editor.value(self.fusion.bias)
        if entering.span.zero_point:
            sums = self.steps.reshape(-1, len(self.high)).sum(axis=0, dtype=np.int64)
            bias = bias - entering.offset * sums * (self.high / 127)
        return editor.add_constant(f"{self.fusion.op}/bias", (bias + offset).astype(np.float32))


CONVOLUTION, DEPTHWISE, PRODUCT = "_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"
LARGEST = 64  # 2 * 255 * 64 is an int16


def kernels_that_need_vnni(graph: FrozenGraph) -> list[str]:
    """Returns the names of a lowered graph's kernels whose results may be wrong without VNNI or AMX."""
    editor = GraphEditor(graph.graph_def)
    return [
        name
        for name, node in editor.nodes.items()
        if node.op in (CONVOLUTION, DEPTHWISE, PRODUCT) and not _is_exact_without(editor, node)
    ]


def _is_exact_without(editor: GraphEditor, node: Any) -> bool:
    held = editor.constant(node.input[1])
    if held is None:
        return False
    weights = held.view(np.int8)
    read = attribute(node, "T1" if node.op == PRODUCT else "Tinput").type
    if node.op != PRODUCT and read == tf.qint8.as_datatype_enum:
        return not (weights % 2).any()
    by_channel = node.op == DEPTHWISE and weights.shape[2] > 1
    return by_channel or int(np.abs(weights.astype(np.int16)).max(initial=0)) <= LARGEST
