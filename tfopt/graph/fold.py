"""Exact simplifications of a frozen graph: constant folding, and per-channel arithmetic moved into the weights.

A frozen Keras 3 graph holds batch normalisation as `y = x * scale + offset` with constant vectors. Behind a
convolution or a matrix product with constant weights W and bias b, both are linear in the output channels:

    (conv(x, W) + b) * scale + offset  =  conv(x, W * scale) + (b * scale + offset)

This saves two passes over the activations. Zeros in W stay zeros, so pruned weights stay pruned. A `Pad` with zeros
before a VALID convolution becomes the padding of the convolution. Transposes of the operands and of the result of a
batched product become attributes of the product. Sequences are computed as images of one row. Then all of this applies
to sequences too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import op_definition
from tfopt.graph.batched_products import canonicalize_batched_products
from tfopt.graph.convolutions import (
    add_bias_of_groups_apart,
    canonicalize_dilations,
    canonicalize_groups,
    canonicalize_sequences,
)
from tfopt.graph.edit import GraphEditor, attribute, dtype_attr, integers, is_nhwc, producer, text
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.inputs import zeros
from tfopt.graph.products import canonicalize_products
from tfopt.graph.unsafe_ops import touched

CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
WEIGHTED = (*CONVOLUTIONS, "MatMul")
NO_VALUE = (tf.variant.as_datatype_enum, tf.resource.as_datatype_enum)  # types that no constant can hold
AFFINE = ("BiasAdd", "Add", "AddV2", "Sub", "Mul")


def fold_constants(graph: FrozenGraph, keep: Callable[[np.ndarray], bool] | None = None) -> FrozenGraph:
    """Returns a graph of fewer nodes that computes the same function, up to float32 rounding.

    Nodes keep their names, so that a report names the layers that the author of the model knows. Weights for which
    `keep` is true keep their values: a node multiplies them by what is folded into them.
    """
    editor = GraphEditor(graph.graph_def, graph.origins)
    _evaluate_constants(editor, graph)
    _skip_identities(editor, graph.output_nodes)

    def infer() -> dict[str, tf.TensorShape]:
        return graph.edited(editor).shapes()

    canonicalize_dilations(editor, graph.output_nodes)
    canonicalize_groups(editor, infer)
    canonicalize_sequences(editor, infer, graph.output_nodes)
    canonicalize_products(editor, infer, graph.output_nodes)
    canonicalize_batched_products(editor, graph.output_nodes)
    shapes = infer()
    for name in editor.topological():
        node = editor.nodes.get(name)
        if node is not None and node.op in WEIGHTED:
            if node.op in CONVOLUTIONS:
                _fold_padding(editor, name, shapes)
            _fold_affine(editor, name, graph.output_nodes, keep)
    add_bias_of_groups_apart(editor, infer)
    editor.share_constants()
    return graph.edited(editor)


def _evaluate_constants(editor: GraphEditor, graph: FrozenGraph) -> None:
    """Replaces each tensor that depends on constants only by its value, where a node that is not constant reads it."""
    constant: set[str] = set()
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op == "Const" or (_is_pure(node) and all(producer(tensor) in constant for tensor in node.input)):
            constant.add(name)
    frontier = sorted(
        {
            tensor
            for name, node in editor.nodes.items()
            if name not in constant
            for tensor in node.input
            if producer(tensor) in constant and editor.nodes[producer(tensor)].op != "Const"
        }
    )
    if not frontier:
        return
    values = graph.as_function(fetch=frontier)(**zeros(graph, 1))  # their values do not matter
    for tensor, value in zip(frontier, values, strict=True):
        quantized = value.dtype if value.dtype.is_quantized else None  # NumPy gives plain integers
        editor.redirect(tensor, editor.add_constant(f"{producer(tensor)}/folded", value.numpy(), quantized))


def _is_pure(node: Any) -> bool:
    """Whether a node is a plain function of its inputs. Fake quantization does not count: it holds the ranges."""
    definition = op_definition(node.op)
    calls_function = any(value.HasField("func") for value in node.attr.values())
    return (
        bool(node.input)
        and definition is not None
        and not definition.is_stateful
        and not any(output.type in NO_VALUE for output in definition.output_arg)
        and not calls_function
        and not node.op.startswith("FakeQuant")
        and touched(node) is None  # what a file holds is read when the model runs, not now
    )


def _skip_identities(editor: GraphEditor, outputs: frozenset[str]) -> None:
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op in ("Identity", "IdentityN") and name not in outputs:  # IdentityN carries a custom gradient
            for index, tensor in enumerate(node.input):
                editor.redirect(f"{name}:{index}" if index else name, tensor)
            editor.remove([name])


def _fold_affine(
    editor: GraphEditor, name: str, outputs: frozenset[str], keep: Callable[[np.ndarray], bool] | None
) -> None:
    """Folds the per-channel arithmetic that follows a weighted node into its weights and one BiasAdd."""
    node = editor.nodes[name]
    weights = editor.constant(node.input[1])
    if weights is None or not is_nhwc(node) or attribute(node, "transpose_b").b:
        return
    depthwise = node.op == "DepthwiseConv2dNative"
    channels = weights.shape[2] * weights.shape[3] if depthwise else weights.shape[-1]
    scale, offset = np.ones(channels, np.float64), np.zeros(channels, np.float64)
    run, last = [], name
    while last not in outputs and len(editor.consumers.get(last, ())) == 1:
        follower = editor.nodes[editor.consumers[last][0]]
        step = _affine(editor, follower, last, channels, rank=weights.ndim)
        if step is None:
            break
        scale, offset = scale * step[0], offset * step[0] + step[1]
        run.append(follower.name)
        last = follower.name
    if not run or [editor.nodes[step].op for step in run] == ["BiasAdd"]:
        return
    dtype = dtype_attr(tf.as_dtype(weights.dtype))
    if not np.all(scale == 1):
        shaped = scale.reshape(weights.shape[2:] if depthwise else (channels,))
        if keep is not None and keep(weights):
            factor = editor.add_constant(f"{name}/folded_scale", shaped.astype(weights.dtype))
            scaled = editor.add("Mul", f"{name}/folded_weights", [node.input[1], factor], T=dtype)
        else:
            scaled = editor.add_constant(f"{name}/folded_weights", (weights * shaped).astype(weights.dtype))
        editor.set_inputs(name, [node.input[0], scaled, *node.input[2:]])
    bias = editor.add_constant(f"{name}/folded_bias", offset.astype(weights.dtype))
    editor.become(last, "BiasAdd", [name, bias], T=dtype, data_format=text("NHWC"))
    editor.remove(reversed(run[:-1]))


def _affine(
    editor: GraphEditor, node: Any, source: str, channels: int, rank: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (scale, offset) if the node computes source * scale + offset with one constant for each channel."""
    if node.op not in AFFINE or len(node.input) != 2:
        return None
    if node.op == "BiasAdd" and not is_nhwc(node):
        return None
    position = 0 if node.input[0] == source else 1
    if node.input[position] != source or (node.op == "Sub" and position == 1):
        return None
    constant = editor.constant(node.input[1 - position])
    # Allowed are a scalar, [C], [1, C] and [1, 1, 1, C]. With one more axis the result would be broadcast.
    if constant is None or constant.size not in (1, channels) or constant.size != max((1, *constant.shape[-1:])):
        return None
    if constant.ndim > rank:
        return None
    value = np.broadcast_to(constant.reshape(-1).astype(np.float64), (channels,))
    if node.op == "Mul":
        return value, np.zeros(channels)
    return np.ones(channels), -value if node.op == "Sub" else value


def _fold_padding(editor: GraphEditor, name: str, shapes: Mapping[str, tf.TensorShape]) -> None:
    """Turns a zero Pad of the image axes before a VALID convolution into the convolution's own padding."""
    node = editor.nodes[name]
    pad = editor.nodes[producer(node.input[0])]
    if pad.op != "Pad" or attribute(node, "padding").s != b"VALID" or editor.consumers[pad.name] != [name]:
        return
    amounts = editor.constant(pad.input[1])
    weights = editor.constant(node.input[1])
    if amounts is None or amounts.shape != (4, 2) or amounts[[0, 3]].any() or not is_nhwc(node):
        return
    same = None if weights is None else _same_paddings(node, shapes[pad.input[0]], weights.shape[:2])
    if same is not None and np.array_equal(amounts, same):
        node.attr["padding"].CopyFrom(text("SAME"))
    elif node.op == "Conv2D":  # a depthwise one with explicit padding and Relu6 behind it crashes TensorFlow
        node.attr["padding"].CopyFrom(text("EXPLICIT"))
        node.attr["explicit_paddings"].CopyFrom(integers(int(amount) for amount in amounts.reshape(-1)))
    else:
        return
    editor.set_inputs(name, [pad.input[0], *node.input[1:]])
    editor.remove([pad.name])


def paddings_of(node: Any, input_shape: tf.TensorShape, kernel_size: Sequence[int]) -> np.ndarray | None:
    """Returns how many zeros an NHWC convolution adds before and after each axis of its input, [4, 2].

    None if the numbers depend on a height or width that is open. The kernel size is its height and width.
    """
    padding = attribute(node, "padding").s
    if padding == b"EXPLICIT":
        return np.reshape(attribute(node, "explicit_paddings").list.i, (4, 2)).astype(np.int32)
    return np.zeros((4, 2), np.int32) if padding == b"VALID" else _same_paddings(node, input_shape, kernel_size)


def _same_paddings(node: Any, input_shape: tf.TensorShape, kernel_size: Sequence[int]) -> np.ndarray | None:
    """Returns the zeros of a convolution with SAME padding, as `paddings_of` does."""
    result = np.zeros((4, 2), np.int32)
    strides = list(attribute(node, "strides").list.i)
    dilations = list(attribute(node, "dilations").list.i) or [1, 1, 1, 1]
    for axis, kernel in zip((1, 2), kernel_size, strict=True):
        if kernel == 1:
            continue
        size = None if input_shape.rank is None else input_shape[axis]
        if size is None:
            return None
        result[axis] = same_padding(size, kernel, strides[axis], dilations[axis])
    return result


def same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Returns how many zeros SAME adds before and after one axis.

    Example:
        >>> same_padding(8, 3, 2, 1)
        (0, 1)
    """
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2
