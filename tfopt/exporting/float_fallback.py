"""The float32 graph that computes with an int8 artifact's own weights.

Its activations are not quantized. Its weights are decoded from the constants that the int8 kernels read. So it runs on
any TensorFlow, adds little to the size of the file, and is at least as exact as int8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.int8.kernels import kernel_name
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import dtype_attr
from tfopt.quantization.annotation.fusion import FAKE_QUANT, FAKE_QUANT_WEIGHTS


def float_fallback(annotated: FrozenGraph, lowered: FrozenGraph) -> FrozenGraph:
    """Returns an annotated graph with unquantized activations and with int8 constants for weights.

    Args:
        annotated: A graph that tfopt.quantization.annotation.annotate returned.
        lowered: The same graph lowered to int8. Its weights are used.
    """
    editor, kernels = GraphEditor(annotated.graph_def), GraphEditor(lowered.graph_def)
    outputs = dict(annotated.outputs)
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == FAKE_QUANT:
            editor.redirect(name, node.input[0])
            outputs = {
                key: (node.input[0] if tensor == name else tensor, spec) for key, (tensor, spec) in outputs.items()
            }
        elif node.op == FAKE_QUANT_WEIGHTS:
            editor.redirect(name, _decode(editor, node, kernels))
    return replace(annotated, outputs=outputs).edited(editor)


def _decode(editor: GraphEditor, node: Any, kernels: GraphEditor) -> str:
    """Adds the int8 weights of the kernel that reads a node's weights, and the nodes that convert them to float32."""
    reader = editor.nodes[editor.consumers[node.name][0]]
    if reader.op == "Reshape":  # before a depthwise convolution
        reader = editor.nodes[editor.consumers[reader.name][0]]
    kernel = kernels.nodes[kernel_name(reader.name)]
    high = kernels.value(kernel.input[len(kernel.attr["Tdevice_inputs"].list.type) + 3])
    scales, sizes = (high / 127).astype(np.float32), np.asarray(editor.value(node.input[0]).shape, np.int32)
    int8, float32 = dtype_attr(tf.int8), dtype_attr(tf.float32)
    stored = editor.add("Const", f"{node.name}/int8", (), **kernels.nodes[kernel.input[1]].attr)
    plain = editor.add("Bitcast", f"{node.name}/plain", [stored], T=dtype_attr(tf.qint8), type=int8)
    cast = editor.add("Cast", f"{node.name}/cast", [plain], SrcT=int8, DstT=float32)
    shape = editor.add_constant(f"{node.name}/shape", sizes)
    shaped = editor.add("Reshape", f"{node.name}/shaped", [cast, shape], T=float32, Tshape=dtype_attr(tf.int32))
    return editor.add(
        "Mul", f"{node.name}/decoded", [shaped, editor.add_constant(f"{node.name}/scales", scales)], T=float32
    )
