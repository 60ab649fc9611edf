"""Rewrites dilated convolutions as one Conv2D with the attribute `dilations`.

TensorFlow writes Conv1D and Conv2D of Keras with a dilation rate d as a plain convolution of every d-th value:

    SpaceToBatchND -> Conv2D -> BatchToSpaceND

In this form neither batch norm nor bias can be folded, and every value is copied twice. With the attribute, the CPU's
kernels compute the convolution in one pass, also in int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, attribute, dtype_attr, integers, is_nhwc, producer


def canonicalize_dilations(editor: GraphEditor, outputs: frozenset[str]) -> None:
    """Rewrites dilated convolutions with constant paddings. They are constants if the image size is known.

    Args:
        editor: The graph. Nodes keep their names. Unused constants stay in the graph.
        outputs: Nodes whose values leave the graph.
    """
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
        source = editor.add(
            "Pad",
            f"{convolution.name}/pad",
            [source, zeros],
            T=convolution.attr["T"],
            Tpaddings=dtype_attr(tf.int32),
        )
    convolution.attr["dilations"].CopyFrom(integers(dilations))
    entrance = path[-2]
    editor.set_inputs(entrance.name, [source, *entrance.input[1:]])
    editor.remove([first.name])
    if last.name not in outputs:
        editor.redirect(last.name, last.input[0])
        editor.remove([last.name])
        return
    editor.become(last.name, "Identity", [last.input[0]], T=convolution.attr["T"])
