"""Rewrites a BatchMatMulV2 or Einsum of a tensor and a constant matrix as one MatMul.

One Reshape makes a matrix of the tensor's rows. Another Reshape gives the result its axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfopt.graph.edit import AttrValue, GraphEditor, attribute
from tfopt.graph.rewrites.batched_products import axes_order, become_transpose, einsum_labels, transposed
from tfopt.graph.sizes import INT32, Size, Sizes


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
    """Adds the product of a tensor's rows and a matrix. Returns it and the sizes to reshape it to, or None if unknown.

    Args:
        editor, sizes: The graph and its sizes.
        node: The node that the product replaces.
        source: The tensor. Its last axes are the rows.
        matrix: The weights.
        after: The sizes of the result.
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
        "MatMul",
        f"{node.name}/product",
        [flat, weights],
        origin=node.name,
        T=dtype,
        transpose_a=no,
        transpose_b=no,
    )
    return [product, shape]


def _become_reshape(editor: GraphEditor, node: Any, inputs: Sequence[str]) -> None:
    editor.become(node.name, "Reshape", inputs, T=node.attr["T"], Tshape=INT32)
