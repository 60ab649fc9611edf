"""The first step of every export: a model of any kind, frozen and not yet folded.

A model of Keras 2 (`tf_keras`) is frozen by way of a SavedModel, and keeps its batch norms as single nodes. Here they
become x * scale + offset, the form in which a Keras 3 model has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.atomic.scratch import scratch_directory
from tfopt.compat.kinds import is_tf_keras
from tfopt.errors import UnsupportedModelError
from tfopt.graph.edit import FLOAT32, GraphEditor, attribute, is_nhwc
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.source import freeze
from tfopt.graph.unsafe_ops import check_graph

BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


def freeze_unfolded(model: Any, *, trusted: bool = False) -> FrozenGraph:
    """Freezes a model of Keras 3, of `tf_keras` or in a file, without folding it; see `tfopt.graph.freeze`."""
    return _freeze_tf_keras(model, trusted) if is_tf_keras(model) else freeze(model, fold=False, trusted=trusted)


def _freeze_tf_keras(model: Any, trusted: bool) -> FrozenGraph:
    if not model.built or model.inputs is None:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} ({type(model).__name__}), which "
            "has no input shape yet. Give it an Input layer."
        )
    specs = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=name)
        for name, tensor in zip(model.input_names, model.inputs, strict=True)
    ]

    def serve(*tensors: Any) -> dict[str, Any]:
        outputs = tf.nest.flatten(model(tf.nest.pack_sequence_as(model.input, tensors), training=False))
        return {f"output_{index}": tensor for index, tensor in enumerate(outputs)}

    function = tf.function(serve, autograph=False).get_concrete_function(*specs)
    check_graph(function.graph.as_graph_def(), model.name, trusted=trusted)
    with scratch_directory() as directory:
        tf.saved_model.save(model, str(directory), signatures=function)
        graph = freeze(directory, fold=False, trusted=True)
    return replace(_decompose_batch_norms(graph), name=model.name)


def _decompose_batch_norms(graph: FrozenGraph) -> FrozenGraph:
    """A node stays if it is in training mode, or not in NHWC, or if its statistics are not constants."""
    editor = GraphEditor(graph.graph_def, graph.origins)
    moved = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op not in BATCH_NORMS or not is_nhwc(node):
            continue
        statistics = [editor.constant(tensor, behind="Identity") for tensor in node.input[1:5]]
        if attribute(node, "is_training").b or any(value is None or not value.size for value in statistics):
            continue
        gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in statistics)
        scale = gamma / np.sqrt(variance + attribute(node, "epsilon").f)
        factor = editor.add_constant(f"{name}/scale", scale.astype(np.float32))
        offset = editor.add_constant(f"{name}/offset", (beta - mean * scale).astype(np.float32))
        product = editor.add("Mul", f"{name}/mul", [node.input[0], factor], T=FLOAT32)
        moved[name] = editor.add("AddV2", f"{name}/add", [product, offset], origin=name, T=FLOAT32)
        editor.redirect(name, moved[name])
    return graph.edited(editor, moved)
