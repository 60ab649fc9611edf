"""Adaptive pooling with equal windows as plain pooling: what Keras' layers call instead, inside a scope.

Keras pools with two sizes of windows at all places, axis by axis, and then gathers the ones that it needs. Where the
input is a whole multiple of the output, all windows are equal and side by side, so that one pooling computes the same,
up to rounding. Two cases are pooled axis by axis, as in Keras: maxima where gradients are taken, so that one of equal
values gets the gradient that it gets there, and means of float16, because the sum of a whole window may overflow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.checks import check_reads, private, private_module
from tfopt.compat.replace import replaced

ARGUMENTS = ("inputs", "output_size", "data_format")


@contextlib.contextmanager
def plain_pooling(*, gradients: bool) -> Iterator[None]:
    """While a model is called or traced, computes adaptive pooling of Keras with as little work as is needed.

    It replaces `adaptive_average_pool` and `adaptive_max_pool` in keras.src.backend.tensorflow.nn. Inside another such
    scope, the outer one goes on.

    Args:
        gradients: Whether gradients are taken.
    Example:
        >>> layer = keras.layers.AdaptiveAveragePooling2D(2)
        >>> def ops():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 8, 4)))
        ...     return [operation.type for operation in call.graph.get_operations()].count("AvgPool")
        >>> with plain_pooling(gradients=False):
        ...     ops()
        1
        >>> ops()
        4
    """
    module = private_module("keras.src.backend.tensorflow.nn")
    average = private(module, "adaptive_average_pool", takes=ARGUMENTS)
    largest = private(module, "adaptive_max_pool", takes=ARGUMENTS)
    if isinstance(average, functools.partial):
        yield
        return
    check_reads(keras.ops.adaptive_average_pool, "adaptive_average_pool")
    check_reads(keras.ops.adaptive_max_pool, "adaptive_max_pool")
    changed = {
        "adaptive_average_pool": functools.partial(_pool, average, _average),
        "adaptive_max_pool": functools.partial(_pool, largest, _largest_by_axes if gradients else _largest),
    }
    with replaced(module, **changed):
        yield


def _pool(
    original: Callable[..., Any],
    pool: Callable[[Any, list[int]], Any],
    inputs: Any,
    output_size: Any,
    data_format: str | None = None,
) -> Any:
    rank = len(inputs.shape)
    first = (data_format or keras.config.image_data_format()) == "channels_first"
    sizes = inputs.shape[2:] if first else inputs.shape[1:-1]
    wanted = (output_size,) * len(sizes) if isinstance(output_size, int) else tuple(output_size)
    if rank not in (3, 4, 5) or len(wanted) != len(sizes) or not all(sizes) or not all(wanted):
        return original(inputs, output_size, data_format)
    if any(size % count for size, count in zip(sizes, wanted, strict=True)):
        return original(inputs, output_size, data_format)
    last = [0, *range(2, rank), 1]
    result = pool(
        tf.transpose(inputs, last) if first else inputs,
        [size // count for size, count in zip(sizes, wanted, strict=True)],
    )
    return tf.transpose(result, [0, rank - 1, *range(1, rank - 1)]) if first else result


def _average(inputs: Any, window: list[int]) -> Any:
    if inputs.dtype == tf.float16:
        return _by_axes(tf.nn.avg_pool, inputs, window)
    return tf.nn.avg_pool(inputs, window, window, "VALID")


def _largest(inputs: Any, window: list[int]) -> Any:
    return tf.nn.max_pool(inputs, window, window, "VALID")


def _largest_by_axes(inputs: Any, window: list[int]) -> Any:
    return _by_axes(tf.nn.max_pool, inputs, window)


def _by_axes(pool: Callable[..., Any], inputs: Any, window: list[int]) -> Any:
    for axis, size in enumerate(window):
        along = [size if each == axis else 1 for each in range(len(window))]
        inputs = inputs if size == 1 else pool(inputs, along, along, "VALID")
    return inputs
