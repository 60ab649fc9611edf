"""Rewrites sequences as images of one row, in which form TensorFlow computes their convolutions and poolings.

A Conv1D is ExpandDims -> Conv2D -> Squeeze. Bias, batch norm, activation and residual sum follow after the Squeeze,
where neither folding nor the int8 kernels find them. So each Squeeze is moved behind them:

    ExpandDims -> Conv2D -> bias, batch norm, activation -> Squeeze

The ExpandDims of the next layer then cancels the Squeeze. No value changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfopt.graph.edit import GraphEditor, attribute, integers, producer
from tfopt.graph.rewrites.products import ELEMENTWISE
from tfopt.graph.sizes import Shapes


@dataclass(frozen=True, kw_only=True)
class _Image:
    """The image that a sequence is squeezed from: its tensor, and its axis of size one, which is 1 or 2."""

    tensor: str
    axis: int


def canonicalize_sequences(editor: GraphEditor, infer: Callable[[], Shapes], outputs: frozenset[str]) -> None:
    """Moves each Squeeze of an image to a sequence behind the elementwise nodes that follow it.

    Args:
        editor: The graph. Nodes keep their names. Unused nodes stay in the graph.
        infer: Returns the shape of each tensor of the graph at the time of the call, as far as TensorFlow infers it.
        outputs: Nodes whose values leave the graph.
    """
    shapes = infer() if any(node.op == "Squeeze" for node in editor.nodes.values()) else {}
    images: dict[str, _Image] = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Squeeze":
            shape, axes = shapes.get(node.input[0]), attribute(node, "squeeze_dims").list.i
            if shape is not None and shape.rank == 4 and len(axes) == 1 and axes[0] % 4 in (1, 2):
                images[name] = _Image(tensor=node.input[0], axis=axes[0] % 4)
        elif node.op == "ExpandDims" and name not in outputs:
            _expand(editor, node, images, outputs)
        elif node.op == "Pad" or node.op in ELEMENTWISE:
            moved = _on_image(editor, node, images)
            if moved is not None:
                images[name] = moved


def _expand(editor: GraphEditor, node: Any, images: dict[str, _Image], outputs: frozenset[str]) -> None:
    """Removes an ExpandDims that cancels a Squeeze; moves an ExpandDims before the Pad that it reads."""
    image, axis = images.get(node.input[0]), editor.constant(node.input[1])
    before = editor.nodes[producer(node.input[0])]
    if axis is None:
        return
    if image is not None and image.axis == axis.item() % 4:
        editor.redirect(node.name, image.tensor)
    elif before.op == "Pad" and before.name not in outputs and editor.consumers[before.name] == [node.name]:
        paddings = editor.constant(before.input[1])
        if paddings is not None and len(paddings) == 3:
            operands = [node.name, _padded_image(editor, before, paddings, axis.item() % 4)]
            editor.set_inputs(node.name, [before.input[0], node.input[1]])
            padded = editor.add("Pad", f"{before.name}/image", operands, origin=before.name, **before.attr)
            editor.redirect(node.name, padded, keep=[padded])


def _padded_image(editor: GraphEditor, node: Any, paddings: np.ndarray, axis: int) -> str:
    """Returns the paddings of a sequence as paddings of the image, which has one more axis."""
    return editor.add_constant(f"{node.name}/paddings", np.insert(paddings, axis, 0, axis=0))


def _on_image(editor: GraphEditor, node: Any, images: dict[str, _Image]) -> _Image | None:
    """Computes a node on the images of its operands and squeezes the result; None if that is impossible.

    Each operand must be a constant, or be squeezed along the same axis as the others.
    """
    axes = {images[tensor].axis for tensor in node.input if tensor in images}
    if len(axes) != 1 or attribute(node, "data_format").s == b"NCHW":  # a bias along another axis than the last
        return None
    (axis,) = axes
    operands = []
    for tensor in node.input:
        constant = editor.constant(tensor)
        if tensor in images:
            operands.append(images[tensor].tensor)
        elif constant is None or constant.ndim > 3:
            return None
        elif node.op == "Pad":
            operands.append(_padded_image(editor, node, constant, axis))
        elif constant.ndim < 2:
            operands.append(tensor)
        else:
            aligned = constant.reshape((1,) * (3 - constant.ndim) + constant.shape)
            operands.append(editor.add_constant(f"{node.name}/operand", np.expand_dims(aligned, axis)))
    attributes = {key: value for key, value in node.attr.items() if not key.startswith("_")}
    result = editor.add(node.op, f"{node.name}/image", operands, origin=node.name, **attributes)
    editor.become(node.name, "Squeeze", [result], T=attributes["T"], squeeze_dims=integers([axis]))
    return _Image(tensor=result, axis=axis)
