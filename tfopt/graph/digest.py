"""Checksums that tell whether two frozen graphs are the same model, whatever their nodes are called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfopt.graph.edit import producer
from tfopt.graph.frozen import FrozenGraph

# Attributes that name a node's resource. Those that begin with "_" are TensorFlow's notes.
NAMES = ("shared_name", "container")


def digests(graph: FrozenGraph) -> tuple[str, str]:
    """Returns checksums of a graph's operations and of its constants, which do not depend on the names of nodes.

    Control inputs do not count: they decide when a node runs, and TensorFlow writes those of a node in any order.

    Example:
        >>> import keras
        >>> from tfopt.graph.unfolded import freeze_unfolded
        >>> one, other = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "relu")]) for _ in range(2))
        >>> found = [digests(freeze_unfolded(model)) for model in (one, other)]
        >>> found[0][0] == found[1][0], found[0][1] == found[1][1]
        (True, False)
    """
    nodes = {node.name: node for node in graph.graph_def.node}
    functions = {each.signature.name: each for each in graph.graph_def.library.function}
    layers, weights = hashlib.sha256(), hashlib.sha256()
    numbers: dict[str, int] = {}
    queue: list[str] = []

    def number(tensor: str) -> str:
        name = producer(tensor)
        if name not in numbers:
            numbers[name] = len(numbers)
            queue.append(name)
        return f"{numbers[name]}:{tensor.partition(':')[2] or 0}"

    layers.update(" ".join(number(tensor) for tensor, _ in graph.outputs.values()).encode())
    layers.update(" ".join(number(spec.name) for spec in graph.inputs.values()).encode())  # which input is which
    for name in queue:  # grows while it is read
        node = nodes[name]
        layers.update(" ".join(map(number, _data_inputs(node))).encode())
        for part in _described(node, functions, skipped="value" if node.op == "Const" else None):
            layers.update(part)
        if node.op == "Const":
            layers.update(node.attr["value"].tensor.tensor_shape.SerializeToString(deterministic=True))
            weights.update(node.attr["value"].SerializeToString(deterministic=True))
    for table in graph.tables.values():
        for values in (table.keys, table.values):
            weights.update(tf.io.serialize_tensor(values).numpy())
    return layers.hexdigest(), weights.hexdigest()


def _data_inputs(node: Any) -> list[str]:
    return [tensor for tensor in node.input if not tensor.startswith("^")]


def _described_function(function: Any, functions: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields what a function computes; its nodes and arguments are numbered by their places."""
    arguments = [each.name for each in function.signature.input_arg]
    numbers = {name: place for place, name in enumerate([*arguments, *(node.name for node in function.node_def)])}

    def numbered(tensor: str) -> str:
        name, _, output = tensor.partition(":")
        return f"{numbers[name]}:{output}"

    for inner in function.node_def:
        yield " ".join(map(numbered, _data_inputs(inner))).encode()
        yield from _described(inner, functions)
    yield " ".join(numbered(function.ret[each.name]) for each in function.signature.output_arg).encode()


def _described(node: Any, functions: Mapping[str, Any], skipped: str | None = None) -> Iterator[bytes]:
    """Yields the op of a node and its attributes, and those of the functions that it calls."""
    yield node.op.encode()
    for key in sorted(node.attr):
        if key.startswith("_") or key in (skipped, *NAMES):
            continue
        value = node.attr[key]
        called = [value.func.name] if value.HasField("func") else [each.name for each in value.list.func]
        for name in called:
            yield from _described_function(functions[name], functions)
        if not called:
            yield key.encode() + value.SerializeToString(deterministic=True)
