"""The shapes of a graph's tensors for one example, and the multiply-adds that follow from them.

TensorFlow infers shapes while it reads a graph. It has no rules for oneDNN's int8 kernels and for loops. So the graph
is read in parts, each of which ends with such a node, whose shapes are set here. A size that is known only in the run
counts as 1: in a loop, that is the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfopt.exporting.inspection.contents import without_formula
from tfopt.graph.edit import GraphDef, NodeDef, attribute, producer
from tfopt.graph.frozen import full_name, without_weights
from tfopt.profiling.cost.flops import COUNTED, multiply_adds
from tfopt.profiling.cost.walk import LOOPS

GEOMETRY = ("strides", "dilations", "explicit_paddings")


class Shapes:
    """The operations of a graph in TensorFlow, which runs none of them.

    Attributes:
        operations: The operations by name. Empty where TensorFlow cannot read the graph.
        notes: Why there are no shapes.
    """

    def __init__(self, nodes: Mapping[str, Any], fed: Mapping[str, Any]) -> None:
        self.graph = tf.Graph()
        self.operations: dict[str, Any] = {}
        self.notes: list[str] = []
        part = list(fed.values())
        try:
            for node in nodes.values():
                part.append(node)
                if node.op in _RULES:
                    self._read(part)
                    part = []
                    _RULES[node.op](self, self.operations[node.name])
            self._read(part)
        except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
            self.operations = {}
            self.notes.append(f"shapes are unknown: {str(error).splitlines()[0]}")

    def _read(self, nodes: Sequence[Any]) -> None:
        if not nodes:
            return
        own = {node.name for node in nodes}
        others = {each for node in nodes for each in node.input if producer(each) not in own}
        with self.graph.as_default():
            found = tf.graph_util.import_graph_def(
                without_weights(GraphDef(node=nodes)),
                input_map={full_name(each): self.tensor(each) for each in others},
                return_elements=[node.name for node in nodes],  # TensorFlow renames some
                name="",
            )
        self.operations |= zip((node.name for node in nodes), found, strict=True)

    def tensor(self, name: str) -> Any:
        """Returns a tensor, whose shape and dtype are known; None if the graph is not."""
        operation = self.operations.get(producer(name))
        return None if operation is None else operation.outputs[int(full_name(name).rpartition(":")[2])]

    def multiply_adds(self, node: Any) -> int | None:
        """Returns the multiply-adds of a node; None if a shape is unknown."""
        operation = self.operations.get(node.name)
        if node.op not in COUNTED:
            return without_formula(node.op)
        if operation is None:
            return None
        count = multiply_adds(operation)
        if count is None:
            for tensor in (*operation.inputs, *operation.outputs):
                _set_one(tensor)
            count = multiply_adds(operation)
            self.notes += ["sizes that are known only in the run count as 1"] if count is not None else []
        return count

    def number(self, tensor: Any) -> int | None:
        """Returns the value of a tensor that constants and shapes decide; None for any other."""
        if tensor is None or tensor.shape.rank != 0 or not tensor.dtype.is_integer:
            return None
        with self.graph.as_default():  # shape inference computes it, where it can
            try:
                size = tf.fill(tf.reshape(tensor, [1]), False).shape[0]
            except ValueError:  # a negative number
                return None
        return None if size is None else int(size)


def _set_one(tensor: Any) -> None:
    """Sets the unknown sizes of a tensor to 1."""
    if tensor.shape.rank is not None:
        tensor.set_shape([1 if size is None else size for size in tensor.shape])


def placeholder(name: str, dtype: Any, shape: Any) -> Any:
    """Returns the node of an input. A shape of None has an unknown rank."""
    node = NodeDef(name=name, op="Placeholder")
    node.attr["dtype"].type = tf.as_dtype(dtype).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    return node


def _convolution(shapes: Shapes, operation: Any) -> None:
    """Sets the shape of an int8 convolution to that of the float one."""
    node = operation.node_def
    kind = tf.raw_ops.Conv2D if node.op == "_FusedQuantizedConv2D" else tf.raw_ops.DepthwiseConv2dNative
    with tf.Graph().as_default():
        image, weights = (tf.compat.v1.placeholder(tf.float32, tensor.shape) for tensor in operation.inputs[:2])
        geometry = {key: list(found) for key in GEOMETRY if (found := attribute(node, key).list.i)}
        result = kind(input=image, filter=weights, padding=attribute(node, "padding").s.decode(), **geometry)
    operation.outputs[0].set_shape(result.shape)


def _product(shapes: Shapes, operation: Any) -> None:
    values, weights = operation.inputs[:2]
    operation.outputs[0].set_shape([*values.shape[:-1], weights.shape[-1]])


def _unchanged(shapes: Shapes, operation: Any) -> None:
    """Sets the shapes of results to those of the inputs in their places."""
    for result, source in zip(operation.outputs, operation.inputs, strict=False):
        if result.shape.is_compatible_with(source.shape):
            result.set_shape(source.shape)


def _item(shapes: Shapes, operation: Any) -> None:
    """Sets the shape of what one round of a loop reads: of an unknown size it has one."""
    _set_one(operation.outputs[0])


def _all_items(shapes: Shapes, operation: Any) -> None:
    """Sets the shape of what all rounds of a loop have written. The list was made for as many items as there are."""
    source, result = operation.inputs[0], operation.outputs[0]
    while source.op.type in (*LOOPS, "Identity"):
        source = source.op.inputs[source.value_index]
    if source.op.type == "TensorListReserve" and result.shape.rank is not None:
        result.set_shape([shapes.number(source.op.inputs[1]), *result.shape[1:]])
        _set_one(result)


_RULES: dict[str, Callable[[Shapes, Any], None]] = {
    **dict.fromkeys(("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D"), _convolution),
    "_QuantizedMatMul": _product,
    "_MklLayerNorm": _unchanged,
    "TensorListGetItem": _item,
    "TensorListStack": _all_items,
    **dict.fromkeys(LOOPS, _unchanged),
}
