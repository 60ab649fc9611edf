"""Layer normalisations in one kernel: found by what they compute, and nothing else taken for one."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.exporting.int8.layer_norm import fuse_layer_norms
from tfopt.graph import freeze

RNG = np.random.default_rng(0)


def fused(model, shape, batch=3, spread=1.0):
    """Returns how many kernels the fused graph has, once it is seen to compute what the model does."""
    graph = freeze(model)
    result = fuse_layer_norms(graph)
    x = (spread * RNG.normal(size=(batch, *(size or 5 for size in shape)))).astype("float32")
    expected = next(iter(graph.predict(x).values()))
    found = next(iter(result.predict(x).values()))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    counted = Counter(node.op for node in result.graph_def.node)
    assert counted["_MklLayerNorm"] == 0 or counted["Rsqrt"] == 0
    return counted["_MklLayerNorm"]


def model_of(layer, shape):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    for variable in model.variables:
        variable.assign(RNG.uniform(0.5, 2.0, variable.shape) * RNG.choice([-1, 1], variable.shape))
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 4, 6), (None, 6), (None, None, 6)], ids=str)
@pytest.mark.parametrize("parts", [{}, {"scale": False}, {"center": False}, {"scale": False, "center": False}], ids=str)
def test_the_layer_of_keras(shape, parts):
    assert fused(model_of(layers.LayerNormalization(**parts), shape), shape) == 1


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 1e-1])
def test_its_epsilon_counts(epsilon):
    """Where the variance is no larger than it."""
    model = model_of(layers.LayerNormalization(epsilon=epsilon), (8,))
    assert fused(model, (8,), spread=1.0) == 1
    assert fused(model, (8,), spread=np.sqrt(epsilon)) == 1


def written_out(x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-3) * np.arange(1, 7, dtype="float32") + 0.5


def without_a_mean(x):
    return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-3)


def over_another_axis(x):
    mean, variance = tf.nn.moments(x, [1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def over_two_axes(x):
    mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def with_a_scale_for_each_row(x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) * np.arange(1, 5, dtype="float32")[:, None]


def of_twice_the_deviation(x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(4 * variance + 1e-3)


def with_the_mean_read_again(x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) + tf.tanh(mean)


class Function(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


@pytest.mark.parametrize("function", [written_out, with_a_scale_for_each_row])
def test_another_spelling(function):
    """What follows and is no scale or offset of the channels stays behind the kernel."""
    assert fused(model_of(Function(function), (4, 6)), (4, 6)) == 1


@pytest.mark.parametrize(
    "function",
    [
        without_a_mean,
        over_another_axis,
        over_two_axes,
        of_twice_the_deviation,
        with_the_mean_read_again,
    ],
)
def test_what_is_none_stays(function):
    assert fused(model_of(Function(function), (4, 6)), (4, 6)) == 0


def test_what_the_input_is_read_for_besides():
    """A residual stream is read by its normalisation and by the sum behind it."""

    def build(x):
        return layers.Add()([x, layers.Dense(6)(layers.LayerNormalization()(x))])

    assert fused(model_of(build, (4, 6)), (4, 6)) == 1


def test_values_that_leave_the_graph_are_kept():
    inputs = keras.Input((4, 6))
    normal = layers.LayerNormalization()(inputs)
    graph = freeze(keras.Model(inputs, [normal, layers.Dense(2)(normal)]))
    x = RNG.normal(size=(2, 4, 6)).astype("float32")
    expected, found = graph.predict(x), fuse_layer_norms(graph).predict(x)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_no_examples_at_all():
    model = model_of(layers.LayerNormalization(), (4, 6))
    result = fuse_layer_norms(freeze(model))
    assert next(iter(result.predict(np.zeros((0, 4, 6), "float32")).values())).shape == (0, 4, 6)
