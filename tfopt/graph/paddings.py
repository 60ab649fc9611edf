"""The number of zeros that a convolution adds around its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import attribute


def paddings_of(node: Any, input_shape: tf.TensorShape, kernel_size: Sequence[int]) -> np.ndarray | None:
    """Returns how many zeros a convolution adds before and after each axis of its input.

    Args:
        node: A Conv2D or DepthwiseConv2dNative node, NHWC.
        input_shape: The shape of its input. The rank may be unknown.
        kernel_size: Height and width of its kernel.
    Returns: An array [4, 2]; None if the numbers depend on a height or width that is open.
    """
    padding = attribute(node, "padding").s
    if padding == b"EXPLICIT":
        return np.reshape(attribute(node, "explicit_paddings").list.i, (4, 2)).astype(np.int32)
    result = np.zeros((4, 2), np.int32)
    if padding == b"VALID":
        return result
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
