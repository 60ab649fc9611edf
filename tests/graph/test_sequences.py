"""One-dimensional layers are computed as images of one row, with nothing but convolutions between two of them."""

from collections import Counter

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.graph import freeze

GENERATOR = np.random.default_rng(0)


def model(build, shape=(12, 4)):
    inputs = keras.Input(shape, name="x")
    made = keras.Model(inputs, build(inputs))
    for weight in made.weights:
        weight.assign(GENERATOR.uniform(0.3, 1.2, weight.shape) * GENERATOR.choice([1.0, 0.7], weight.shape))
    return made


def folded_ops(made, length=12):
    """The ops of the folded graph, once it is seen to compute what Keras computes."""
    x = GENERATOR.normal(size=(3, length, *made.inputs[0].shape[2:])).astype("float32")
    graph = freeze(made)
    expected = [np.asarray(value) for value in keras.tree.flatten(made(x))]
    for found, wanted in zip(graph.predict({"x": x}).values(), expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    counted = Counter(node.op for node in graph.graph_def.node)
    return {op: count for op, count in counted.items() if op not in ("Const", "Placeholder", "Identity")}


def conv(x, activation=None, **options):
    return layers.Conv1D(4, 3, activation=activation, **{"padding": "same", **options})(x)


def norm(x):
    return layers.ReLU()(layers.BatchNormalization()(x))


def test_two_layers_meet_without_reshaping():
    ops = folded_ops(model(lambda x: conv(norm(conv(x, use_bias=False)), "relu")))
    assert ops == {"ExpandDims": 1, "Conv2D": 2, "BiasAdd": 2, "Relu": 2, "Squeeze": 1}


def test_a_residual_sum_and_pooling():
    def build(x):
        shortcut = norm(conv(x))
        summed = layers.ReLU()(layers.Add()([layers.BatchNormalization()(conv(shortcut)), shortcut]))
        return conv(layers.AveragePooling1D(2)(layers.MaxPooling1D(2)(summed)))

    ops = folded_ops(model(build))
    assert (ops["ExpandDims"], ops["Squeeze"], ops["AddV2"], ops["BiasAdd"]) == (1, 1, 1, 3)


def test_depthwise_and_separable():
    def build(x):
        x = layers.DepthwiseConv1D(3, padding="same", activation="relu")(x)
        return norm(layers.SeparableConv1D(6, 3, padding="same")(x))

    ops = folded_ops(model(build))
    assert (ops["ExpandDims"], ops["Squeeze"], ops["BiasAdd"]) == (1, 1, 2)


@pytest.mark.parametrize("dilation", [1, 3])
def test_causal_padding_is_that_of_the_convolution(dilation):
    def build(x):
        for _ in range(2):
            x = conv(x, "relu", padding="causal", dilation_rate=dilation)
        return x

    assert folded_ops(model(build)) == {"ExpandDims": 1, "Conv2D": 2, "BiasAdd": 2, "Relu": 2, "Squeeze": 1}


def test_padding_of_a_sequence_that_is_read_twice_stays():
    def build(x):
        padded = layers.ZeroPadding1D(2)(x)
        return [padded, conv(padded, padding="valid")]

    assert folded_ops(model(build))["Pad"] == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (12, 1), (12, 4), (1, 12, 1), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("operation", [keras.ops.multiply, keras.ops.subtract], ids=lambda function: function.__name__)
def test_constants_of_every_shape(shape, operation):
    constant = GENERATOR.uniform(0.5, 2, shape).astype("float32")
    ops = folded_ops(model(lambda x: conv(operation(conv(x), constant))))
    assert (ops["ExpandDims"], ops["Squeeze"]) == (1, 1)


def test_a_bias_for_each_step_stays():
    """Keras adds it as a BiasAdd along the second axis, of which TensorFlow has no kernel for images on CPUs."""
    constant = GENERATOR.normal(size=(12, 1)).astype("float32")
    assert folded_ops(model(lambda x: conv(keras.ops.add(conv(x), constant))))["Squeeze"] == 2


def test_a_constant_that_adds_an_axis():
    constant = GENERATOR.normal(size=(2, 1, 1, 4)).astype("float32")
    assert folded_ops(model(lambda x: keras.ops.add(conv(x), constant)))["Squeeze"] == 1


def test_a_sum_with_another_sequence_than_an_image():
    ops = folded_ops(model(lambda x: conv(layers.Add()([conv(x), x]))))
    assert (ops["ExpandDims"], ops["Squeeze"]) == (2, 2)


def test_results_between_layers_are_outputs():
    def build(x):
        biased = conv(x)
        return [biased, conv(biased, "relu"), layers.Flatten()(biased)]

    ops = folded_ops(model(build))
    assert (ops["ExpandDims"], ops["Conv2D"], ops["Squeeze"]) == (1, 2, 2)


def test_images_squeezed_along_either_axis():
    """What is squeezed along one axis and expanded along the other is a transposed image."""

    def build(x):
        row = layers.Conv2D(4, (1, 3), padding="same")(keras.ops.expand_dims(x, 1))
        column = keras.ops.expand_dims(keras.ops.relu(keras.ops.squeeze(row, 1)), 2)
        column = layers.Conv2D(4, (3, 1), padding="same", activation="relu")(column)
        scaled = keras.ops.squeeze(column, 2) * GENERATOR.uniform(1, 2, (12, 4)).astype("float32")
        return layers.Conv2D(4, (3, 1))(keras.ops.expand_dims(scaled, -2))

    ops = folded_ops(model(build))
    assert (ops["ExpandDims"], ops["Squeeze"]) == (2, 1)


def test_open_lengths():
    ops = folded_ops(model(lambda x: conv(norm(conv(x))), shape=(None, 4)), length=9)
    assert ops == {"ExpandDims": 1, "Conv2D": 2, "BiasAdd": 2, "Relu": 1, "Squeeze": 1}
