"""The constants of an int8 kernel: its weights with one range per output channel, and its bias; and back to float32.

Without the instructions VNNI or AMX, the sums of some kernels saturate: see tfopt.quantization.annotation.grids. The
values of a kernel's weights tell whether that can happen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.int8.activations import Quantized
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, attribute, dtype_attr
from tfopt.graph.fold import CONVOLUTIONS
from tfopt.quantization.annotation.fusion import FAKE_QUANT, FAKE_QUANT_WEIGHTS, Fusion, int8_weights
from tfopt.quantization.annotation.grids import REDUCED_BITS, adds_by_channel, steps_above_zero

LARGEST_REDUCED = steps_above_zero(REDUCED_BITS)
CONVOLUTION, DEPTHWISE, PRODUCT = "_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"
LARGEST = 64  # 2 * 255 * 64 is an int16


def kernel_name(op: str) -> str:
    return f"{op}/int8"


def lowered_names(op: str) -> tuple[str, str]:
    """Returns the nodes of a convolution or product in int8: the kernel, and the padding before it."""
    return kernel_name(op), f"{kernel_name(op)}/padded/bytes"


class KernelWeights:
    """The int8 weights of a fusion, read from the annotated graph.

    `steps` are the weights as integers, and `high` is the largest weight of each output channel that 127 steps can
    represent.
    """

    def __init__(self, editor: GraphEditor, fusion: Fusion) -> None:
        self.fusion = fusion
        self.steps, self.high = int8_weights(editor, fusion.weights)

    def add(self, editor: GraphEditor, entering: Quantized) -> tuple[str, str, str]:
        """Adds the weights, their lowest values and their highest values."""
        name, op, steps, high = self.fusion.op, editor.nodes[self.fusion.op].op, self.steps, self.high
        if op in CONVOLUTIONS and entering.dtype == tf.qint8 and np.abs(steps).max() <= LARGEST_REDUCED:
            # Without VNNI such a kernel halves its weights, and an odd weight would lose half a step.
            steps, high = 2 * steps, high / 2
        if op == "DepthwiseConv2dNative":
            steps = steps[..., None]
        if not self.fusion.per_channel:
            high = high[0]
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
    return adds_by_channel(node.op, weights) or int(np.abs(weights.astype(np.int16)).max(initial=0)) <= LARGEST


def decode_int8(annotated: FrozenGraph, lowered: FrozenGraph) -> FrozenGraph:
    """Returns the float32 graph that computes with an int8 artifact's own weights.

    Its activations are not quantized, and its weights are decoded from the constants that the int8 kernels read. So it
    runs on any TensorFlow, adds little to the size of the file, and is at least as exact as int8.
    """
    editor, kernels = GraphEditor(annotated.graph_def), GraphEditor(lowered.graph_def)
    moved = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == FAKE_QUANT:
            moved[name] = node.input[0]
            editor.redirect(name, moved[name])
        elif node.op == FAKE_QUANT_WEIGHTS:
            editor.redirect(name, _decode(editor, node, kernels))
    return annotated.edited(editor, moved)


def _decode(editor: GraphEditor, node: Any, kernels: GraphEditor) -> str:
    """Adds the int8 weights of the kernel that reads a node's weights, and the nodes that convert them to float32."""
    reader = editor.nodes[editor.consumers[node.name][0]]
    if reader.op == "Reshape":  # before a depthwise convolution
        reader = editor.nodes[editor.consumers[reader.name][0]]
    kernel = kernels.nodes[kernel_name(reader.name)]
    high = kernels.value(kernel.input[len(kernel.attr["Tdevice_inputs"].list.type) + 3])
    scales, sizes = (high / 127).astype(np.float32), np.asarray(editor.value(node.input[0]).shape, np.int32)
    int8 = dtype_attr(tf.int8)
    stored = editor.add("Const", f"{node.name}/int8", (), **kernels.nodes[kernel.input[1]].attr)
    plain = editor.add("Bitcast", f"{node.name}/plain", [stored], T=dtype_attr(tf.qint8), type=int8)
    cast = editor.add("Cast", f"{node.name}/cast", [plain], SrcT=int8, DstT=FLOAT32)
    shape = editor.add_constant(f"{node.name}/shape", sizes)
    shaped = editor.add("Reshape", f"{node.name}/shaped", [cast, shape], T=FLOAT32, Tshape=INT32)
    factors = editor.add_constant(f"{node.name}/scales", scales)
    return editor.add("Mul", f"{node.name}/decoded", [shaped, factors], T=FLOAT32)
