"""Finds the activation function that a graph computes from a tensor, in any form.

GELU alone has four forms in Keras and TensorFlow. So the nodes are not compared with patterns. A group of elementwise
nodes is computed on a range of numbers, and the results are compared with the values of the known functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import FLOAT32, GraphDef, GraphEditor, NodeDef, attribute, producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.products import ELEMENTWISE

SINGLE = ("Relu", "Relu6", "LeakyRelu", "Elu", "Tanh", "Sigmoid")
NON_NEGATIVE = ("Relu", "Relu6", "Sigmoid")
GRID = np.linspace(-9.0, 9.0, 361, dtype=np.float32)
LARGEST_GROUP = 12


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation function in a graph: its name in the int8 kernels, and its nodes, the last of which has the result.

    `alpha` is the slope of a LeakyRelu below zero.
    """

    name: str
    nodes: tuple[str, ...]
    alpha: float = 0.0


def find_activation(editor: GraphEditor, tensor: str, outputs: Collection[str]) -> Activation | None:
    """Returns the activation that is computed from a node's result, if nothing else reads the result.

    Only the last of its nodes may be an output of the graph.
    """
    readers = set(editor.consumers.get(tensor, ()))
    if tensor in outputs or not readers:
        return None
    if len(readers) == 1:
        node = editor.nodes[next(iter(readers))]
        if node.op in SINGLE:
            return Activation(name=node.op, nodes=(node.name,), alpha=attribute(node, "alpha").f)
    nodes = _closed_group(editor, tensor, outputs)
    if nodes is None or not {editor.nodes[name].op for name in nodes} & {"Erf", "Erfc", "Tanh"}:
        return None
    (values,) = run_group(editor, tensor, nodes, [GRID])
    for name, function in _FUNCTIONS.items():
        if np.allclose(values, function(GRID.astype(np.float64)), rtol=0, atol=2e-6 * GRID[-1]):
            return Activation(name=name, nodes=nodes)
    return None


def _closed_group(editor: GraphEditor, tensor: str, outputs: Collection[str]) -> tuple[str, ...] | None:
    """Returns the smallest group of elementwise nodes that contains all readers of a tensor and has one result."""
    group: list[str] = []
    inside = {tensor}

    def is_next(name: str) -> bool:
        node = editor.nodes[name]
        known = all(source in inside or editor.is_number(source) for source in node.input)
        return node.op in ELEMENTWISE and node.op != "BiasAdd" and name not in inside and known

    while len(group) < LARGEST_GROUP:
        readers = (reader for member in (tensor, *group) for reader in editor.consumers.get(member, ()))
        name = next(filter(is_next, readers), None)
        if name is None:
            return None
        group.append(name)
        inside.add(name)
        if all(reader in inside for member in inside - {name} for reader in editor.consumers.get(member, ())):
            return tuple(group)
        if name in outputs:
            return None
    return None


def run_group(editor: GraphEditor, tensor: str, nodes: Sequence[str], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the result of a group of nodes that read one tensor and constants, for each value of the tensor."""
    graph_def = GraphDef()
    graph_def.node.append(NodeDef(name=tensor, op="Placeholder", attr={"dtype": FLOAT32}))
    constants = {producer(source) for name in nodes for source in editor.nodes[name].input} - {tensor, *nodes}
    graph_def.node.extend(editor.nodes[name] for name in (*sorted(constants), *nodes))
    spec = tf.TensorSpec(inputs[0].shape, tf.float32, name=tensor)
    graph = FrozenGraph(graph_def=graph_def, inputs={"x": spec}, outputs={"y": (nodes[-1], spec)}, name="group")
    function = graph.as_function()
    return [function(x=tf.constant(values, tf.float32))["y"].numpy() for values in inputs]


def _gelu_exact(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def _gelu_approximate(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


# The definition and the approximation in Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.
_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "GeluExact": _gelu_exact,
    "GeluApproximate": _gelu_approximate,
}
