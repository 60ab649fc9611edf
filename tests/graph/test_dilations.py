"""Dilated convolutions become one node; whatever only looks like one stays and computes what it did."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.graph import freeze

GENERATOR = np.random.default_rng(0)


def computes_the_same(model, shape):
    """The folded graph, once it is seen to compute what Keras computes."""
    x = GENERATOR.normal(size=(2, *shape)).astype("float32")
    graph = freeze(model)
    expected = [np.asarray(value) for value in keras.tree.flatten(model(x))]
    for found, wanted in zip(graph.predict(x).values(), expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    return [node for node in graph.graph_def.node if node.op not in ("Const", "Placeholder", "Identity")]


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("rate", "kernel"), [(2, 3), ((5, 2), (2, 4)), ((1, 4), (1, 3))], ids=str)
def test_images(rate, padding, kernel):
    shape = (23, 18, 3)
    convolution = layers.Conv2D(4, kernel, padding=padding, dilation_rate=rate, use_bias=False)
    model = keras.Sequential([keras.Input(shape), convolution, layers.BatchNormalization(), layers.ReLU()])
    nodes = computes_the_same(model, shape)
    assert [node.op for node in nodes] == ["Conv2D", "BiasAdd", "Relu"]
    expected = [1, *(rate if isinstance(rate, tuple) else (rate, rate)), 1]
    assert nodes[0].attr["dilations"].list.i == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rate", [2, 5])
@pytest.mark.parametrize("padding", ["same", "valid", "causal"])
@pytest.mark.parametrize(("kernel", "length"), [(2, 16), (3, 17)])
def test_sequences(rate, padding, kernel, length):
    convolution = layers.Conv1D(4, kernel, padding=padding, dilation_rate=rate, activation="relu")
    model = keras.Sequential([keras.Input((length, 3)), convolution])
    ops = [node.op for node in computes_the_same(model, (length, 3))]
    assert ops == ["ExpandDims", "Conv2D", "BiasAdd", "Relu", "Squeeze"]


def test_that_are_outputs_keep_their_names():
    inputs = keras.Input((8, 8, 3))
    dilated = layers.Conv2D(4, 3, dilation_rate=2, use_bias=False)(inputs)
    nodes = computes_the_same(keras.Model(inputs, [dilated, layers.ReLU()(dilated)]), (8, 8, 3))
    assert [node.op for node in nodes] == ["Conv2D", "Relu"]


def blocks(x, *, sizes=(2, 2), back=(2, 2), start=0, strides=1, also_returned=False):
    between = tf.space_to_batch(x, sizes, [[1 + start, 1], [0, 0]])
    convolved = tf.nn.conv2d(between, tf.ones((3, 1, 3, 2)), strides, "VALID")
    result = tf.batch_to_space(convolved, back, [[start, 0], [0, 0]])
    return [result, convolved] if also_returned else [result]


@pytest.mark.parametrize(
    "changes",
    [{"start": 2}, {"back": (1, 4)}, {"back": (4, 1)}, {"strides": (1, 2)}, {"also_returned": True}],
    ids=str,
)
def test_what_only_looks_alike_stays(changes):
    class Blocks(layers.Layer):
        def call(self, x):
            return blocks(x, **changes)

    inputs = keras.Input((8, 8, 3))
    nodes = computes_the_same(keras.Model(inputs, Blocks()(inputs)), (8, 8, 3))
    assert [node.op for node in nodes] == ["SpaceToBatchND", "Conv2D", "BatchToSpaceND"]


def test_blocks_of_one_of_several_outputs_stay():
    class Halves(layers.Layer):
        def call(self, x):
            return tf.batch_to_space(tf.split(x, 2, axis=-1)[1], (1, 1), [[0, 0], [0, 0]])

    inputs = keras.Input((8, 8, 4))
    nodes = computes_the_same(keras.Model(inputs, Halves()(inputs)), (8, 8, 4))
    assert [node.op for node in nodes] == ["Split", "BatchToSpaceND"]


def test_a_block_without_padding_is_a_dilation():
    class Blocks(layers.Layer):
        def call(self, x):
            return blocks(x)

    inputs = keras.Input((8, 8, 3))
    nodes = computes_the_same(keras.Model(inputs, Blocks()(inputs)), (8, 8, 3))
    assert [node.op for node in nodes] == ["Conv2D"]


def test_open_sizes_stay():
    model = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(4, 3, padding="same", dilation_rate=2)])
    assert "SpaceToBatchND" in [node.op for node in computes_the_same(model, (9, 8, 3))]
