"""Chooses the nodes of a float32 graph that compute in half precision, so that few values are converted.

Products gain from it, and add up in float32 inside of their kernels. Sums, means, exponentials, and the arithmetic on
their results (a normalisation) would lose accuracy, so these stay in float32. Between the two, an op falls in one of
three groups:

- It only moves or compares values. Rounded before or after, its result is the same.
- It is a simple function of values that are rounded already, because they come from products. Here it rounds once more.
- It is such a function, but of other values, for example the inputs of the model. Then it stays in float32.

The first two kinds are free to go to either side. A conversion costs the size of its tensor, once for all its readers,
and a free node in float32 costs a quarter of its result, since half the bytes are faster to read and write, and
TensorFlow's kernels of products include what follows. A minimum cut gives the sides that cost least.

NVIDIA's automatic mixed precision and its form in TensorFlow (auto_mixed_precision.cc) have such groups too, and choose
the sides by following paths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import op_definition
from tfopt.exporting.int8.selection import NEVER, SINK, SOURCE, FlowNetwork
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute, producer
from tfopt.quantization.annotation.activations import find_activation
from tfopt.report import Skip

PRODUCTS = (
    *("Conv2D", "DepthwiseConv2dNative", "Conv3D", "Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum"),
)
# Ops that commute with rounding: they move values, choose among them, or change only signs.
MOVING = (
    *("Reshape", "Transpose", "Squeeze", "ExpandDims", "Identity", "StopGradient", "ConcatV2", "Pack", "Unpack"),
    *("Split", "SplitV", "Slice", "StridedSlice", "GatherV2", "Pad", "MirrorPad", "Tile", "ReverseV2", "Roll"),
    *("BroadcastTo", "SpaceToBatchND", "BatchToSpaceND", "SpaceToDepth", "DepthToSpace", "ResizeNearestNeighbor"),
    *("SelectV2", "MaxPool", "Max", "Relu", "Relu6", "Abs", "Neg"),
)
ARITHMETIC = ("BiasAdd", "Add", "AddV2", "AddN", "Sub", "Mul", "Maximum", "Minimum", "LeakyRelu")
# Functions that stay in float32 and hardly enlarge an error: the result of a rounded value counts as rounded.
SMOOTH = ("Sigmoid", "Tanh", "Erf", "Erfc", "Elu", "Selu", "Softplus", "Softsign", "AvgPool", "ResizeBilinear")
SHAPE_ONLY = ("Shape", "Size", "Rank")  # they read no value
FLOAT32_ENUM = tf.float32.as_datatype_enum
IN_FLOAT32 = 0.25  # the cost of a free node in float32, as a share of converting its result
OPEN = 64  # counts for an open size
STEPS = {"float16": 2**-10, "bfloat16": 2**-7}  # between 1 and the next number
WHOLE = 10**8  # the sizes of all tensors in units of the network, whose capacities are integers


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The nodes to compute in half precision, and the products that stay in float32, with the reason."""

    half: frozenset[str]
    skipped: tuple[Skip, ...]


def choose_sides(graph: FrozenGraph, editor: GraphEditor, dtype: tf.DType, keep: Collection[str] = ()) -> Sides:
    """Returns the sides of the nodes of a frozen graph for a half type. The products `keep` stay in float32."""
    free, products, skipped, rounded = _kinds(editor, dtype, graph.output_nodes, keep)
    if not products:
        return Sides(half=frozenset(), skipped=tuple(skipped))
    network = FlowNetwork()
    number = dict.fromkeys(products, SOURCE) | {name: network.node() for name in free}
    readers = _readers(editor, number)
    for tensor, _ in graph.outputs.values():
        if producer(tensor) in number:
            readers[tensor].append("")  # outputs are float32
    shapes = _one_example(graph).shapes()
    sizes = {tensor: _elements(shapes.get(tensor)) for tensor in readers}
    scale = WHOLE / max(1, sum(sizes.values()))
    for tensor, names in readers.items():
        cost, made = scale * sizes[tensor], number.get(producer(tensor), SINK)
        sides = {number.get(name, SINK) for name in names}
        if made != SINK and sides != {SOURCE}:
            to_float = network.node()
            # In float32 it would keep bits that a product does not have.
            network.edge(made, to_float, cost if producer(tensor) in rounded else NEVER)
            for side in sides - {SOURCE}:
                network.edge(to_float, side, NEVER)
        if made != SOURCE and sides != {SINK}:
            to_half = network.node()
            network.edge(to_half, made, cost)
            for side in sides - {SINK}:
                network.edge(side, to_half, NEVER)
        if made not in (SOURCE, SINK):
            network.edge(SOURCE, made, IN_FLOAT32 * cost)
    in_half = network.source_side() | {SOURCE}
    return Sides(half=frozenset(name for name, each in number.items() if each in in_half), skipped=tuple(skipped))


def float_inputs(node: Any) -> Iterator[tuple[int, str]]:
    """Yields the position and the tensor of each input of a node that has the node's own float type."""
    definition, kind, place = op_definition(node.op), type_attribute(node), 0
    for argument in definition.input_arg:
        count = attribute(node, argument.number_attr).i if argument.number_attr else 1
        for position in range(place, place + count):
            if argument.type_attr == kind:
                yield position, node.input[position]
        place += count


def type_attribute(node: Any) -> str:
    """Returns the name of the attribute that has the float type of a node."""
    return "Tparams" if node.op == "GatherV2" else "T"


def _kinds(
    editor: GraphEditor, dtype: tf.DType, outputs: frozenset[str], keep: Collection[str]
) -> tuple[list[str], list[str], list[Skip], set[str]]:
    """Returns the nodes that are free, the products in half precision, those that stay in float32, and all that come
    from products."""
    free, products, skipped = [], [], []
    fused = _fused_activations(editor, outputs)
    rounded = set[str]()  # the nodes whose results come from products
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Cast" and attribute(node, "SrcT").type == tf.bool.as_datatype_enum:
            rounded.add(name)  # 0 and 1
        known = node.op in (*PRODUCTS, *MOVING, *ARITHMETIC, *SMOOTH) or name in fused
        if not known or attribute(node, type_attribute(node)).type != FLOAT32_ENUM:
            continue
        inputs = [tensor for _, tensor in float_inputs(node)]
        read = [tensor for tensor in inputs if editor.constant(tensor) is None]
        reason = next((found for tensor in inputs if (found := _obstacle(editor.constant(tensor), dtype))), "")
        if node.op in PRODUCTS:
            reason = "the quantization leaves it in float" if name in keep else reason
            if not reason or name not in keep:
                rounded.add(name)
            if reason:
                skipped.append(Skip(name=name, kind=node.op, reason=reason))
            else:
                products.append(name)
            continue
        if read and not reason and all(producer(tensor) in rounded for tensor in read):
            rounded.add(name)
        arithmetic = node.op in ARITHMETIC or name in fused
        if not reason and (node.op in MOVING or (arithmetic and name in rounded)):
            free.append(name)
    return free, products, skipped, rounded


def _fused_activations(editor: GraphEditor, outputs: frozenset[str]) -> set[str]:
    """Returns the nodes of activations that TensorFlow computes in one kernel, which rounds once.

    These are swish, and GELU behind a matrix product with a bias. TensorFlow drops a bias of zeros before it looks.
    """
    fused = set[str]()
    for name, node in editor.nodes.items():
        if node.op == "Sigmoid" and name not in outputs and len(editor.consumers.get(name, ())) == 1:
            reader = editor.nodes[editor.consumers[name][0]]
            if reader.op == "Mul" and {node.input[0], _times_one(editor, node.input[0])} & {*reader.input}:
                fused.add(name)
        if node.op == "BiasAdd" and editor.nodes[producer(node.input[0])].op == "MatMul" and _is_felt(editor, node):
            found = find_activation(editor, name, outputs)
            if found is not None and found.name.startswith("Gelu"):
                fused.update(found.nodes)
    return fused


def _times_one(editor: GraphEditor, tensor: str) -> str:
    """Returns what a tensor is if it is a product with 1, such as the beta of Keras' swish, which TensorFlow drops."""
    node = editor.nodes[producer(tensor)]
    for factor, other in (node.input, node.input[::-1]) if node.op == "Mul" else ():
        value = editor.constant(factor)
        if value is not None and value.size == 1 and value == 1:
            return str(other)
    return tensor


def _is_felt(editor: GraphEditor, bias: Any) -> bool:
    values = editor.constant(bias.input[1])
    return values is None or bool(values.any())


def _obstacle(constant: np.ndarray | None, dtype: tf.DType) -> str:
    """Returns why a half type cannot hold a constant; "" if it can."""
    if constant is None or not constant.size:
        return ""
    with np.errstate(over="ignore"):
        rounded = constant.astype(dtype.as_numpy_dtype)
    if not np.isfinite(rounded).all():
        return f"its constants exceed the range of {dtype.name}"
    exact = constant.astype(np.float64)
    # Rounding loses at most half a step of each constant. Those near the smallest number lose more.
    if np.linalg.norm(rounded.astype(np.float64) - exact) > STEPS[dtype.name] * np.linalg.norm(exact):
        return f"its constants are below the range of {dtype.name}"
    return ""


def _readers(editor: GraphEditor, candidates: dict[str, int]) -> dict[str, list[str]]:
    """Returns the nodes that read the values of each tensor that a candidate makes or reads."""
    readers: dict[str, list[str]] = defaultdict(list)
    for name, node in editor.nodes.items():
        own = {tensor for _, tensor in float_inputs(node)} if name in candidates else set()
        for tensor in dict.fromkeys(node.input):
            made_here = producer(tensor) in candidates and node.op not in SHAPE_ONLY
            if made_here or (tensor in own and editor.constant(tensor) is None):
                readers[tensor].append(name)
    return readers


def _one_example(graph: FrozenGraph) -> FrozenGraph:
    """Returns the graph with inputs of one example, so that TensorFlow infers the sizes behind a Reshape too."""
    one = type(graph.graph_def)(versions=graph.graph_def.versions, library=graph.graph_def.library)
    sizes = {spec.name: spec.shape.as_list() for spec in graph.inputs.values() if spec.shape.rank}
    for node in graph.graph_def.node:
        if node.name in sizes:
            fixed = tf.TensorShape([sizes[node.name][0] or 1, *sizes[node.name][1:]]).as_proto()
            placeholder = one.node.add(name=node.name, op="Placeholder")
            placeholder.attr["dtype"].CopyFrom(node.attr["dtype"])
            placeholder.attr["shape"].shape.CopyFrom(fixed)
        else:
            one.node.append(node)
    return replace(graph, graph_def=one)


def _elements(shape: tf.TensorShape | None) -> int:
    """Returns the number of values of a tensor, a guess where sizes are open."""
    return OPEN if shape is None or shape.rank is None else math.prod(size or OPEN for size in shape.as_list())
