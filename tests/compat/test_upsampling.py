"""UpSampling2D of nearest pixels is one resize in inference, with Keras' pixels."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.compat.plain import plain_operations
from tfopt.compat.upsampling import resized_once


def traced(layer, x, *, gradients=False):
    """Returns the result of a layer, and the types of the operations that compute it."""
    with plain_operations(gradients=gradients):
        call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec([None] * 3 + [x.shape[3]], x.dtype))
    return call(tf.constant(x)), [operation.type for operation in call.graph.get_operations()]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_every_pixel_is_that_of_keras(data_format, dtype):
    layer = layers.UpSampling2D((3, 2), data_format=data_format, dtype=dtype)
    x = np.arange(2 * 5 * 7 * 3).reshape(2, 5, 7, 3).astype(dtype)
    found, kinds = traced(layer, x)
    assert ("Tile" in kinds, kinds.count("ResizeNearestNeighbor")) == (False, 1)
    expected = layer(x)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_no_factor_moves_a_pixel():
    with resized_once():
        for factor in range(1, 20):
            for size in (1, 2, 3, 7, 41, 97, 333):
                rows = np.arange(size, dtype="float32").reshape(1, size, 1, 1)
                found = layers.UpSampling2D((factor, 1))(rows)
                np.testing.assert_array_equal(np.ravel(found), np.repeat(np.arange(size), factor))


@pytest.mark.parametrize(
    ("layer", "x", "gradients"),
    [
        (layers.UpSampling2D(2), np.ones((1, 2, 2, 1), "float32"), True),  # some gradients of a resize are slow
        (layers.UpSampling2D(2), np.ones((1, 2, 2, 1), "uint8"), False),  # LiteRT resizes no integers
    ],
    ids=["in training", "of another dtype"],
)
def test_elsewhere_keras_repeats(layer, x, gradients):
    found, kinds = traced(layer, x, gradients=gradients)
    assert ("Tile" in kinds, "ResizeNearestNeighbor" in kinds) == (True, False)
    np.testing.assert_array_equal(tf.cast(found, "float32"), np.ones((1, 4, 4, 1)))
