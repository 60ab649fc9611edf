"""Keras 2 (`tf_keras`) models, which tensorflow-model-optimization (tfmot) quantizes for training.

tfmot inserts fake-quantization nodes into the model. Their ranges may be asymmetric. Here they become symmetric: a
range [low, high] becomes [-limit, limit] with limit = max(-low, high), or [0, high]. Zero is exact in both forms.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.kinds import is_tf_keras
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.graph import freeze
from tfopt.graph.edit import GraphEditor, attribute, dtype_attr, is_nhwc, producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.unsafe_ops import check_graph
from tfopt.pruning.tfmot import import_tfmot
from tfopt.quantization.config import QuantizationConfig


def quantize_tf_keras(model: Any, config: QuantizationConfig) -> Any:
    """Returns tfmot's quantization-aware copy of a functional or Sequential `tf_keras` model, to compile and train.

    Raises:
        ConfigError: The config has a setting that tfmot's default scheme does not support.
        UnsupportedModelError: tfmot cannot quantize the model.
    """
    wanted = {"exclude": (), "weight_bits": 8, "learned_ranges": False}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"A tf_keras model is quantized by tfmot, which takes {name}={value!r} only. "
                f"Received: {name}={getattr(config, name)!r}. Leave it out, or use a Keras 3 model."
            )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Give it an Input layer."
        )
    try:
        return import_tfmot().quantization.keras.quantize_model(model)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"tfmot cannot quantize {model.name!r}: {error}") from error


def freeze_any(model: Any, *, trusted: bool = False) -> FrozenGraph:
    """Freezes a model of Keras 3, of `tf_keras` or in a file, without folding it; see `tfopt.graph.freeze`."""
    return freeze_tf_keras(model, trusted) if is_tf_keras(model) else freeze(model, fold=False, trusted=trusted)


def freeze_tf_keras(model: Any, trusted: bool = False) -> FrozenGraph:
    """Freezes a built `tf_keras` model, as `tfopt.graph.freeze(model, fold=False)` freezes a Keras 3 model.

    Raises:
        UnsupportedModelError: The model is not built, or cannot be frozen.
    """
    if not model.built or model.inputs is None:
        raise UnsupportedModelError(
            f"model must be built before it can be exported. Received: {model.name!r} ({type(model).__name__}), which "
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
    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(model, directory, signatures=function)
        graph = freeze(directory, fold=False, trusted=True)
    return replace(decompose_batch_norm(graph), name=model.name)


BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


def decompose_batch_norm(graph: FrozenGraph) -> FrozenGraph:
    """Returns the graph with x * scale + offset in place of each batch normalisation, which folding then removes.

    A node stays if it is in training mode, or not in NHWC, or if its statistics are not constants.
    """
    editor = GraphEditor(graph.graph_def, graph.origins)
    outputs = dict(graph.outputs)
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op not in BATCH_NORMS or not is_nhwc(node):
            continue
        statistics = [_value_behind_identities(editor, tensor) for tensor in node.input[1:5]]
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


def _value_behind_identities(editor: GraphEditor, tensor: str) -> np.ndarray | None:
    node = editor.nodes[producer(tensor)]
    while node.op == "Identity":
        tensor = node.input[0]
        node = editor.nodes[producer(tensor)]
    return editor.constant(tensor)
