"""Symbolic shape inference: which tensors of a graph have the same open sizes.

TensorFlow's shape inference calls every open size "unknown". It does not know whether two unknown sizes are equal. Here
an open size is named after the tensor and the axis where it first appears, mostly an input of the model. It keeps the
name through every op that keeps the size. So the shape of a tensor that is computed late can be read from a tensor that
is there early.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import op_definition
from tfopt.graph.edit import INT32, AttrValue, GraphEditor, attribute, is_nhwc, producer

Shapes = dict[str, tf.TensorShape]


@dataclass(frozen=True)
class OpenSize:
    """An open size: the size of one axis of one tensor, which the graph does not fix."""

    tensor: str
    axis: int


Size = int | OpenSize
Found = Sequence[Size | None] | None


class Sizes:
    """The sizes of every tensor of a graph: numbers, or open sizes.

    Nodes may be added to the graph and rewritten later, if each keeps its value.
    """

    def __init__(self, editor: GraphEditor, shapes: Shapes) -> None:
        self.editor = editor
        self._known: dict[str, tuple[Size, ...]] = {}
        self._written: dict[tuple[Size, ...], str] = {}
        self._shape_nodes: dict[str, str] = {}
        results: dict[str, list[str]] = defaultdict(list)
        for tensor in shapes:
            results[producer(tensor)].append(tensor)
        for name in editor.topological():
            for tensor in results[name]:
                self._follow(editor.nodes[name], tensor, shapes[tensor])

    def of(self, tensor: str) -> tuple[Size, ...] | None:
        """Returns a tensor's sizes; None if its rank is open."""
        return self._known.get(tensor)

    def _follow(self, node: Any, tensor: str, shape: tf.TensorShape) -> None:
        if shape.rank is None:
            return
        rule = _RULES.get(node.op) if ":" not in tensor or node.op in ("Split", "SplitV") else None
        found = rule(self, node) if rule else None
        if found is None or len(found) != shape.rank:
            found = [None] * shape.rank
        self._known[tensor] = tuple(
            static if static is not None else OpenSize(tensor, axis) if size is None else size
            for axis, (size, static) in enumerate(zip(found, shape.as_list(), strict=True))
        )

    def operands(self, node: Any) -> list[tuple[Size, ...]] | None:
        """Returns the sizes of each input of a node; None if the rank of one is open."""
        found = [self._known[source] for source in node.input if source in self._known]
        return found if len(found) == len(node.input) else None

    def integers(self, tensor: str) -> list[int] | None:
        """Returns the items of a constant of integers."""
        constant = self.editor.constant(tensor)
        if constant is None or not np.issubdtype(constant.dtype, np.integer):
            return None
        return [int(item) for item in constant.reshape(-1)]

    def values(self, tensor: str) -> list[Size | None] | None:
        """Returns the items of a tensor that holds sizes, with None for unknown items; None if all are unknown.

        A -1, which tells a Reshape to compute the size, is returned as it is.
        """
        node = self.editor.nodes[producer(tensor)]
        if ":" in tensor:
            return None
        if node.op == "Const":
            integers = self.integers(tensor)
            return None if integers is None else list(integers)
        if node.op == "Shape":
            known = self._known.get(node.input[0])
            return None if known is None else list(known)
        if node.op == "GatherV2":
            values, indices = self.values(node.input[0]), self.integers(node.input[1])
            return None if values is None or indices is None else [values[index] for index in indices]
        if node.op == "StridedSlice":
            return self._slice_of(node, self.values(node.input[0]))
        if node.op not in ("ConcatV2", "Pack", "Prod"):
            return None
        items: list[Size | None] = []
        for source in node.input[: None if node.op == "Pack" else -1]:
            part = self.values(source)
            if part is None:
                return None
            items += part
        return [_product(items)] if node.op == "Prod" else items

    def _slice_of(self, node: Any, values: list[Size | None] | None) -> list[Size | None] | None:
        ends = [self.integers(source) for source in node.input[1:4]]
        unusual = attribute(node, "ellipsis_mask").i or attribute(node, "new_axis_mask").i
        if values is None or unusual or any(end is None or len(end) != 1 for end in ends):
            return None
        begin, end, stride = (end[0] for end in ends if end is not None)
        if attribute(node, "shrink_axis_mask").i:
            return [values[begin]]
        return values[
            None if attribute(node, "begin_mask").i else begin : None if attribute(node, "end_mask").i else end : stride
        ]

    def for_reshape(self, sizes: Sequence[Size | None]) -> str | None:
        """Returns a tensor of sizes for a Reshape; None if two sizes are unknown, or one is not positive.

        With at most one open size it is a constant, which holds -1 for the open size.
        """
        items = [size if isinstance(size, int) else None for size in sizes]
        if items.count(None) <= 1 and all(item is None or item > 0 for item in items):
            return self.editor.add_constant(
                "sizes", np.array([-1 if item is None else item for item in items], np.int32)
            )
        known = [size for size in sizes if size is not None and size != -1]
        return self.written(known) if len(known) == len(sizes) else None

    def written(self, sizes: Sequence[Size]) -> str | None:
        """Returns a tensor of int32 that holds these sizes; None if one of them comes from a tensor of unknown type.

        The nodes that compute it are added to the graph once. They read only the shapes of the tensors that define the
        sizes.
        """
        key = tuple(sizes)
        if key not in self._written:
            editor = self.editor
            if all(isinstance(size, int) for size in key):
                self._written[key] = editor.add_constant("sizes", np.asarray(key, np.int32))
                return self._written[key]
            items = [self._item(size) for size in key]
            if any(item is None for item in items):
                return None
            count = AttrValue(i=len(items))
            packed = [item for item in items if item is not None]
            self._written[key] = editor.add("Pack", "sizes", packed, N=count, T=INT32, axis=AttrValue(i=0))
        return self._written[key]

    def _item(self, size: Size) -> str | None:
        if isinstance(size, int):
            return self.editor.add_constant("sizes/number", np.int32(size))
        shape = self._shape_of(size.tensor)
        if shape is None:
            return None
        ends = [
            self.editor.add_constant("sizes/end", np.array([end], np.int32)) for end in (size.axis, size.axis + 1, 1)
        ]
        kinds = {"T": INT32, "Index": INT32, "shrink_axis_mask": AttrValue(i=1)}
        return self.editor.add("StridedSlice", "sizes/item", [shape, *ends], **kinds)

    def _shape_of(self, tensor: str) -> str | None:
        if tensor not in self._shape_nodes:
            kind = _dtype(self.editor.nodes[producer(tensor)], int(tensor.partition(":")[2] or 0))
            if kind is None:
                return None
            self._shape_nodes[tensor] = self.editor.add("Shape", "sizes/shape", [tensor], T=kind, out_type=INT32)
        return self._shape_nodes[tensor]


def _dtype(node: Any, output: int) -> AttrValue | None:
    """Returns the dtype of one of a node's results; None if a result of the op can be a list of tensors."""
    definition = op_definition(node.op)
    if definition is None or output >= len(definition.output_arg):
        return None
    if any(argument.number_attr or argument.type_list_attr for argument in definition.output_arg):
        return None
    argument = definition.output_arg[output]
    return attribute(node, argument.type_attr) if argument.type_attr else AttrValue(type=argument.type)


def _product(items: Sequence[Size | None]) -> Size | None:
    numbers = [item for item in items if isinstance(item, int)]
    return math.prod(numbers) if len(numbers) == len(items) else None


def _broadcast(operands: Sequence[Sequence[Size | None]]) -> Found:
    """Returns the shape after broadcasting. Of two different open sizes either may be 1, so the result is unknown."""
    rank = max(len(each) for each in operands)
    result: list[Size | None] = []
    for axis in range(-rank, 0):
        sizes = {each[axis] for each in operands if len(each) >= -axis} - {1}
        numbers = [size for size in sizes if isinstance(size, int)]
        result.append(numbers[0] if numbers else 1 if not sizes else sizes.pop() if len(sizes) == 1 else None)
    return result


def _of_all(sizes: Sizes, node: Any) -> Found:
    operands = sizes.operands(node)
    return None if operands is None else _broadcast(operands)


def _transpose(sizes: Sizes, node: Any) -> Found:
    before, order = sizes.of(node.input[0]), sizes.integers(node.input[1])
    return None if before is None or order is None else [before[axis] for axis in order]


def _product_of_matrices(sizes: Sizes, node: Any) -> Found:
    operands = sizes.operands(node)
    if operands is None:
        return None
    left, right = operands[:2]
    flags = ("transpose_a", "transpose_b") if node.op == "MatMul" else ("adj_x", "adj_y")
    rows, columns = left[-1 if attribute(node, flags[0]).b else -2], right[-2 if attribute(node, flags[1]).b else -1]
    batch = _broadcast([left[:-2], right[:-2]]) if len(left) > 2 or len(right) > 2 else []
    return [*(batch or []), rows, columns]


def _einsum(sizes: Sizes, node: Any) -> Found:
    operands, (before, _, result) = sizes.operands(node), attribute(node, "equation").s.decode().partition("->")
    labels = before.split(",")
    if operands is None or "." in before or [len(each) for each in labels] != [len(each) for each in operands]:
        return None
    found: dict[str, Size] = {}
    for label, size in zip("".join(labels), itertools.chain(*operands), strict=True):
        if not isinstance(found.get(label), int):
            found[label] = size if isinstance(size, int) else found.get(label, size)
    return [found.get(label) for label in result]


def _reshape(sizes: Sizes, node: Any) -> Found:
    values = sizes.values(node.input[1])
    return None if values is None else [None if value == -1 else value for value in values]


def _expand(sizes: Sizes, node: Any) -> Found:
    before, axis = sizes.of(node.input[0]), sizes.integers(node.input[1])
    if before is None or axis is None:
        return None
    position = axis[0] % (len(before) + 1)
    return [*before[:position], 1, *before[position:]]


def _squeeze(sizes: Sizes, node: Any) -> Found:
    before, axes = sizes.of(node.input[0]), attribute(node, "squeeze_dims").list.i
    if before is None or not axes:
        return None
    dropped = {axis % len(before) for axis in axes}
    return [size for axis, size in enumerate(before) if axis not in dropped]


def _reduce(sizes: Sizes, node: Any) -> Found:
    before, axes = sizes.of(node.input[0]), sizes.integers(node.input[1])
    if before is None or axes is None:
        return None
    reduced = {axis % len(before) for axis in axes}
    kept: list[Size | None] = [1 if axis in reduced else size for axis, size in enumerate(before)]
    return kept if attribute(node, "keep_dims").b else [size for axis, size in enumerate(before) if axis not in reduced]


def _without_axis(before: Sequence[Size] | None, axis: list[int] | None) -> Found:
    if before is None or axis is None:
        return None
    return [None if position == axis[0] % len(before) else size for position, size in enumerate(before)]


def _concat(sizes: Sizes, node: Any) -> Found:
    return _without_axis(sizes.of(node.input[0]), sizes.integers(node.input[-1]))


def _split(sizes: Sizes, node: Any) -> Found:
    value, axis = (1, 0) if node.op == "Split" else (0, 2)
    return _without_axis(sizes.of(node.input[value]), sizes.integers(node.input[axis]))


def _gather(sizes: Sizes, node: Any) -> Found:
    values, indices, axis = sizes.of(node.input[0]), sizes.of(node.input[1]), sizes.integers(node.input[2])
    if values is None or indices is None or axis is None or attribute(node, "batch_dims").i:
        return None
    position = axis[0] % len(values)
    return [*values[:position], *indices, *values[position + 1 :]]


def _slice(sizes: Sizes, node: Any) -> Found:
    before, begin = sizes.of(node.input[0]), sizes.integers(node.input[1])
    strides = sizes.integers(node.input[3])
    if before is None or begin is None or strides is None or len(begin) > len(before):
        return None
    if attribute(node, "ellipsis_mask").i or attribute(node, "new_axis_mask").i:
        return None
    result: list[Size | None] = []
    for axis, size in enumerate(before):
        bit = 1 << axis
        if axis < len(begin) and attribute(node, "shrink_axis_mask").i & bit:
            continue
        from_start = axis >= len(begin) or begin[axis] == 0 or bool(attribute(node, "begin_mask").i & bit)
        to_end = axis >= len(begin) or (strides[axis] == 1 and bool(attribute(node, "end_mask").i & bit))
        result.append(size if from_start and to_end else None)
    return result


def _pad(sizes: Sizes, node: Any) -> Found:
    before, paddings = sizes.of(node.input[0]), sizes.editor.constant(node.input[1])
    if before is None or paddings is None:
        return None
    return [None if amounts.any() else size for size, amounts in zip(before, paddings, strict=True)]


def _windows(sizes: Sizes, node: Any) -> Found:
    """A convolution or pooling: an image axis keeps its size with SAME padding and stride 1."""
    before = sizes.of(node.input[0])
    if before is None or len(before) != 4 or not is_nhwc(node):
        return None
    same = attribute(node, "padding").s == b"SAME"
    strides = attribute(node, "strides").list.i
    return [before[0], *(before[axis] if same and strides[axis] == 1 else None for axis in (1, 2)), None]


_UNARY = (
    *("BiasAdd", "Neg", "Square", "Exp", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Tanh", "Sigmoid", "Erf", "Erfc"),
    *("Softplus", "Softmax", "LogSoftmax", "Rsqrt", "Sqrt", "Abs", "Sign", "Log", "Identity", "StopGradient", "Cast"),
    *("LogicalNot", "ReverseV2", "ZerosLike", "OnesLike", "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars"),
)
_BINARY = (
    *("Add", "AddV2", "Sub", "Mul", "RealDiv", "Pow", "Maximum", "Minimum", "SquaredDifference", "LogicalAnd"),
    *("LogicalOr", "Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual", "SelectV2"),
)
_RULES: dict[str, Callable[[Sizes, Any], Found]] = {
    **dict.fromkeys(_UNARY, lambda sizes, node: sizes.of(node.input[0])),
    **dict.fromkeys(_BINARY, _of_all),
    **dict.fromkeys(("MatMul", "BatchMatMulV2"), _product_of_matrices),
    **dict.fromkeys(("Mean", "Sum", "Max", "Min", "Prod", "All", "Any"), _reduce),
    **dict.fromkeys(("Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"), _windows),
    **dict.fromkeys(("Split", "SplitV"), _split),
    "Transpose": _transpose,
    "Einsum": _einsum,
    "Reshape": _reshape,
    "Fill": lambda sizes, node: sizes.values(node.input[0]),
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "ConcatV2": _concat,
    "GatherV2": _gather,
    "StridedSlice": _slice,
    "Pad": _pad,
}
