"""Adaptive pooling with equal windows is one pooling, with Keras' results and gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.compat.pooling import plain_pooling
from tfopt.graph import freeze

SIZES = {1: ((12,), 4), 2: ((8, 12), (4, 6)), 3: ((4, 6, 2), (2, 3, 2))}


def results(layer, x):
    @tf.function(autograph=False)
    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.square(y - tf.reshape(tf.range(tf.size(y), dtype=y.dtype), tf.shape(y))))
        return y, tape.gradient(loss, x)

    function = call.get_concrete_function(tf.TensorSpec((None, *x.shape[1:])))
    pools = [operation.type for operation in function.graph.get_operations() if "Pool" in operation.type]
    return function(tf.constant(x)), sum("Grad" not in pool for pool in pools)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("data_format", ["channels_last", pytest.param("channels_first", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", SIZES)
@pytest.mark.parametrize("kind", ["Average", "Max"])
def test_equal_windows_are_pooled_once(kind, rank, data_format):
    size, wanted = SIZES[rank]
    layer = getattr(layers, f"Adaptive{kind}Pooling{rank}D")(wanted, data_format=data_format)
    shape = (2, *size, 3) if data_format == "channels_last" else (2, 3, *size)
    x = np.random.default_rng(0).integers(0, 3, shape).astype("float32")  # most maxima are found twice in a window
    expected, before = results(layer, x)
    with plain_pooling(gradients=True):
        found, count = results(layer, x)
    for mine, of_keras in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, of_keras, rtol=1e-5, atol=1e-5)
    assert count <= before / 2


def test_a_mean_of_float16_does_not_overflow_in_its_window():
    layer = layers.AdaptiveAveragePooling2D(1, dtype="float16")
    with plain_pooling(gradients=True):
        np.testing.assert_array_equal(layer(np.full((1, 112, 112, 1), 30, "float16")), [[[[30]]]])


def test_windows_that_differ_are_pooled_by_keras():
    layer, x = layers.AdaptiveAveragePooling2D(3), np.random.default_rng(0).normal(size=(2, 6, 8, 3)).astype("float32")
    expected, before = results(layer, x)
    with plain_pooling(gradients=True):
        found, count = results(layer, x)
    assert count == before
    np.testing.assert_array_equal(found[0], expected[0])


def test_an_artifact_has_one_pooling_for_each():
    inputs = keras.Input((8, 8, 3))
    model = keras.Model(inputs, layers.AdaptiveAveragePooling2D(2)(layers.AdaptiveMaxPooling2D(4)(inputs)))
    graph = freeze(model)
    assert [node.op for node in graph.graph_def.node if "Pool" in node.op] == ["MaxPool", "AvgPool"]
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    np.testing.assert_allclose(graph.predict(x)["output_0"], model(x), atol=1e-6)
