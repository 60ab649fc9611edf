"""The sizes that a signature fixes are checked when a graph runs, in the function that an artifact serves.

TensorFlow does not compare the inputs of a loaded signature with its shapes. A graph that was simplified for these
shapes would compute on other ones too: a Reshape turns two examples into four where the sizes allow it, and a layer
whose loop has a known number of steps leaves the others out. So each input passes through an EnsureShape, which is not
part of the frozen graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfopt.graph.edit import GraphEditor, producer


def check_sizes(spec: tf.TensorSpec, tensor: Any) -> Any:
    """Returns the tensor of an input behind a check of its rank and fixed sizes. Without any it is unchanged."""
    if spec.shape.rank is None:
        return tensor
    return tf.ensure_shape(tensor, spec.shape, name=f"{spec.name}/size_check")


def drop_size_checks(editor: GraphEditor, inputs: Mapping[str, tf.TensorSpec]) -> dict[str, str]:
    """Lets nothing read the checks of inputs that say no more than the signature, as those of an artifact.

    Returns: The tensor in place of each check.
    """
    shapes, moved = {spec.name: spec.shape for spec in inputs.values()}, {}
    for node in [node for node in editor.nodes.values() if node.op == "EnsureShape"]:
        source = node
        while source.op in ("Identity", "EnsureShape"):  # a function that is put into its caller leaves an Identity
            source = editor.nodes[producer(source.input[0])]
        if shapes.get(source.name) == tf.TensorShape(node.attr["shape"].shape):
            moved[node.name] = node.input[0]
            editor.redirect(node.name, node.input[0])
    return moved
