"""UpSampling2D of nearest pixels as one resize, inside a scope.

Keras repeats the rows and then the columns, each by an expansion, a tile and a reshape. TensorFlow's resize copies each
value straight to its places. With the centres of pixels the nearest one is right for every factor, because the places
of a result lie at least half a place from where the nearest changes. Without them, rounding moves some by one pixel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras import layers, ops
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from tfopt.compat.checks import private
from tfopt.compat.replace import replaced

FACTORS = "_tfopt.factors"  # the attribute of the operation that says how often rows and columns are repeated
KERNELS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)  # LiteRT resizes no integers


@contextlib.contextmanager
def resized_once() -> Iterator[None]:
    """While a model is called or traced, lets UpSampling2D of nearest pixels resize its images by one operation.

    It replaces `call` of keras.layers.UpSampling2D. Inside another such scope, the outer one goes on.

    Example:
        >>> import keras
        >>> layer = keras.layers.UpSampling2D(2)
        >>> def tiles():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 8, 4)))
        ...     return [operation.type for operation in call.graph.get_operations()].count("Tile")
        >>> with resized_once():
        ...     tiles()
        0
        >>> tiles()
        2
    """
    kind = layers.UpSampling2D
    if isinstance(vars(kind).get("call"), functools.partialmethod):
        yield
        return
    original = private(kind, "call", takes=("inputs",))
    with replaced(kind, call=functools.partialmethod(_call, original)):
        yield


def _call(layer: Any, original: Callable[..., Any], inputs: Any) -> Any:
    if layer.interpolation != "nearest" or not isinstance(inputs, tf.Tensor) or inputs.dtype not in KERNELS:
        return original(layer, inputs)
    first = layer.data_format == "channels_first"
    images = tf.transpose(inputs, [0, 2, 3, 1]) if first else inputs
    size = [each * factor for each, factor in zip(ops.shape(images)[1:3], layer.size, strict=True)]
    result = tf.raw_ops.ResizeNearestNeighbor(images=images, size=size, half_pixel_centers=True)
    if not tf.executing_eagerly():
        result.set_shape([images.shape[0], None, None, images.shape[3]])
        mark(result.op, layer.size)
    return tf.transpose(result, [0, 3, 1, 2]) if first else result


def mark(operation: Any, factors: Sequence[int]) -> None:
    """Notes on an operation how often it repeats rows and columns. Writers of files read it."""
    set_attribute = private(operation, "_set_attr", takes=("attr_name", "attr_value"))
    set_attribute(FACTORS, AttrValue(list=AttrValue.ListValue(i=factors)))
