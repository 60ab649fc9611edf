"""The op that computes each output: it tells whether a model gives logits, or probabilities of a softmax or sigmoid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfopt.graph.edit import producer
from tfopt.graph.frozen import FrozenGraph

# Ops whose result holds values of the first input. BiasAdd counts too: a logit plus a bias is still a logit.
VALUE_PRESERVING = (
    *("Identity", "IdentityN", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "StridedSlice", "Slice"),
    "BiasAdd",
)
OF_PROBABILITIES = ("Softmax", "Sigmoid")
SUMS, BOUNDS = ("Add", "AddV2", "AddN"), ("ClipByValue", "Maximum", "Minimum")


def output_ops(graph: FrozenGraph) -> dict[str, str]:
    """Returns the op that computes each output, by output name.

    Ops that pass on values are skipped, and so is a bias: a Dense without an activation gives "MatMul". Probabilities
    stay such if they are clipped, and if those of several softmaxes or sigmoids are averaged.
    """
    nodes = {node.name: node for node in graph.graph_def.node}
    return {name: _computing_op(producer(tensor), nodes) for name, (tensor, _) in graph.outputs.items()}


def _computing_op(name: str, nodes: Mapping[str, Any]) -> str:
    op, factor = _op_and_factor(name, nodes)
    return op if math.isclose(factor, 1.0, rel_tol=1e-3) else str(_origin(name, nodes).op)


def _op_and_factor(name: str, nodes: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the op that computes a value, and by what it is multiplied if it is one of probabilities."""
    node = _origin(name, nodes)
    op, inputs = str(node.op), _inputs(node)
    constants = [each for each in inputs if _origin(each, nodes).op == "Const"]
    variable = [each for each in inputs if each not in constants]
    if op in ("Add", "AddV2") and constants and variable:
        return _op_and_factor(variable[0], nodes)
    if op not in (*SUMS, *BOUNDS, "Mul", "RealDiv") or not variable or (len(variable) > 1 and op not in SUMS):
        return op, 1.0
    computing, factor = "", 0.0
    for each in variable:
        found, own = _op_and_factor(each, nodes)
        if found not in OF_PROBABILITIES or computing not in ("", found):
            return op, 1.0  # at once: the sums of a residual network branch again and again
        computing, factor = found, factor + own
    if op in ("Mul", "RealDiv"):
        value = tf.make_ndarray(_origin(constants[0], nodes).attr["value"].tensor)
        if value.size != 1 or not value.any() or (op == "RealDiv" and inputs[0] in constants):
            return op, 1.0
        factor *= float(value.item()) if op == "Mul" else 1 / float(value.item())
    return computing, factor


def _origin(name: str, nodes: Mapping[str, Any]) -> Any:
    """Returns the node whose values a node passes on."""
    node = nodes[name]
    while node.op in VALUE_PRESERVING and (inputs := _inputs(node)):
        node = nodes[inputs[0]]
    return node


def _inputs(node: Any) -> list[str]:
    return [producer(tensor) for tensor in node.input if not tensor.startswith("^")]
