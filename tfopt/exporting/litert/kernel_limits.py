"""Ops that LiteRT computes wrongly for some values, written as ops that it computes rightly.

XNNPACK's Rsqrt of 0 is NaN, and one NaN spreads over a whole image. TensorFlow's is infinite, and what follows limits
it, as in a normalization to length 1. Of the smallest normal number both are about 1e19.

The converter writes Softplus as log(1 + exp(x)), which is infinite from 89 on. max(x, 0) + log(1 + exp(-|x|)) is the
same and does not overflow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfopt.graph import GraphEditor
from tfopt.graph.edit import FLOAT32, producer

SMALLEST = np.finfo(np.float32).tiny
ADDITIONS = ("Add", "AddV2")


def keep_within_limits(editor: GraphEditor) -> None:
    """Rewrites these ops.

    Example:
        >>> from tfopt.graph.edit import GraphDef
        >>> keep_within_limits(GraphEditor(GraphDef()))
    """
    for name, node in list(editor.nodes.items()):
        if node.op == "Rsqrt" and node.attr["T"] == FLOAT32 and not _is_above_zero(editor, node.input[0]):
            smallest = editor.add_constant(f"{name}/smallest", SMALLEST)
            editor.set_inputs(name, [editor.add("Maximum", f"{name}/normal", [node.input[0], smallest], T=FLOAT32)])
        elif node.op == "Softplus" and node.attr["T"] == FLOAT32:
            x = node.input[0]
            size = editor.add("Abs", f"{name}/size", [x], T=FLOAT32)
            negative = editor.add("Neg", f"{name}/negative", [size], T=FLOAT32)
            power = editor.add("Exp", f"{name}/power", [negative], T=FLOAT32)
            rest = editor.add("Log1p", f"{name}/rest", [power], T=FLOAT32)
            line = editor.add("Relu", f"{name}/line", [x], T=FLOAT32)
            editor.become(name, "AddV2", [line, rest], T=FLOAT32)


def _is_above_zero(editor: GraphEditor, tensor: str) -> bool:
    """Whether a tensor is a sum with a positive constant, such as a variance with epsilon."""
    node: Any = editor.nodes[producer(tensor)]
    addends = [editor.constant(each) for each in node.input] if node.op in ADDITIONS else []
    return any(each is not None and (each > SMALLEST).all() for each in addends)
