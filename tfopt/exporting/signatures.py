"""Turns the graphs of one model into the signatures of one SavedModel.

Each signature is a function, and a SavedModel stores the constants of every function. So the constants that several
graphs share are in one function without arguments, which all signatures call. TensorFlow inlines the calls before it
optimizes. So each graph has its constants again, and the file holds them once.

Weights that are decoded at every call are in variables instead. From constants, TensorFlow would decode them once and
keep the result.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfopt.graph import FrozenGraph
from tfopt.graph.edit import GraphDef, NodeDef

DEFAULT = "serving_default"
FLOAT = "serving_float"
XLA = "serving_xla"
SHARED_SIZE = 1024  # bytes; smaller constants may be stored twice


def make_signatures(
    graphs: Mapping[str, FrozenGraph], *, in_variables: bool = False
) -> tuple[tf.Module, dict[str, Callable[..., Any]]]:
    """Returns the module to save, and a concrete function for each graph, by signature name.

    The graphs have the same inputs and outputs. XLA compiles the one named `XLA`. With `in_variables` the module holds
    the large constants as variables.
    """
    module = tf.Module()
    module.tables = [table.held for graph in graphs.values() for table in graph.tables.values()]
    if len(graphs) == 1 and not in_variables:
        return module, {name: graph.as_function() for name, graph in graphs.items()}
    large = {name: _large_constants(graph) for name, graph in graphs.items()}
    counts = Counter(digest for found in large.values() for digest in found)
    shared = {
        digest: node for found in large.values() for digest, node in found.items() if in_variables or counts[digest] > 1
    }
    if in_variables:
        values = [tf.make_ndarray(node.attr["value"].tensor) for node in shared.values()]
        module.stored = [tf.Variable(value, trainable=False) for value in values]
        stored = _reader_of(module.stored)
    else:
        stored = _function_of(list(shared.values()))
    return module, {name: _call_with(stored, graph, list(shared), name == XLA) for name, graph in graphs.items()}


def _large_constants(graph: FrozenGraph) -> dict[str, Any]:
    """Returns the large constants of a graph, by a digest of their type, shape and values."""
    nodes = (node for node in graph.graph_def.node if node.op == "Const")
    return {_digest(node): node for node in nodes if node.attr["value"].tensor.ByteSize() >= SHARED_SIZE}


def _digest(node: Any) -> str:
    return hashlib.sha256(node.attr["value"].SerializeToString(deterministic=True)).hexdigest()


def _reader_of(variables: list[tf.Variable]) -> Callable[[], list[tf.Tensor]]:
    return lambda: [variable.read_value() for variable in variables]


def _function_of(constants: list[Any]) -> Callable[[], list[tf.Tensor]]:
    """Returns a concrete function that returns constants."""
    graph_def = GraphDef()
    for number, constant in enumerate(constants):
        graph_def.node.append(constant)
        graph_def.node[-1].name = f"stored_{number}"

    def stored() -> list[tf.Tensor]:
        names = [f"{node.name}:0" for node in graph_def.node]
        return tf.graph_util.import_graph_def(graph_def, return_elements=names, name="") if names else []

    return tf.function(stored, autograph=False).get_concrete_function()


def _call_with(
    stored: Callable[[], list[tf.Tensor]], graph: FrozenGraph, shared: list[str], jit_compile: bool
) -> Callable[..., Any]:
    """Returns the graph's function. It gets the constants in `shared` from `stored`."""
    light = type(graph.graph_def)(versions=graph.graph_def.versions, library=graph.graph_def.library)
    inputs = dict(graph.inputs)
    places: dict[str, int] = {}
    for node in graph.graph_def.node:
        digest = _digest(node) if node.op == "Const" else None
        if digest in shared:
            argument = f"tfopt_stored_{len(places)}"
            places[argument] = shared.index(digest)
            dtype, value = node.attr["dtype"], node.attr["value"].tensor
            inputs[argument] = tf.TensorSpec(value.tensor_shape, dtype.type, name=node.name)
            light.node.append(NodeDef(name=node.name, op="Placeholder", attr={"dtype": dtype}))
        else:
            light.node.append(node)
    compute = replace(graph, graph_def=light, inputs=inputs).as_function()
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in graph.inputs.items()}

    def serve(**fed: tf.Tensor) -> Any:
        values = stored()
        return compute(**fed, **{name: values[place] for name, place in places.items()})

    function = tf.function(serve, autograph=False, jit_compile=jit_compile).get_concrete_function(**specs)
    if not jit_compile:
        return function
    # XLA compiles a function that another function calls. It does not compile the function of a signature itself.
    return tf.function(lambda **fed: function(**fed), autograph=False).get_concrete_function(**specs)
