"""Rewrites convolutions of sequences, dilated and grouped ones in the form of one node that folding and kernels know.

Sequences become images of one row. A Conv1D is ExpandDims -> Conv2D -> Squeeze. Bias, batch norm, activation and
residual sum follow after the Squeeze, where neither folding nor the int8 kernels find them. So each Squeeze is moved
behind them:

    ExpandDims -> Conv2D -> bias, batch norm, activation -> Squeeze

The ExpandDims of the next layer then cancels the Squeeze. No value changes.

TensorFlow writes Conv1D and Conv2D of Keras with a dilation rate d as a plain convolution of every d-th value:

    SpaceToBatchND -> Conv2D -> BatchToSpaceND

In this form neither batch norm nor bias can be folded, and every value is copied twice. With the attribute, the CPU's
kernels compute the convolution in one pass, also in int8.

A Conv2D whose kernel has one input channel where the image has C is a depthwise convolution: output channel c m + j
sees channel c alone, through the j-th of its m filters. The same values in the shape [height, width, C, m] are the
kernel of the depthwise op, which has an int8 kernel. Any other grouped convolution stays a Conv2D whose kernel has
fewer input channels than the image. TensorFlow joins a Conv2D with the BiasAdd behind it, and only oneDNN computes the
two with groups; with AddV2 in place of BiasAdd, a TensorFlow without oneDNN leaves them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfopt.graph.edit import INT32, GraphEditor, attribute, integers, is_nhwc, producer
from tfopt.graph.products import ELEMENTWISE
from tfopt.graph.sizes import Shapes

Images = dict[str, tuple[str, int]]  # of a sequence, the image and its axis of size one, which is squeezed


def canonicalize_sequences(editor: GraphEditor, infer: Callable[[], Shapes], outputs: frozenset[str]) -> None:
    """Moves each Squeeze of an image to a sequence behind the elementwise nodes that follow it.

    Nodes keep their names, and unused ones stay. `infer` returns the shape of each tensor at the time of the call, as
    far as TensorFlow infers it. The values of the nodes `outputs` leave the graph.
    """
    shapes = infer() if any(node.op == "Squeeze" for node in editor.nodes.values()) else {}
    images: Images = {}
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Squeeze":
            shape, axes = shapes.get(node.input[0]), attribute(node, "squeeze_dims").list.i
            if shape is not None and shape.rank == 4 and len(axes) == 1 and axes[0] % 4 in (1, 2):
                images[name] = node.input[0], axes[0] % 4
        elif node.op == "ExpandDims" and name not in outputs:
            _expand(editor, node, images, outputs)
        elif node.op == "Pad" or node.op in ELEMENTWISE:
            moved = _on_image(editor, node, images)
            if moved is not None:
                images[name] = moved


def _expand(editor: GraphEditor, node: Any, images: Images, outputs: frozenset[str]) -> None:
    """Removes an ExpandDims that cancels a Squeeze; moves an ExpandDims before the Pad that it reads."""
    image, axis = images.get(node.input[0]), editor.constant(node.input[1])
    before = editor.nodes[producer(node.input[0])]
    if axis is None:
        return
    if image is not None and image[1] == axis.item() % 4:
        editor.redirect(node.name, image[0])
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


def _on_image(editor: GraphEditor, node: Any, images: Images) -> tuple[str, int] | None:
    """Computes a node on the images of its operands and squeezes the result; None if that is impossible.

    Each operand must be a constant, or be squeezed along the same axis as the others.
    """
    axes = {images[tensor][1] for tensor in node.input if tensor in images}
    if len(axes) != 1 or attribute(node, "data_format").s == b"NCHW":  # a bias along another axis than the last
        return None
    (axis,) = axes
    operands = []
    for tensor in node.input:
        constant = editor.constant(tensor)
        if tensor in images:
            operands.append(images[tensor][0])
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
    return result, axis


def canonicalize_dilations(editor: GraphEditor, outputs: frozenset[str]) -> None:
    """Rewrites dilated convolutions with constant paddings. They are constants if the image size is known."""
    for name in editor.topological():
        if editor.nodes[name].op == "BatchToSpaceND":
            _dilate(editor, editor.nodes[name], outputs)


def _dilate(editor: GraphEditor, last: Any, outputs: frozenset[str]) -> None:
    path = [last]  # from the end to the start
    ops = ["Squeeze", "Conv2D", "ExpandDims", "SpaceToBatchND"]
    if editor.nodes[producer(last.input[0])].op == "Conv2D":
        ops = ["Conv2D", "SpaceToBatchND"]
    for op in ops:
        node = editor.nodes.get(path[-1].input[0])
        if node is None or node.op != op or node.name in outputs or editor.consumers[node.name] != [path[-1].name]:
            return
        path.append(node)
    first, convolution = path[-1], next(node for node in path if node.op == "Conv2D")
    if not is_nhwc(convolution) or attribute(convolution, "padding").s != b"VALID":
        return
    if {*attribute(convolution, "strides").list.i, *attribute(convolution, "dilations").list.i} != {1}:
        return
    constants = [editor.constant(tensor) for tensor in (*first.input[1:], *last.input[1:])]
    if any(constant is None for constant in constants):
        return
    blocks, paddings, same_blocks, crops = (np.asarray(constant) for constant in constants)
    # The zeros that are cropped at the end were added only to fill the last block.
    amounts = np.stack([paddings[:, 0], paddings[:, 1] - crops[:, 1]], axis=1)
    if not np.array_equal(blocks, same_blocks) or crops[:, 0].any() or (amounts < 0).any():
        return
    dilations = [1, *blocks.tolist(), 1]
    if len(path) == 5:
        axis, squeezed = editor.constant(path[3].input[1]), attribute(path[1], "squeeze_dims").list.i
        if axis is None or axis.item() % 4 == 0 or [number % 4 for number in squeezed] != [axis.item() % 4]:
            return
        dilations.insert(axis.item() % 4, 1)
    if len(dilations) != 4:
        return
    source = first.input[0]
    if amounts.any():
        every_axis = np.pad(amounts, [(1, 1), (0, 0)]).astype(np.int32)
        zeros = editor.add_constant(f"{convolution.name}/paddings", every_axis)
        source = editor.add("Pad", f"{convolution.name}/pad", [source, zeros], T=convolution.attr["T"], Tpaddings=INT32)
    convolution.attr["dilations"].CopyFrom(integers(dilations))
    entrance = path[-2]
    editor.set_inputs(entrance.name, [source, *entrance.input[1:]])
    editor.remove([first.name])
    if last.name not in outputs:
        editor.redirect(last.name, last.input[0])
        editor.remove([last.name])
        return
    editor.become(last.name, "Identity", [last.input[0]], T=convolution.attr["T"])


def canonicalize_groups(editor: GraphEditor, infer: Callable[[], Shapes]) -> None:
    """Turns each Conv2D with constant weights and one channel in each group into a depthwise convolution.

    Args:
        editor: The graph. Nodes keep their names. Unused constants stay in the graph.
        infer: Returns the shape of each tensor of the graph at the time of the call, as far as TensorFlow infers it.
    """
    single = [name for name, node in editor.nodes.items() if node.op == "Conv2D" and _depth(editor, node) == 1]
    shapes = infer() if single else {}
    for name in single:
        node = editor.nodes[name]
        image = shapes[node.input[0]]
        if image.rank != 4 or not is_nhwc(node):
            continue
        weights, channels = editor.value(node.input[1]), image[-1]
        strides = _square_strides(node, image, weights.shape[:2])
        dilations = {*attribute(node, "dilations").list.i} or {1}
        padding = attribute(node, "padding").s
        if not channels or channels == 1 or strides is None or dilations != {1} or padding == b"EXPLICIT":
            continue
        if weights.shape[-1] % channels:
            continue
        split = weights.reshape(*weights.shape[:2], channels, weights.shape[-1] // channels)
        kernel = editor.add_constant(f"{name}/depthwise_weights", split)
        kept = {key: node.attr[key] for key in ("T", "padding", "data_format", "dilations") if key in node.attr}
        editor.become(name, "DepthwiseConv2dNative", [node.input[0], kernel], strides=integers(strides), **kept)


def _depth(editor: GraphEditor, node: Any) -> int | None:
    """Returns the number of input channels of a convolution's constant weights; None if they are computed."""
    weights = editor.nodes[producer(node.input[1])]  # decoding the weights of all convolutions would take long
    return weights.attr["value"].tensor.tensor_shape.dim[2].size if weights.op == "Const" else None


def _square_strides(node: Any, image: Any, kernel: tuple[int, ...]) -> list[int] | None:
    """Returns the strides of a convolution as the depthwise op takes them: equal in both directions; else None.

    The stride along an axis of one value under a kernel of one value may be any number.
    """
    down, across = attribute(node, "strides").list.i[1:3]
    if image[1] == kernel[0] == 1:
        down = across
    elif image[2] == kernel[1] == 1:
        across = down
    return [1, down, across, 1] if down == across else None


def add_bias_of_groups_apart(editor: GraphEditor, infer: Callable[[], Shapes]) -> None:
    """Turns the BiasAdd behind each grouped Conv2D, or behind its squeeze, into AddV2. Nodes keep their names.

    `infer` returns the shape of each tensor of the graph, as far as TensorFlow infers it.
    """
    biases = [node for node in editor.nodes.values() if node.op == "BiasAdd" and is_nhwc(node)]
    behind = [(bias, _before_squeeze(editor, bias)) for bias in biases]
    behind = [(bias, source) for bias, source in behind if source.op == "Conv2D"]
    shapes = infer() if behind else {}
    for bias, source in behind:
        image, kernel = (shapes[tensor] for tensor in source.input[:2])
        is_known = image.rank == kernel.rank == 4 and None not in (image[-1], kernel[2])
        if is_known and image[-1] != kernel[2]:
            editor.become(bias.name, "AddV2", [*bias.input], T=bias.attr["T"])


def _before_squeeze(editor: GraphEditor, node: Any) -> Any:
    source = editor.nodes[producer(node.input[0])]
    return editor.nodes[producer(source.input[0])] if source.op == "Squeeze" else source
