"""Convolutions without XLA islands: what Keras' layers call in place of its `conv`, inside a scope.

Keras on TensorFlow puts every grouped convolution, and every Conv3D with its channels first, into a function of its own
that XLA compiles. On a CPU XLA computes these many times slower than TensorFlow's own kernels, gradients above all, and
nothing around such an island can be fused with it. Here the same mathematics is made of plain operations:

- A grouped Conv1D or Conv2D is one Conv2D, whose kernel has fewer input channels than the image.
- Where TensorFlow has no gradient of that (without oneDNN; in float16 and float64), a convolution with one channel in
  each group is a depthwise one. Any other is the convolutions of its groups one by one, as in Conv3D, which has no
  grouped kernel at all.
- Channels come last in all of them, between two transposes if the layer has them first.

The results are equal up to rounding.
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

LAST = {3: "NWC", 4: "NHWC", 5: "NDHWC"}  # by the number of axes
CONV_ARGUMENTS = ("inputs", "kernel", "strides", "padding", "data_format", "dilation_rate")


@contextlib.contextmanager
def plain_convolutions(*, gradients: bool) -> Iterator[None]:
    """While a model is called or traced, keeps Keras from letting XLA compile single convolutions.

    It replaces `conv` in keras.src.backend.tensorflow.nn; there is no public switch. Inside another such scope, the
    outer one goes on.

    Args:
        gradients: Whether gradients are taken, for which fewer kernels exist.
    Example:
        >>> layer = keras.layers.Conv2D(4, 3, groups=2)
        >>> layer.build((None, 8, 8, 4))
        >>> def ops():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 8, 4)))
        ...     return {operation.type for operation in call.graph.get_operations()}
        >>> with plain_convolutions(gradients=False):
        ...     "Conv2D" in ops()
        True
        >>> "Conv2D" in ops()
        False
    """
    module = private_module("keras.src.backend.tensorflow.nn")
    original = private(module, "conv", takes=CONV_ARGUMENTS)
    if isinstance(original, functools.partial):
        yield
        return
    check_reads(keras.ops.conv, "conv")
    with replaced(module, conv=functools.partial(_conv, original, gradients)):
        yield


def _conv(
    original: Callable[..., Any],
    gradients: bool,
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
) -> Any:
    first = (data_format or keras.config.image_data_format()) == "channels_first"
    rank, channels = len(inputs.shape), inputs.shape[1 if first else -1]
    depth, filters = kernel.shape[-2:]
    grouped = channels != depth
    as_keras = functools.partial(original, inputs, kernel, strides, padding, data_format, dilation_rate)
    if rank not in LAST or (not grouped and not (first and rank == 5)):  # Keras needs no XLA
        return as_keras()
    if channels is None or channels % depth or filters % (channels // depth):
        return as_keras()  # which knows nothing better, or says what is wrong
    groups = channels // depth
    strides = _for_each_axis(strides, rank - 2)
    dilations = _for_each_axis(dilation_rate, rank - 2)
    options = {"strides": strides, "padding": padding.upper(), "dilations": dilations}
    convolve = functools.partial(tf.nn.convolution, data_format=LAST[rank], **options)
    if grouped and (rank == 5 or (gradients and not _has_grouped_gradient(inputs.dtype))):
        square = len({*strides}) == 1 and not (max(strides) > 1 and max(dilations) > 1)
        if depth == 1 and rank < 5 and square:
            convolve = functools.partial(_depthwise, **options)
        else:
            convolve = functools.partial(_one_by_one, convolve, groups)
    last = [*range(2, rank), 1]
    result = convolve(tf.transpose(inputs, [0, *last]) if first else inputs, kernel)
    if result.shape.is_fully_defined() and 0 in result.shape and 0 not in inputs.shape:
        return as_keras()  # which says that the image is too small
    return tf.transpose(result, [0, rank - 1, *range(1, rank - 1)]) if first else result


def _for_each_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _depthwise(inputs: Any, kernel: Any, strides: Any, padding: str, dilations: Any) -> Any:
    channels = inputs.shape[-1]
    kernel = tf.reshape(kernel, (*kernel.shape[:-2], channels, kernel.shape[-1] // channels))
    return keras.ops.depthwise_conv(inputs, kernel, strides, padding.lower(), "channels_last", dilations)


def _one_by_one(convolve: Callable[..., Any], groups: int, inputs: Any, kernel: Any) -> Any:
    parts = zip(tf.split(inputs, groups, -1), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([convolve(part, of_part) for part, of_part in parts], -1)


@functools.cache
def _has_grouped_gradient(dtype: Any) -> bool:
    """Returns whether this machine's TensorFlow computes the gradient of a grouped Conv2D, found by computing one."""
    with tf.init_scope(), tf.device("CPU"):  # now, even where a function is traced
        kernel, result = tf.ones((2, 2, 2, 4), dtype), tf.ones((1, 2, 2, 4), dtype)
        options = {"out_backprop": result, "strides": [1, 1, 1, 1], "padding": "VALID"}
        try:
            tf.raw_ops.Conv2DBackpropInput(input_sizes=(1, 3, 3, 4), filter=kernel, **options)
            tf.raw_ops.Conv2DBackpropFilter(input=tf.ones((1, 3, 3, 4), dtype), filter_sizes=kernel.shape, **options)
        except tf.errors.OpError:
            return False
    return True
