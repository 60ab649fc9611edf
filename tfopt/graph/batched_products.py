"""Rewrites products of two tensors, as in attention, so that they need few transposes.

An Einsum becomes a BatchMatMulV2, with transposes of its operands and of its result where the order of axes differs. A
BatchMatMulV2 can read either operand transposed, and A^T B^T = (B A)^T. So most of the transposes become attributes of
the product. The attention of Keras has two forms. Both keep one transpose each for queries, keys, values and result.
The scale of the scores goes into the weights of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import INT32, AttrValue, GraphEditor, attribute, producer

PRODUCT = "BatchMatMulV2"


def canonicalize_batched_products(editor: GraphEditor, outputs: frozenset[str]) -> None:
    """Rewrites Einsums and batched products so that fewer tensors are transposed. Values change by rounding only."""
    for name in editor.topological():
        if editor.nodes[name].op == "Einsum":
            _expand(editor, editor.nodes[name])
    _absorb_transposes(editor, outputs)
    for name in editor.topological():
        if editor.nodes[name].op == "Mul" and name not in outputs:
            _move_scale(editor, editor.nodes[name], outputs)


def _expand(editor: GraphEditor, node: Any) -> None:
    """Turns an Einsum into a BatchMatMulV2, if it sums over one axis and each operand has one axis of its own."""
    operands, result = einsum_labels(node)
    if len(operands) != 2 or any(len(set(labels)) != len(labels) for labels in (*operands, result)):
        return
    left, right = operands
    common = [label for label in result if label in left and label in right]
    rows, columns, inner = (
        [label for label in one if (label in other, label in result) == where]
        for one, other, where in (
            (left, right, (False, True)),
            (right, left, (False, True)),
            (left, right, (True, False)),
        )
    )
    counts = len(rows), len(columns), len(inner)
    if not common or counts != (1, 1, 1) or len(left) != len(common) + 2 or len(right) != len(left):
        return
    dtype = node.attr["T"]
    before = [
        transposed(editor, f"{node.name}/{side}", source, labels, [*common, *order], dtype)
        for side, source, labels, order in (
            ("left", node.input[0], left, (*rows, *inner)),
            ("right", node.input[1], right, (*inner, *columns)),
        )
    ]
    order = axes_order([*common, *rows, *columns], result)
    if moves_nothing(order):
        _become_product(editor, node, before, (False, False), dtype)
        return
    no = AttrValue(b=False)
    product = editor.add(PRODUCT, f"{node.name}/product", before, origin=node.name, T=dtype, adj_x=no, adj_y=no)
    become_transpose(editor, node, product, order)


def become_transpose(editor: GraphEditor, node: Any, source: str, order: np.ndarray) -> None:
    """Turns a node, which keeps its name, into the transpose of another tensor."""
    inputs = [source, editor.add_constant(f"{node.name}/order", order)]
    editor.become(node.name, "Transpose", inputs, T=node.attr["T"], Tperm=INT32)


def _become_product(
    editor: GraphEditor, node: Any, operands: Sequence[str], transposed: tuple[bool, bool], dtype: AttrValue
) -> None:
    left, right = (AttrValue(b=each) for each in transposed)
    editor.become(node.name, PRODUCT, operands, T=dtype, adj_x=left, adj_y=right)


def einsum_labels(node: Any) -> tuple[list[str], str]:
    """Returns the axes of the operands and of the result. Without a result or with "..." there are no operands."""
    equation = attribute(node, "equation").s.decode()
    left, arrow, result = equation.replace(" ", "").partition("->")
    return ([], "") if not arrow or "." in equation else (left.split(","), result)


def axes_order(before: Sequence[str], after: Sequence[str]) -> np.ndarray:
    """Returns the permutation that brings axes named `before` into the order of `after`."""
    return np.array([before.index(label) for label in after], np.int32)


def moves_nothing(order: np.ndarray) -> bool:
    """Whether a permutation of axes is the identity."""
    return order.tolist() == list(range(order.size))


def transposed(
    editor: GraphEditor, name: str, tensor: str, before: Sequence[str], after: Sequence[str], dtype: AttrValue
) -> str:
    """Returns a tensor with its axes in another order; adds a node `name` if the order differs."""
    order = axes_order(before, after)
    if moves_nothing(order):
        return tensor
    constant = editor.add_constant(f"{name}/order", order)
    return editor.add("Transpose", name, [tensor, constant], T=dtype, Tperm=INT32)


def _absorb_transposes(editor: GraphEditor, outputs: frozenset[str]) -> None:
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Transpose" and producer(node.input[0]) not in outputs:
            _absorb_result(editor, node)
    for name in editor.topological():
        node = editor.nodes[name]
        if _is_real_product(node):
            for position, flag in enumerate(("adj_x", "adj_y")):
                _absorb_operand(editor, node, position, flag, outputs)


def _is_real_product(node: Any) -> bool:
    # BatchMatMulV2 also conjugates a complex operand that it transposes.
    return node.op == PRODUCT and not tf.as_dtype(node.attr["T"].type).is_complex


def _absorb_result(editor: GraphEditor, node: Any) -> None:
    """Turns the transpose of a product's result into a product, if nothing else reads the result."""
    product, order = editor.nodes[producer(node.input[0])], editor.constant(node.input[1])
    if not _is_real_product(product) or editor.consumers[product.name] != [node.name] or order is None:
        return
    axes = order.tolist()
    if axes != [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]:
        return
    left, right = product.input
    flags = not attribute(product, "adj_y").b, not attribute(product, "adj_x").b
    _become_product(editor, node, [right, left], flags, product.attr["T"])
    editor.remove([product.name])


def _absorb_operand(editor: GraphEditor, node: Any, position: int, flag: str, outputs: frozenset[str]) -> None:
    """Replaces a transpose of an operand's last two axes by an attribute of the product."""
    transpose = editor.nodes[producer(node.input[position])]
    if transpose.op != "Transpose" or transpose.name in outputs or editor.consumers[transpose.name] != [node.name]:
        return
    order = editor.constant(transpose.input[1])
    if order is None or order[-2] != order.size - 1:
        return
    kept = np.append(order[:-2], order[[-1, -2]]).astype(order.dtype)
    if moves_nothing(kept):
        editor.redirect(transpose.name, transpose.input[0])
    else:
        constant = editor.add_constant(f"{transpose.name}/order", kept)
        editor.set_inputs(transpose.name, [transpose.input[0], constant])
    node.attr[flag].CopyFrom(AttrValue(b=not attribute(node, flag).b))


def _move_scale(editor: GraphEditor, node: Any, outputs: frozenset[str]) -> None:
    """Multiplies an operand in place of the product by a number, if folding can move it into a layer's weights."""
    numbers = [tensor for tensor in node.input if editor.is_number(tensor)]
    products = [tensor for tensor in node.input if _is_real_product(editor.nodes[producer(tensor)])]
    if len(numbers) != 1 or len(products) != 1:
        return
    path = [products[0]]
    for operand in editor.nodes[products[0]].input:
        path[1:] = [operand]
        while editor.nodes[producer(path[-1])].op in ("Transpose", "Reshape"):
            path.append(editor.nodes[producer(path[-1])].input[0])
        alone = all(len(editor.consumers[producer(name)]) == 1 and producer(name) not in outputs for name in path)
        if alone and _is_layer(editor, editor.nodes[producer(path[-1])]):
            scaled = editor.add("Mul", f"{node.name}/scaled", [path[-1], numbers[0]], T=node.attr["T"])
            editor.redirect(path[-1], scaled, keep=[scaled])
            editor.redirect(node.name, products[0])
            return


def _is_layer(editor: GraphEditor, node: Any) -> bool:
    """Whether a node is a product with constant weights, or the sum of such a product and its bias."""
    if node.op in ("BiasAdd", "Add", "AddV2"):
        products = [source for source in node.input if editor.constant(source) is None]
        return len(products) == 1 and _is_layer(editor, editor.nodes[producer(products[0])])
    return node.op == "MatMul" and editor.constant(node.input[1]) is not None
