"""Brings every product with a constant matrix to one form, which is what folding and the int8 kernels look for.

Keras writes the same thing in several ways. Dense on a tensor of rank three is a Tensordot, around which shapes are
computed at every call; an EinsumDense or a projection of MultiHeadAttention is a BatchMatMulV2; bias and activation
follow behind a Reshape. Here all of them become

    Reshape [-1, K] -> MatMul -> bias, activation -> Reshape

which is exact, and spares the arithmetic on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.batched_products import moves_nothing
from tfopt.graph.edit import AttrValue, GraphEditor, attribute, dtype_attr, producer

Shapes = dict[str, tf.TensorShape]
ELEMENTWISE = (
    *("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv", "Neg", "Square", "Pow", "Exp", "Maximum", "Minimum"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Tanh", "Sigmoid", "Erf", "Erfc", "Softplus"),
)


def unify_products(editor: GraphEditor, infer: Callable[[], Shapes], outputs: frozenset[str]) -> None:
    """Rewrites a graph's products with constant matrices. Nodes whose values leave the graph keep their names.

    Args:
        editor: The graph.
        infer: Returns each tensor's shape, as far as TensorFlow infers it from the graph as it is then.
        outputs: Nodes whose values leave the graph.
    """
    shapes = infer()
    while _fix_sizes(editor, shapes):  # what is fixed lets TensorFlow infer more
        shapes = infer()
    for name in editor.topological():
        node = editor.nodes[name]
        order = editor.constant(node.input[1]) if node.op == "Transpose" and name not in outputs else None
        if order is not None and moves_nothing(order):
            editor.redirect(name, node.input[0])
        elif node.op == "BatchMatMulV2":
            _flatten(editor, node, shapes)
    _merge_reshapes(editor, infer(), outputs)
    shapes = infer()
    origins: dict[str, str] = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op in ELEMENTWISE:
            _sink_reshape(editor, node, shapes, origins)
    _merge_reshapes(editor, infer(), outputs)
    editor.remove_unread({*outputs, *(name for name, node in editor.nodes.items() if node.op == "Placeholder")})


def _fix_sizes(editor: GraphEditor, shapes: Shapes) -> bool:
    """Makes constants of the sizes of Reshapes that follow from the graph's own shapes. Returns whether it did."""
    fixed = False
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op != "Reshape" or editor.constant(node.input[1]) is not None:
            continue
        sizes = _sizes(editor, shapes, node.input[1])
        depth = _depth_of_products(editor, name)
        if depth is not None:
            sizes = [None, depth]
        if sizes is not None and sizes.count(None) <= 1 and all(size is None or size > 0 for size in sizes):
            _set_sizes(editor, node, [-1 if size is None else size for size in sizes])
            fixed = True
    return fixed


def _depth_of_products(editor: GraphEditor, name: str) -> int | None:
    """Returns the number of columns that a matrix must have, since products with constant matrices read it."""
    readers = [editor.nodes[reader] for reader in editor.consumers.get(name, ())]
    for reader in readers:
        if reader.op == "MatMul" and reader.input[0] == name and not attribute(reader, "transpose_a").b:
            weights = editor.constant(reader.input[1])
            if weights is not None:
                return int(weights.shape[1 if attribute(reader, "transpose_b").b else 0])
    return None


def _sizes(editor: GraphEditor, shapes: Shapes, tensor: str) -> list[int | None] | None:
    """Returns what a tensor of sizes holds, None for a size that is open; None where it is computed otherwise."""
    node = editor.nodes[producer(tensor)]
    if ":" in tensor:
        return None
    if node.op == "Const":
        value = editor.value(tensor)
        return [int(item) for item in value.reshape(-1)] if np.issubdtype(value.dtype, np.integer) else None
    if node.op == "Shape":
        shape = shapes.get(node.input[0])
        return None if shape is None or shape.rank is None else list(shape.as_list())
    if node.op == "GatherV2":
        values, indices = (_sizes(editor, shapes, source) for source in node.input[:2])
        if values is None or indices is None or any(index is None for index in indices):
            return None
        return [values[index] for index in indices if index is not None]
    if node.op == "StridedSlice":
        return _slice_of(editor, node, _sizes(editor, shapes, node.input[0]))
    if node.op not in ("ConcatV2", "Pack", "Prod"):
        return None
    parts = [_sizes(editor, shapes, source) for source in node.input[: None if node.op == "Pack" else -1]]
    items: list[int | None] = []
    for part in parts:
        if part is None:
            return None
        items += part
    if node.op == "Prod":
        known = [item for item in items if item is not None]
        return [int(np.prod(known)) if len(known) == len(items) else None]
    return items


def _slice_of(editor: GraphEditor, node: Any, values: list[int | None] | None) -> list[int | None] | None:
    ends = [editor.constant(source) for source in node.input[1:4]]
    unusual = attribute(node, "ellipsis_mask").i or attribute(node, "new_axis_mask").i
    if values is None or unusual or any(end is None or end.size != 1 for end in ends):
        return None
    begin, end, stride = (int(end.reshape(-1)[0]) for end in ends if end is not None)
    if attribute(node, "shrink_axis_mask").i:
        return [values[begin]]
    return values[
        None if attribute(node, "begin_mask").i else begin : None if attribute(node, "end_mask").i else end : stride
    ]


def _set_sizes(editor: GraphEditor, node: Any, sizes: Sequence[int]) -> None:
    constant = editor.add_constant(f"{node.name}/sizes", np.asarray(sizes, np.int32))
    editor.set_inputs(node.name, [node.input[0], constant])
    node.attr["Tshape"].CopyFrom(dtype_attr(tf.int32))


def _flatten(editor: GraphEditor, node: Any, shapes: Shapes) -> None:
    """Makes a MatMul of a batched product whose right operand is one matrix for the whole batch."""
    weights = editor.constant(node.input[1])
    if weights is None or weights.ndim < 2 or weights.size != weights.shape[-1] * weights.shape[-2]:
        return
    shape = shapes[node.input[0]]
    if shape.rank is None or attribute(node, "adj_x").b or attribute(node, "adj_y").b or weights.ndim > shape.rank:
        return
    if shape[:-1].as_list().count(None) > 1:
        return
    dtype = node.attr["T"]
    depth, width = weights.shape[-2:]
    sizes = editor.add_constant(f"{node.name}/flat/sizes", np.asarray([-1, depth], np.int32))
    matrix = editor.add_constant(f"{node.name}/matrix", weights.reshape(depth, width))
    flat = editor.add("Reshape", f"{node.name}/flat", [node.input[0], sizes], T=dtype, Tshape=dtype_attr(tf.int32))
    product = editor.add(
        "MatMul",
        f"{node.name}/product",
        [flat, matrix],
        T=dtype,
        transpose_a=AttrValue(b=False),
        transpose_b=AttrValue(b=False),
    )
    # The product's own name goes to the Reshape, whose value it is.
    node.op = "Reshape"
    node.ClearField("attr")
    node.attr["T"].CopyFrom(dtype)
    editor.set_inputs(node.name, [product, node.input[1]])
    _set_sizes(editor, node, [*(-1 if size is None else size for size in shape[:-1].as_list()), width])


def _sink_reshape(editor: GraphEditor, node: Any, shapes: Shapes, origins: dict[str, str]) -> None:
    """Computes an elementwise node on the matrix that its operands are reshaped from, and reshapes the result.

    Where an operand is a constant for each of the last axes, it becomes one for each column of the matrix. Two operands
    must originate from one matrix: what is reshaped from two may be broadcast.
    """
    if attribute(node, "data_format").s == b"NCHW":  # a bias along another axis than the last
        return
    sources = {tensor: rows for tensor in node.input if (rows := _rows(editor, shapes, tensor)) is not None}
    matrices = [editor.nodes[tensor].input[0] for tensor in sources]
    if len({origins.get(matrix, matrix) for matrix in matrices}) != 1 or len(set(sources.values())) != 1:
        return
    rank, row = next(iter(sources.values()))
    operands = []
    for tensor in node.input:
        constant = editor.constant(tensor)
        if tensor in sources:
            operands.append(editor.nodes[tensor].input[0])
        elif editor.is_number(tensor):
            operands.append(tensor)
        elif constant is not None and (spread := _per_column(constant, row, rank)) is not None:
            operands.append(editor.add_constant(f"{node.name}/row", spread))
        else:
            return
    attributes = {key: value for key, value in node.attr.items() if not key.startswith("_")}
    op, dtype = node.op, attributes["T"]
    if op == "BiasAdd" and len(row) > 1:
        op, attributes = "AddV2", {"T": dtype}
    result = editor.add(op, f"{node.name}/flat", operands, **attributes)
    shapes[result] = tf.TensorShape([None, int(np.prod(row))])
    origins[result] = origins.get(matrices[0], matrices[0])
    # The node keeps its name, which may be what the outside knows, and becomes the Reshape.
    reshape = editor.nodes[next(iter(sources))]
    node.op = "Reshape"
    node.ClearField("attr")
    node.attr["T"].CopyFrom(dtype)
    node.attr["Tshape"].CopyFrom(reshape.attr["Tshape"])
    editor.set_inputs(node.name, [result, reshape.input[1]])


def _rows(editor: GraphEditor, shapes: Shapes, tensor: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns to how many axes a matrix is reshaped, and to which last ones each row; None if it is no such tensor."""
    node = editor.nodes[producer(tensor)]
    if node.op != "Reshape":
        return None
    shape, sizes = shapes.get(node.input[0]), _sizes(editor, shapes, node.input[1])
    if shape is None or shape.rank != 2 or shape[-1] is None or sizes is None:
        return None
    for count in range(1, len(sizes)):
        row = tuple(size for size in sizes[-count:] if size is not None and size > 0)
        if len(row) == count and np.prod(row) == shape[-1]:
            return len(sizes), row
    return None


def _per_column(constant: np.ndarray, row: Sequence[int], rank: int) -> np.ndarray | None:
    """Returns a constant that is broadcast against reshaped rows as one value for each column.

    None if rows differ, or if the constant has more axes than the reshaped matrix and so adds to them.
    """
    shape = constant.shape
    if len(shape) > rank:
        return None
    while len(shape) > len(row) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > len(row):
        return None
    return np.broadcast_to(constant.reshape(shape), row).reshape(-1)


def _merge_reshapes(editor: GraphEditor, shapes: Shapes, outputs: frozenset[str]) -> None:
    """Lets each Reshape of a Reshape read what that reads, and drops it where that has the shape already."""
    for name in editor.topological():
        node = editor.nodes[name]
        sizes = editor.constant(node.input[1]) if node.op == "Reshape" else None
        if sizes is None:
            continue
        source = node.input[0]
        while ":" not in source and editor.nodes[source].op == "Reshape":
            source = editor.nodes[source].input[0]
        shape = shapes.get(source)
        if name not in outputs and shape is not None and shape.rank == 2 and sizes.tolist() == [-1, shape[1]]:
            editor.redirect(name, source)
        elif source != node.input[0]:
            editor.set_inputs(name, [source, node.input[1]])
