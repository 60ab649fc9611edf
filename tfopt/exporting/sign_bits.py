"""The sign bit that Keras' argmax reads from the bits of a float, which only TensorFlow shows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfopt.graph import GraphEditor
from tfopt.graph.edit import dtype_attr, producer

SIGN_BIT = -(2**31)


def read_signs(editor: GraphEditor) -> None:
    """Computes the sign bit by comparisons.

    Example:
        >>> from tfopt.graph.edit import GraphDef
        >>> read_signs(GraphEditor(GraphDef()))
    """
    for name in [name for name, node in editor.nodes.items() if node.op == "BitwiseAnd"]:
        node = editor.nodes[name]
        bits, mask = node.input[:2]
        cast, held = editor.nodes.get(producer(bits)), editor.constant(mask)
        if cast is None or cast.op != "Bitcast" or held is None or held.size != 1 or held.item() != SIGN_BIT:
            continue
        (x,) = cast.input[:1]
        floats = cast.attr["T"]
        zero = editor.add("ZerosLike", f"{name}/zero", [x], T=floats)
        below = editor.add("Less", f"{name}/below", [x, zero], T=floats)
        inverse = editor.add("Reciprocal", f"{name}/inverse", [x], T=floats)  # of -0.0 it is negative too
        negative = editor.add("Less", f"{name}/negative", [inverse, zero], T=floats)
        either = editor.add("LogicalOr", f"{name}/either", [below, negative])
        whole = dtype_attr(tf.int32)
        sign = editor.add("Cast", f"{name}/sign", [either], SrcT=dtype_attr(tf.bool), DstT=whole)
        lowest = editor.add_constant(f"{name}/lowest", np.array(SIGN_BIT, np.int32))
        editor.redirect(name, editor.add("Mul", f"{name}/bits", [sign, lowest], T=whole))
