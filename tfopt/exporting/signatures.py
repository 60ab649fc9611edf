"""The functions that an artifact serves, and where their weights are: in variables or in constants.

A weight that a kernel reads as it is stored is in a variable. TensorFlow then loads it once. It would copy a constant
many times before the first call: when it reads the graph, and in each step of its graph optimizer. The int8 kernels
bring a weight into the layout that they compute with once, and keep that, whether the weight is a constant or not. The
float32 convolutions keep it for constants only, so a call with one example takes longer from variables.
`ExportConfig.weights_in` is the choice between the two.

Other constants stay: small ones, and all that TensorFlow should compute with before the first call, such as weights
that are decoded once (see stored_weights.py). Weights that are decoded at every call are in variables, because from
constants TensorFlow would decode them once and keep the result.

Each signature is a function, and a SavedModel stores the constants of every function. So the constants that several
graphs share are in one function without arguments, which all signatures call. TensorFlow inlines the calls before it
optimizes. So each graph has its constants again, and the file holds them once.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.config import FLOAT_SIGNATURE, XLA_SIGNATURE, WeightsIn
from tfopt.exporting.stored_weights import READERS
from tfopt.graph import FrozenGraph
from tfopt.graph.edit import GraphDef, NodeDef, producer

SHARED_SIZE = 1024  # bytes; smaller constants may be stored twice
VARIABLE_SIZE = 32 * 1024  # bytes; to read a smaller weight from a variable takes longer than to copy it
INT8_READERS = dict.fromkeys(("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"), (1,))
# The errors of TensorFlow's file system for a full disk and for a limit on the size of files.
FILE_ERRORS = {tf.errors.ResourceExhaustedError: errno.ENOSPC, tf.errors.OutOfRangeError: errno.EFBIG}
Digests = Mapping[str, str]  # of large constants: their type, shape and values, by the name of the node


def make_signatures(
    graphs: Mapping[str, FrozenGraph], weights_in: WeightsIn = "variables", *, decoded_at_call: bool = False
) -> tuple[tf.Module, dict[str, Callable[..., Any]]]:
    """Returns the module to save, and a concrete function for each graph, by signature name.

    The graphs have the same inputs and outputs. XLA compiles the one named `XLA_SIGNATURE`. With `decoded_at_call` all
    large constants are in variables, whatever `weights_in` says.
    """
    module = tf.Module()
    module.tables = [table.held for graph in graphs.values() for table in graph.tables.values()]
    digests = {name: _digests(graph) for name, graph in graphs.items()}
    nodes = {
        digests[name][node.name]: node
        for name, graph in graphs.items()
        for node in graph.graph_def.node
        if node.name in digests[name]
    }
    counts = Counter(digest for found in digests.values() for digest in set(found.values()))
    in_variables = list(nodes) if decoded_at_call else []
    if weights_in == "variables" and not decoded_at_call:
        in_variables = _read_as_stored(graphs, digests)
    shared = [digest for digest in nodes if counts[digest] > 1 and digest not in in_variables]
    if len(graphs) == 1 and not in_variables:
        return module, {name: graph.as_function() for name, graph in graphs.items()}
    with tf.device("CPU"):
        module.stored = [tf.Variable(_plain(nodes[digest]), trainable=False) for digest in in_variables]
    dtypes = [nodes[digest].attr["dtype"].type for digest in in_variables]
    constants = _function_of([nodes[digest] for digest in shared])

    def stored() -> dict[str, tf.Tensor]:
        weights = [
            value if value.dtype == dtype else tf.bitcast(value, dtype)
            for value, dtype in zip([held.read_value() for held in module.stored], dtypes, strict=True)
        ]
        values = weights + (constants() if shared else [])
        return dict(zip([*in_variables, *shared], values, strict=True))

    held = {*in_variables, *shared}
    return module, {
        name: _call_with(stored, graph, {node: each for node, each in digests[name].items() if each in held}, name)
        for name, graph in graphs.items()
    }


def save(module: Any, directory: str, signatures: Mapping[str, Any]) -> None:
    """Writes a SavedModel. The errors of TensorFlow's file system become OSErrors."""
    # Custom gradients, for example of swish, are for training. Those of a frozen graph cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, directory, signatures=signatures, options=options)
    except tf.errors.OpError as error:
        raise OSError(FILE_ERRORS.get(type(error), errno.EIO), error.message) from error


def _digests(graph: FrozenGraph) -> Digests:
    nodes = (node for node in graph.graph_def.node if node.op == "Const")
    return {node.name: _digest(node) for node in nodes if node.attr["value"].tensor.ByteSize() >= SHARED_SIZE}


def _plain(constant: Any) -> np.ndarray:
    """Returns a constant's values in a type of NumPy. Keras' TFSMLayer reads no variables of a quantized type."""
    values = tf.make_ndarray(constant.attr["value"].tensor)
    return values.view(np.int8) if constant.attr["dtype"].type == tf.qint8.as_datatype_enum else values


def _digest(node: Any) -> str:
    return hashlib.sha256(node.attr["value"].SerializeToString(deterministic=True)).hexdigest()


def _read_as_stored(graphs: Mapping[str, FrozenGraph], digests: Mapping[str, Digests]) -> list[str]:
    """Returns the digests of the weights that no graph computes with in another way than as they are stored.

    An artifact with a float signature has none: a TensorFlow without the ops of the other signatures reads that one
    alone, and could not find variables.
    """
    if FLOAT_SIGNATURE in graphs:
        return []
    weights, others = dict[str, None](), set[str]()
    for name, graph in graphs.items():
        as_stored = _weights(graph)
        for node, digest in digests[name].items():
            if node in as_stored:
                weights[digest] = None
            else:
                others.add(digest)
    return [digest for digest in weights if digest not in others]


def _weights(graph: FrozenGraph) -> set[str]:
    """Returns the constants that nothing reads but kernels as their weights, beside values that the inputs decide."""
    places, nodes = READERS | INT8_READERS, graph.graph_def.node
    fed = _fed(nodes)
    others = {
        producer(tensor)
        for node in nodes
        for place, tensor in enumerate(node.input)
        if place not in places.get(node.op, ()) or node.name not in fed
    }
    large = {node.name for node in nodes if node.op == "Const" and node.attr["value"].ByteSize() >= VARIABLE_SIZE}
    return large - others - graph.output_nodes


def _fed(nodes: Iterable[Any]) -> set[str]:
    """Returns the nodes whose values depend on the inputs."""
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for tensor in node.input:
            readers.setdefault(producer(tensor), []).append(node.name)
    waiting, fed = [node.name for node in nodes if node.op == "Placeholder"], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in fed:
            fed.add(name)
            waiting += readers.get(name, ())
    return fed


def _function_of(constants: list[Any]) -> Callable[[], list[tf.Tensor]]:
    graph_def = GraphDef()
    for number, constant in enumerate(constants):
        graph_def.node.append(constant)
        graph_def.node[-1].name = f"stored_{number}"

    def stored() -> list[tf.Tensor]:
        names = [f"{node.name}:0" for node in graph_def.node]
        return tf.graph_util.import_graph_def(graph_def, return_elements=names, name="") if names else []

    return tf.function(stored, autograph=False).get_concrete_function()


def _call_with(
    stored: Callable[[], Mapping[str, tf.Tensor]], graph: FrozenGraph, held: Digests, signature: str
) -> Callable[..., Any]:
    """Returns the graph's function. It gets the constants in `held` from `stored`."""
    light = type(graph.graph_def)(versions=graph.graph_def.versions, library=graph.graph_def.library)
    inputs = dict(graph.inputs)
    arguments: dict[str, str] = {}
    for node in graph.graph_def.node:
        if node.name in held:
            argument = f"tfopt_stored_{len(arguments)}"
            arguments[argument] = held[node.name]
            dtype, value = node.attr["dtype"], node.attr["value"].tensor
            inputs[argument] = tf.TensorSpec(value.tensor_shape, dtype.type, name=node.name)
            light.node.append(NodeDef(name=node.name, op="Placeholder", attr={"dtype": dtype}))
        else:
            light.node.append(node)
    compute = replace(graph, graph_def=light, inputs=inputs).as_function(unchecked=arguments)
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in graph.inputs.items()}

    def serve(**fed: tf.Tensor) -> Any:
        values = stored()
        return compute(**fed, **{argument: values[digest] for argument, digest in arguments.items()})

    compiled = signature == XLA_SIGNATURE
    function = tf.function(serve, autograph=False, jit_compile=compiled).get_concrete_function(**specs)
    if not compiled:
        return function
    # XLA compiles a function that another function calls. It does not compile the function of a signature itself.
    return tf.function(lambda **fed: function(**fed), autograph=False).get_concrete_function(**specs)
