"""Computes shapes from the tensors that define the sizes, in place of tensors that are computed late.

A Dense on a sequence of open length reshapes its result to the shape of its input. A recurrent layer of Keras with a
mask computes a whole step of its cell only to know the shape of the result. Both shapes follow from the model's inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import attribute
from tfopt.graph.sizes import INT32, OpenSize, Size, Sizes


def read_shapes_early(sizes: Sizes, outputs: frozenset[str]) -> None:
    """Rewrites nodes that need only the shape of their input, so that they read the tensors that define its sizes.

    Args:
        sizes: The sizes of the graph's tensors.
        outputs: Nodes whose values leave the graph.
    """
    editor = sizes.editor
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Reshape" and editor.constant(node.input[1]) is None:
            values = sizes.values(node.input[1])
            found = None if values is None else sizes.for_reshape(values)
            if found is not None:
                editor.set_inputs(name, [node.input[0], found])
                node.attr["Tshape"].CopyFrom(INT32)
        elif node.op in ("Shape", "ZerosLike", "OnesLike") and name not in outputs:
            known = sizes.of(node.input[0])
            if known is not None and not _is_origin(node.input[0], known):
                _from_sizes(sizes, node, known)


def _from_sizes(sizes: Sizes, node: Any, known: tuple[Size, ...]) -> None:
    """Redirects the consumers of a Shape, ZerosLike or OnesLike to a tensor that is computed from sizes only."""
    editor = sizes.editor
    if node.op == "Shape" and attribute(node, "out_type").type not in (0, tf.int32.as_datatype_enum):
        return
    found = sizes.written(known)
    if found is not None and node.op != "Shape":
        kind = tf.as_dtype(node.attr["T"].type).as_numpy_dtype
        value = editor.add_constant(f"{node.name}/value", np.asarray(node.op == "OnesLike", kind))
        found = editor.add("Fill", f"{node.name}/fill", [found, value], T=node.attr["T"], index_type=INT32)
    if found is not None:
        editor.redirect(node.name, found)


def _is_origin(tensor: str, sizes: tuple[Size, ...]) -> bool:
    """Whether a tensor itself defines one of its sizes."""
    return any(isinstance(size, OpenSize) and size.tensor == tensor for size in sizes)
