"""Finds the int8 kernels that need the instructions VNNI or AMX for correct results.

Without these instructions, the sums of some kernels saturate: see tfopt.quantization.annotation.weight_grid. The values
of a kernel's weights tell whether that can happen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute

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
