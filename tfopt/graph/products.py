"""Rewrites every product with a constant matrix in one form, which folding and the int8 kernels know.

Keras writes such products in several forms. Dense on a tensor of rank three is a Tensordot, which computes shapes at
every call. An EinsumDense or a projection of MultiHeadAttention is a BatchMatMulV2, or an Einsum if the length of the
sequence is open. Bias and activation follow after a Reshape. All of these forms become

    Reshape [-1, K] -> MatMul -> bias, activation -> Reshape

The values are exactly the same. One open size is the -1 of the last Reshape.
Several open sizes are computed from the tensors that define them, mostly the model's inputs, in place of tensors that
are computed late: a Dense on a sequence of open length reshapes its result to the shape of its input, and a recurrent
layer of Keras with a mask computes a whole step of its cell only to know the shape of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.batched_products import axes_order, become_transpose, einsum_labels, moves_nothing, transposed
from tfopt.graph.edit import INT32, AttrValue, GraphEditor, attribute, producer
from tfopt.graph.sizes import OpenSize, Shapes, Size, Sizes

ELEMENTWISE = (
    *("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv", "Neg", "Square", "Pow", "Exp", "Maximum", "Minimum"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Tanh", "Sigmoid", "Erf", "Erfc", "Softplus"),
)


def canonicalize_products(editor: GraphEditor, infer: Callable[[], Shapes], outputs: frozenset[str]) -> None:
    """Rewrites the products of a graph with constant matrices. Outputs of the graph keep their names.

    `infer` returns the shape of each tensor at the time of the call, as far as TensorFlow infers it.
    """
    sizes = Sizes(editor, infer())
    while _fix_sizes(editor, sizes):  # with fixed sizes TensorFlow infers more
        sizes = Sizes(editor, infer())
    for name in editor.topological():
        node = editor.nodes[name]
        order = editor.constant(node.input[1]) if node.op == "Transpose" and name not in outputs else None
        if order is not None and moves_nothing(order):
            editor.redirect(name, node.input[0])
        elif node.op == "BatchMatMulV2":
            flatten_product(editor, node, sizes)
        elif node.op == "Einsum":
            flatten_einsum(editor, node, sizes)
    _merge_reshapes(editor, infer(), outputs)
    shapes = infer()
    sizes = Sizes(editor, shapes)
    roots: dict[str, str] = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op in ELEMENTWISE:
            _sink_reshape(editor, node, shapes, sizes, roots)
    _merge_reshapes(editor, infer(), outputs)
    read_shapes_early(sizes, outputs)
    editor.remove_unread({*outputs, *(name for name, node in editor.nodes.items() if node.op == "Placeholder")})


def _fix_sizes(editor: GraphEditor, sizes: Sizes) -> bool:
    """Replaces the sizes of Reshapes by constants where the graph's shapes fix them. Returns whether it changed any."""
    fixed = False
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op != "Reshape" or editor.constant(node.input[1]) is not None:
            continue
        depth = _depth_of_products(editor, name)
        values = sizes.values(node.input[1]) if depth is None else [None, depth]
        numbers = [] if values is None else [value if isinstance(value, int) else None for value in values]
        if values is not None and numbers.count(None) <= 1 and all(item is None or item > 0 for item in numbers):
            constant = np.array([-1 if item is None else item for item in numbers], np.int32)
            editor.set_inputs(name, [node.input[0], editor.add_constant(f"{name}/sizes", constant)])
            node.attr["Tshape"].CopyFrom(INT32)
            fixed = True
    return fixed


def _depth_of_products(editor: GraphEditor, name: str) -> int | None:
    """Returns the number of columns of a matrix, from the constant matrix that it is multiplied by; None if unknown."""
    readers = [editor.nodes[reader] for reader in editor.consumers.get(name, ())]
    for reader in readers:
        if reader.op == "MatMul" and reader.input[0] == name and not attribute(reader, "transpose_a").b:
            weights = editor.constant(reader.input[1])
            if weights is not None:
                return int(weights.shape[1 if attribute(reader, "transpose_b").b else 0])
    return None


def _sink_reshape(editor: GraphEditor, node: Any, shapes: Shapes, sizes: Sizes, roots: dict[str, str]) -> None:
    """Moves a Reshape from the operands of an elementwise node to its result, so that the node computes on a matrix.

    An operand that is a constant over the last axes becomes a constant with one value for each column of the matrix.
    If several operands are reshaped, all must come from one matrix. Otherwise they could be broadcast.
    """
    if attribute(node, "data_format").s == b"NCHW":  # a bias along another axis than the last
        return
    sources = {tensor: rows for tensor in node.input if (rows := _rows(editor, shapes, sizes, tensor)) is not None}
    matrices = [editor.nodes[tensor].input[0] for tensor in sources]
    if len({roots.get(matrix, matrix) for matrix in matrices}) != 1 or len(set(sources.values())) != 1:
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
    result = editor.add(op, f"{node.name}/flat", operands, origin=node.name, **attributes)
    shapes[result] = tf.TensorShape([None, int(np.prod(row))])
    roots[result] = roots.get(matrices[0], matrices[0])
    reshape = editor.nodes[next(iter(sources))]
    editor.become(node.name, "Reshape", [result, reshape.input[1]], T=dtype, Tshape=reshape.attr["Tshape"])


def _rows(editor: GraphEditor, shapes: Shapes, sizes: Sizes, tensor: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns the rank of a tensor that is reshaped from a matrix, and the axes of each row; None for other tensors."""
    node = editor.nodes[producer(tensor)]
    if node.op != "Reshape":
        return None
    shape, values = shapes.get(node.input[0]), sizes.values(node.input[1])
    if shape is None or shape.rank != 2 or shape[-1] is None or values is None:
        return None
    for count in range(1, len(values)):
        row = tuple(size for size in values[-count:] if isinstance(size, int) and size > 0)
        if len(row) == count and np.prod(row) == shape[-1]:
            return len(values), row
    return None


def _per_column(constant: np.ndarray, row: Sequence[int], rank: int) -> np.ndarray | None:
    """Returns a constant operand of reshaped rows as one value for each column of the matrix.

    None if the constant differs from row to row, or if it has more axes than the reshaped matrix.
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
    """Merges each Reshape of a Reshape into one, and removes it where the tensor has the shape already."""
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


def flatten_product(editor: GraphEditor, node: Any, sizes: Sizes) -> None:
    """Rewrites a BatchMatMulV2 whose right operand is one constant matrix for the whole batch."""
    weights, before = editor.constant(node.input[1]), sizes.of(node.input[0])
    if weights is None or weights.ndim < 2 or weights.size != weights.shape[-1] * weights.shape[-2]:
        return
    if before is None or attribute(node, "adj_x").b or attribute(node, "adj_y").b or weights.ndim > len(before):
        return
    depth, width = weights.shape[-2:]
    found = _multiply(editor, node, node.input[0], weights.reshape(depth, width), [*before[:-1], width], sizes)
    if found is not None:
        _become_reshape(editor, node, found)


def flatten_einsum(editor: GraphEditor, node: Any, sizes: Sizes) -> None:
    """Rewrites an Einsum of a tensor and constant weights, if each axis of the weights is summed over or is new."""
    operands, result = einsum_labels(node)
    weights = [editor.constant(tensor) for tensor in node.input]
    if len(operands) != 2 or sum(each is None for each in weights) != 1:
        return
    position = 0 if weights[0] is None else 1
    held, before = weights[1 - position], sizes.of(node.input[position])
    rows, columns = operands[position], operands[1 - position]
    if held is None or before is None or any(len({*labels}) != len(labels) for labels in (rows, columns, result)):
        return
    inner = [label for label in columns if label in rows]
    outer = [label for label in rows if label not in inner]
    made = [label for label in result if label in columns]
    if not (inner and outer and made) or sorted([*outer, *made]) != sorted(result) or {*inner} & {*made}:
        return
    if len(columns) != len(inner) + len(made):  # an axis of the weights is summed that the tensor lacks
        return
    extents = [held.shape[columns.index(label)] for label in made]
    matrix = held.transpose(axes_order(columns, [*inner, *made])).reshape(-1, int(np.prod(extents)))
    source = transposed(editor, f"{node.name}/left", node.input[position], rows, [*outer, *inner], node.attr["T"])
    after = [*(before[rows.index(label)] for label in outer), *extents]
    found = _multiply(editor, node, source, matrix, after, sizes)
    if found is None:
        return
    if [*outer, *made] == [*result]:
        _become_reshape(editor, node, found)
        return
    reshaped = editor.add("Reshape", f"{node.name}/axes", found, T=node.attr["T"], Tshape=INT32)
    become_transpose(editor, node, reshaped, axes_order([*outer, *made], result))


def _multiply(
    editor: GraphEditor, node: Any, source: str, matrix: np.ndarray, after: Sequence[Size], sizes: Sizes
) -> list[str] | None:
    """Adds the product of a tensor's rows, which are its last axes, and a matrix, in place of `node`.

    Returns it and the sizes to reshape it to, which are `after`; None if those are unknown.
    """
    shape = sizes.for_reshape(after)
    if shape is None:
        return None
    dtype = node.attr["T"]
    rows = editor.add_constant(f"{node.name}/rows/sizes", np.asarray([-1, len(matrix)], np.int32))
    weights = editor.add_constant(f"{node.name}/matrix", matrix)
    flat = editor.add("Reshape", f"{node.name}/rows", [source, rows], T=dtype, Tshape=INT32)
    no = AttrValue(b=False)
    product = editor.add(
        "MatMul", f"{node.name}/product", [flat, weights], origin=node.name, T=dtype, transpose_a=no, transpose_b=no
    )
    return [product, shape]


def _become_reshape(editor: GraphEditor, node: Any, inputs: Sequence[str]) -> None:
    editor.become(node.name, "Reshape", inputs, T=node.attr["T"], Tshape=INT32)


def read_shapes_early(sizes: Sizes, outputs: frozenset[str]) -> None:
    """Rewrites nodes that need only the shape of their input, so that they read the tensors that define its sizes."""
    editor = sizes.editor
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Reshape" and editor.constant(node.input[1]) is None:
            values = sizes.values(node.input[1])
            found = None if values is None else sizes.for_reshape(values)
            if found is not None:
                editor.set_inputs(name, [node.input[0], found])
                node.attr["Tshape"].CopyFrom(INT32)
        elif node.op in ("Shape", "ZerosLike", "OnesLike") and name not in outputs:
            source = node.input[0]
            known = sizes.of(source)
            defines = any(isinstance(size, OpenSize) and size.tensor == source for size in known or ())
            if known is not None and not defines:
                _from_sizes(sizes, node, known)


def _from_sizes(sizes: Sizes, node: Any, known: tuple[Size, ...]) -> None:
    """Redirects the consumers of a Shape, ZerosLike or OnesLike to a tensor that is computed from sizes only."""
    editor = sizes.editor
    if node.op == "Shape" and attribute(node, "out_type").type not in (0, tf.int32.as_datatype_enum):
        return
    found = sizes.written(known)
    if found is not None and node.op != "Shape":
        kind = tf.as_dtype(node.attr["T"].type).as_numpy_dtype
        value = editor.add_constant(f"{node.name}/value", np.asarray(node.op == "OnesLike", kind))
        found = editor.add("Fill", f"{node.name}/fill", [found, value], T=node.attr["T"], index_type=INT32)
    if found is not None:
        editor.redirect(node.name, found)
