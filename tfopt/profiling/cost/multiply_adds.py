"""The multiplications with an addition of one operation: matrix products, convolutions, and their gradients.

A convolution multiplies each value of its output with one filter, so it has outputs * filter values / output channels
multiply-adds. A product [m, k] x [k, n] has m * k * n. An einsum of two operands has the product of the sizes of all
its letters. The gradient of a convolution for its input, or for its filter, has as many as the convolution.

TensorFlow computes a dilated convolution on blocks (SpaceToBatchND, Conv2D, BatchToSpaceND). Outputs that it computes
in the padding of the blocks, and then cuts off, do not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

# Gates of each cell of a recurrent layer that cuDNN computes.
GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


def multiply_adds(operation: Any) -> int | None:
    """Returns the multiply-adds of an operation; None if a shape is unknown. Other kinds of operations have none.

    Example:
        >>> import tensorflow as tf
        >>> product = tf.function(tf.matmul).get_concrete_function(tf.TensorSpec((2, 3)), tf.TensorSpec((3, 4)))
        >>> [multiply_adds(operation) for operation in product.graph.get_operations() if operation.type == "MatMul"]
        [24]
    """
    count = COUNTED.get(operation.type)
    if count is None:
        return 0
    try:
        return count(operation)
    except (TypeError, ValueError):  # TensorFlow raises these for an unknown rank or size
        return None


def _values(tensor: Any) -> int:
    return math.prod(int(size) for size in tensor.shape)


def _filter_values(shape: Any) -> int:
    """Returns the values of a convolution's filter that one value of the output needs: all but the output channels."""
    return math.prod(int(size) for size in shape[:-1])


def _depthwise_values(shape: Any) -> int:
    """Returns the same for a depthwise filter [height, width, channels, multiplier]."""
    return int(shape[0]) * int(shape[1])


def _matmul(operation: Any) -> int:
    rows = operation.inputs[0].shape
    return _values(operation.outputs[0]) * int(rows[-2 if operation.get_attr("transpose_a") else -1])


def _batch_matmul(operation: Any) -> int:
    rows = operation.inputs[0].shape
    return _values(operation.outputs[0]) * int(rows[-2 if operation.get_attr("adj_x") else -1])


def _einsum(operation: Any) -> int:
    if len(operation.inputs) < 2:
        return 0  # a transposition or a sum
    equation = operation.get_attr("equation").decode()
    terms, result = equation.split("->")
    sizes: dict[str, int] = {}
    for term, tensor in zip((*terms.split(","), result), (*operation.inputs, *operation.outputs), strict=True):
        sizes |= _letters(term, [int(size) for size in tensor.shape])
    return math.prod(sizes.values())


def _letters(term: str, sizes: list[int]) -> dict[str, int]:
    """Returns the size of each letter. The dimensions of an ellipsis are numbered from the last."""
    before, _, after = term.partition("...")
    hidden = len(sizes) - len(before) - len(after)
    names = [*before, *(f"...{number}" for number in range(hidden, 0, -1)), *after]
    return dict(zip(names, sizes, strict=True))


def _used_values(output: Any) -> int:
    """Returns the values of a convolution's output that remain."""
    users = output.consumers()
    blocks = len(users) == 1 and users[0].type == "BatchToSpaceND"
    return _values(users[0].outputs[0] if blocks else output)


def _gradient_values(gradient: Any) -> int:
    """Returns the same for the gradient of the output."""
    return _values(gradient.op.inputs[0] if gradient.op.type == "SpaceToBatchND" else gradient)


def _forward(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda operation: _used_values(operation.outputs[0]) * filter_values(operation.inputs[1].shape)


def _of_input(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    """The inputs are the sizes of the input, the filter and the gradient. A transposed convolution is the same op."""
    return lambda operation: _gradient_values(operation.inputs[2]) * filter_values(operation.inputs[1].shape)


def _of_filter(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    """The inputs are the input, the sizes of the filter and the gradient."""
    return lambda operation: _gradient_values(operation.inputs[2]) * filter_values(operation.outputs[0].shape)


def _cudnn_rnn(operation: Any) -> int:
    """Counts the layers of a recurrent network [time, batch, features], of one or two directions."""
    time, batch, features = (int(size) for size in operation.inputs[0].shape)
    units_of, units = operation.inputs[1].shape[0], int(operation.inputs[1].shape[-1])
    directions = 2 if operation.get_attr("direction") == b"bidirectional" else 1
    gates = GATES[re.sub(r"\W", "", operation.get_attr("rnn_mode").decode())]
    widths = [features] + [directions * units] * (int(units_of) // directions - 1)
    return time * batch * directions * gates * sum(units * (width + units) for width in widths)


COUNTED: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _forward(_filter_values),
    "Conv3D": _forward(_filter_values),
    "DepthwiseConv2dNative": _forward(_depthwise_values),
    "Conv2DBackpropInput": _of_input(_filter_values),
    "Conv3DBackpropInputV2": _of_input(_filter_values),
    "DepthwiseConv2dNativeBackpropInput": _of_input(_depthwise_values),
    "Conv2DBackpropFilter": _of_filter(_filter_values),
    "Conv3DBackpropFilterV2": _of_filter(_filter_values),
    "DepthwiseConv2dNativeBackpropFilter": _of_filter(_depthwise_values),
    "CudnnRNN": _cudnn_rnn,
    "CudnnRNNV2": _cudnn_rnn,
    "CudnnRNNV3": _cudnn_rnn,
}
