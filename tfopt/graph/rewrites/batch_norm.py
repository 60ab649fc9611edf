"""Decomposes batch normalisation in one node, as in Keras 2, into the multiplication and sum of Keras 3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, attribute, dtype_attr, is_nhwc, producer
from tfopt.graph.frozen import FrozenGraph

OPS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


def decompose_batch_norm(graph: FrozenGraph) -> FrozenGraph:
    """Returns the graph with x * scale + offset in place of each batch normalisation, which folding then removes.

    A node stays if it is in training mode, or not in NHWC, or if its statistics are not constants.
    """
    editor = GraphEditor(graph.graph_def, graph.origins)
    outputs = dict(graph.outputs)
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op not in OPS or not is_nhwc(node):
            continue
        statistics = [_constant(editor, tensor) for tensor in node.input[1:5]]
        if attribute(node, "is_training").b or any(value is None or not value.size for value in statistics):
            continue
        gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in statistics)
        scale = gamma / np.sqrt(variance + attribute(node, "epsilon").f)
        kind = dtype_attr(tf.float32)
        factor = editor.add_constant(f"{name}/scale", scale.astype(np.float32))
        offset = editor.add_constant(f"{name}/offset", (beta - mean * scale).astype(np.float32))
        product = editor.add("Mul", f"{name}/mul", [node.input[0], factor], T=kind)
        result = editor.add("AddV2", f"{name}/add", [product, offset], origin=name, T=kind)
        editor.redirect(name, result)
        outputs = {key: (result if tensor == name else tensor, spec) for key, (tensor, spec) in outputs.items()}
    changed = replace(graph, outputs=outputs)
    return changed.edited(editor)


def _constant(editor: GraphEditor, tensor: str) -> np.ndarray | None:
    node = editor.nodes[producer(tensor)]
    while node.op == "Identity":
        tensor = node.input[0]
        node = editor.nodes[producer(tensor)]
    return editor.constant(tensor)
