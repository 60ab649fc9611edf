"""The ops that compute the outputs of a frozen graph. They tell whether an output is a logit or a probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfopt.graph.edit import producer
from tfopt.graph.frozen import FrozenGraph

# Ops whose result holds values of the first input. BiasAdd counts too: a logit plus a bias is still a logit.
VALUE_PRESERVING = frozenset(
    {
        "Identity",
        "IdentityN",
        "Cast",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Transpose",
        "StridedSlice",
        "Slice",
        "BiasAdd",
    }
)


def output_ops(graph: FrozenGraph) -> dict[str, str]:
    """Returns the op that computes each output, by output name.

    Ops that pass on values are skipped, and so is a bias: a Dense without an activation gives "MatMul".
    """
    nodes = {node.name: node for node in graph.graph_def.node}
    return {name: _computing_op(producer(tensor), nodes) for name, (tensor, _) in graph.outputs.items()}


def _computing_op(name: str, nodes: Mapping[str, Any]) -> str:
    node = nodes[name]
    while True:
        inputs = [producer(tensor) for tensor in node.input if not tensor.startswith("^")]
        if node.op in ("Add", "AddV2") and any(_is_constant(each, nodes) for each in inputs):
            inputs = [each for each in inputs if not _is_constant(each, nodes)]
        elif node.op not in VALUE_PRESERVING:
            return str(node.op)
        if not inputs:
            return str(node.op)
        node = nodes[inputs[0]]


def _is_constant(name: str, nodes: Mapping[str, Any]) -> bool:
    node = nodes[name]
    while node.op in VALUE_PRESERVING and node.input:
        node = nodes[producer(node.input[0])]
    return bool(node.op == "Const")
