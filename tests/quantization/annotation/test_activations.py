"""Activations are recognised by what they compute, however they are written."""

import keras
import pytest
import tensorflow as tf

from tfopt.graph import GraphEditor
from tfopt.quantization.annotation.activations import find_activation


def find(function, outputs=()):
    graph = tf.function(lambda x: tf.identity(function(tf.identity(x, name="start")))).get_concrete_function(
        tf.TensorSpec((None, 4))
    )
    return find_activation(GraphEditor(graph.graph.as_graph_def()), "start", outputs)


SPELLINGS = {
    "Relu": [tf.nn.relu, keras.activations.relu],
    "Relu6": [tf.nn.relu6, lambda x: keras.activations.relu(x, max_value=6)],
    "LeakyRelu": [lambda x: tf.nn.leaky_relu(x, 0.1), lambda x: keras.activations.leaky_relu(x, 0.1)],
    "Elu": [tf.nn.elu, keras.activations.elu],
    "Tanh": [tf.nn.tanh, keras.activations.tanh],
    "Sigmoid": [tf.nn.sigmoid],
    "GeluExact": [
        keras.activations.gelu,
        tf.nn.gelu,
        lambda x: 0.5 * x * (1.0 + tf.math.erf(x / 2**0.5)),
        lambda x: x * (0.5 * tf.math.erfc(-x * 0.70710678)),
    ],
    "GeluApproximate": [
        lambda x: keras.activations.gelu(x, approximate=True),
        lambda x: tf.nn.gelu(x, approximate=True),
        lambda x: 0.5 * x * (1.0 + tf.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))),
    ],
}


@pytest.mark.parametrize(
    ("name", "function"), [(name, function) for name, functions in SPELLINGS.items() for function in functions]
)
def test_every_spelling_is_found(name, function):
    activation = find(function)
    assert activation.name == name
    assert activation.alpha == pytest.approx(0.1 if name == "LeakyRelu" else 0.0)


@pytest.mark.parametrize(
    "function",
    [
        keras.activations.silu,
        keras.activations.softplus,
        lambda x: keras.activations.gelu(1.01 * x),
        lambda x: 0.5 * x * (1.0 + tf.math.erf(x)),
        lambda x: 0.501 * x * (1.0 + tf.math.erf(x / 2**0.5)),
        lambda x: x * (1.0 + tf.math.erf(tf.reduce_sum(x))),
        lambda x: x,
    ],
)
def test_what_is_nearly_one_is_none(function):
    assert find(function) is None


@pytest.mark.parametrize("after", [lambda x: x + 1e-3, lambda x: x * tf.constant([1.0, 2.0, 3.0, 4.0])])
def test_what_comes_behind_is_no_part_of_it(after):
    alone, followed = find(keras.activations.gelu), find(lambda x: after(keras.activations.gelu(x)))
    assert followed.name == "GeluExact"
    assert len(followed.nodes) == len(alone.nodes)


def test_a_value_that_leaves_the_graph_on_the_way_makes_it_none():
    nodes = find(keras.activations.gelu).nodes
    assert find(keras.activations.gelu, outputs=(nodes[0],)) is None
    assert find(keras.activations.gelu, outputs=(nodes[-1],)).nodes == nodes
    assert find(keras.activations.gelu, outputs=("start",)) is None
    assert find(lambda x: keras.activations.gelu(x) + x) is None
