"""Folding: which nodes are left, that zeros and names survive, and what must not be folded."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.graph import FrozenGraph, GraphEditor, fold_constants, freeze

GENERATOR = np.random.default_rng(0)


def model_of(shape, *parts):
    model = keras.Sequential([keras.Input(shape), *parts])
    for variable in model.weights:
        variable.assign(GENERATOR.uniform(0.3, 1.2, variable.shape))
    return model


def ops(graph):
    counts = Counter(node.op for node in graph.graph_def.node)
    return {op: count for op, count in counts.items() if op not in ("Const", "Placeholder", "Identity")}


def constants(graph):
    editor = GraphEditor(graph.graph_def)
    return {name: editor.constant(name) for name, node in editor.nodes.items() if node.op == "Const"}


def constant_bytes(graph):
    return sum(value.nbytes for value in constants(graph).values())


def assert_computes_the_same(graph, model, inputs):
    (value,) = graph.predict(inputs).values()
    expected = np.asarray(model(inputs))
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        (
            (8, 8, 3),
            lambda: [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()],
            {"Conv2D": 1, "BiasAdd": 1, "Relu": 1},
        ),
        (
            (8, 8, 3),
            lambda: [layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(), layers.Rescaling(2.0, -1.0)],
            {"Conv2D": 1, "BiasAdd": 1},
        ),
        (
            (8, 8, 3),
            lambda: [layers.DepthwiseConv2D(3, depth_multiplier=2), layers.BatchNormalization()],
            {"DepthwiseConv2dNative": 1, "BiasAdd": 1},
        ),
        ((5,), lambda: [layers.Dense(4), layers.BatchNormalization()], {"MatMul": 1, "BiasAdd": 1}),
        (
            (8, 8, 3),
            lambda: [layers.ZeroPadding2D(2), layers.Conv2D(4, 3, 2), layers.BatchNormalization()],
            {"Conv2D": 1, "BiasAdd": 1},
        ),
    ],
)
def test_what_is_left(shape, parts, expected):
    model = model_of(shape, *parts())
    graph = freeze(model)
    assert ops(graph) == expected
    assert sum(ops(freeze(model, fold=False)).values()) > sum(expected.values())
    assert_computes_the_same(graph, model, GENERATOR.normal(size=(3, *shape)).astype("float32"))


def test_an_activation_in_between_is_not_folded_across():
    model = model_of((8, 8, 3), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization())
    graph = freeze(model)
    assert ops(graph) == {"Conv2D": 1, "BiasAdd": 1, "Relu": 1, "Mul": 1, "AddV2": 1}
    assert_computes_the_same(graph, model, GENERATOR.normal(size=(3, 8, 8, 3)).astype("float32"))


def test_pruned_zeros_stay_zeros():
    model = model_of((8, 8, 3), layers.Conv2D(16, 3), layers.BatchNormalization(), layers.ReLU())
    kernel = model.layers[0].kernel
    mask = GENERATOR.random(kernel.shape) < 0.25
    kernel.assign(kernel.numpy() * mask)
    (weights,) = [value for value in constants(freeze(model)).values() if value.shape == kernel.shape]
    np.testing.assert_array_equal(weights != 0, mask)


def test_node_names_speak_of_the_layers():
    model = model_of((8, 8, 3), layers.Conv2D(4, 3, name="stem"), layers.BatchNormalization(), layers.Flatten())
    names = {node.op: node.name for node in freeze(model).graph_def.node}
    assert "stem" in names["Conv2D"]


def test_a_shared_backbone_is_stored_once():
    backbone = model_of((8, 8, 3), layers.Conv2D(32, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten())
    one, other = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    model = keras.Model([one, other], layers.Dense(2)(layers.Subtract()([backbone(one), backbone(other)])))
    graph = freeze(model)
    assert ops(graph)["Conv2D"] == 2
    assert constant_bytes(graph) <= 1.1 * sum(variable.numpy().nbytes for variable in model.weights)
    inputs = [GENERATOR.normal(size=(3, 8, 8, 3)).astype("float32") for _ in range(2)]
    np.testing.assert_allclose(next(iter(graph.predict(inputs).values())), model(inputs), atol=1e-3, rtol=1e-5)


def graph_of(function, *specs):
    """A FrozenGraph of a function of plain TensorFlow ops, not folded yet."""
    concrete = tf.function(function).get_concrete_function(*specs)
    inputs = {tensor.op.name: tf.TensorSpec(tensor.shape, tensor.dtype, tensor.op.name) for tensor in concrete.inputs}
    outputs = {
        f"output_{index}": (tensor.name.removesuffix(":0"), tf.TensorSpec(tensor.shape, tensor.dtype))
        for index, tensor in enumerate(concrete.outputs)
    }
    return FrozenGraph(graph_def=concrete.graph.as_graph_def(), inputs=inputs, outputs=outputs, name="plain")


WEIGHTS = GENERATOR.normal(size=(5, 4)).astype("float32")
FILTERS = GENERATOR.normal(size=(3, 3, 2, 4)).astype("float32")
CHANNELS = np.array([1.0, 2.0, -3.0, 0.5], "float32")
IMAGE = tf.TensorSpec([None, 6, 6, 2], tf.float32)
VECTOR = tf.TensorSpec([None, 5], tf.float32)


def conv(x, padding="VALID"):
    return tf.nn.conv2d(x, FILTERS, 1, padding)


TRAPS = {
    "constant minus result": (lambda x: CHANNELS - tf.matmul(x, WEIGHTS), VECTOR),
    "result minus constant": (lambda x: tf.matmul(x, WEIGHTS) - CHANNELS, VECTOR),
    "constant times result": (lambda x: CHANNELS * tf.matmul(x, WEIGHTS) + 1.0, VECTOR),
    "constant by row": (lambda x: tf.matmul(x, WEIGHTS) * tf.constant([[2.0]]), VECTOR),
    "constant by column of the image": (
        lambda x: conv(x) * tf.reshape(tf.constant([1.0, 2.0, 3.0, 4.0]), [4, 1]),
        IMAGE,
    ),
    "result times itself": (lambda x: (y := tf.matmul(x, WEIGHTS)) * y, VECTOR),
    "read twice": (lambda x: (tf.nn.relu(y := tf.matmul(x, WEIGHTS)), y * CHANNELS), VECTOR),
    "read twice behind the bias": (lambda x: (y := tf.matmul(x, WEIGHTS) + CHANNELS, y * CHANNELS), VECTOR),
    "transposed weights": (lambda x: tf.matmul(x, tf.transpose(WEIGHTS), transpose_b=True) * CHANNELS, VECTOR),
    "variable weights": (lambda x: tf.matmul(x, tf.transpose(x)) * 2.0 + 1.0, VECTOR),
    "constant on the left": (lambda x: tf.matmul(WEIGHTS, x, transpose_a=True) * 2.0, tf.TensorSpec([5, 3])),
    "padding with ones": (lambda x: conv(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=1.0)), IMAGE),
    "reflected padding": (lambda x: conv(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")), IMAGE),
    "padding before SAME": (lambda x: conv(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), "SAME"), IMAGE),
    "padding read twice": (lambda x: (y := tf.pad(x, [[0, 0], [1, 2], [0, 1], [0, 0]]), conv(y)), IMAGE),
    "a bias along the second axis": (
        lambda x: tf.nn.bias_add(tf.reshape(tf.matmul(x, WEIGHTS), [-1, 2, 2, 1]), [1.0, -2.0], data_format="NCHW"),
        VECTOR,
    ),
    "a constant that adds an axis to the rows": (
        # Not a sum: TensorFlow's own fusion of a product and a sum loses the axis.
        lambda x: tf.reshape(tf.matmul(x, WEIGHTS), [-1, 4]) * CHANNELS[None, None],
        VECTOR,
    ),
    "a constant that adds an axis to the reshaped": (
        lambda x: tf.reshape(tf.matmul(x, WEIGHTS), [-1, 2, 2]) * tf.reshape(CHANNELS, [1, 1, 2, 2]),
        VECTOR,
    ),
    "rows that are taken apart": (lambda x: tf.reshape(tf.matmul(x, WEIGHTS), [-1, 2]) + CHANNELS[:2], VECTOR),
    "rows that are put together": (
        lambda x: tf.reshape(tf.matmul(x, WEIGHTS), [1, -1, 8]) * tf.range(1.0, 9.0),
        tf.TensorSpec([4, 5]),
    ),
    "zero scale": (lambda x: tf.nn.bias_add(conv(x) * 0.0, CHANNELS), IMAGE),
    "constants alone": (lambda x: (x, tf.exp(tf.reduce_sum(WEIGHTS) * 0.1)), VECTOR),
    "split": (lambda x: (parts := tf.split(tf.matmul(x, WEIGHTS), 2, axis=1))[0] * parts[1] * 2.0, VECTOR),
    "branches": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - 1.0), VECTOR),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name):
    function, spec = TRAPS[name]
    graph = graph_of(function, spec)
    inputs = GENERATOR.normal(size=[size or 3 for size in spec.shape]).astype("float32")
    folded = fold_constants(graph)
    assert folded.outputs == graph.outputs
    for value, expected in zip(folded.predict(inputs).values(), tf.nest.flatten(function(inputs)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_a_constant_with_more_axes_stays():
    """It broadcasts the result to one axis more, which a bias does not."""
    graph = fold_constants(graph_of(lambda x: tf.matmul(x, WEIGHTS) * CHANNELS[None, None], VECTOR))
    assert ops(graph) == {"MatMul": 1, "Mul": 1}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (8, 7)])
@pytest.mark.parametrize("layer", [layers.Conv2D, layers.DepthwiseConv2D])
def test_padding_as_same_pads_is_the_convolutions_own(layer, size):
    """As the MobileNets pad before a stride of two; a depthwise convolution takes no other padding."""
    same = tuple((length % 2, 1) for length in size)  # (0, 1) if even, else (1, 1)
    shape = (*size, 2)
    arguments = (4, 3) if layer is layers.Conv2D else (3,)
    name = "Conv2D" if layer is layers.Conv2D else "DepthwiseConv2dNative"
    x = GENERATOR.normal(size=(3, *shape)).astype("float32")
    for padding, own in [(same, b"SAME"), (((1, 0), (1, 0)), b"EXPLICIT" if layer is layers.Conv2D else b"VALID")]:
        model = model_of(shape, layers.ZeroPadding2D(padding), layer(*arguments, strides=2))
        graph = freeze(model)
        (node,) = [node for node in graph.graph_def.node if node.op == name]
        assert node.attr["padding"].s == own
        assert ops(graph).get("Pad", 0) == (own == b"VALID")
        assert_computes_the_same(graph, model, x)


def test_padding_of_the_batch_stays():
    """Only nodes are compared: TensorFlow's own fusion of Pad and Conv2D forgets the batch."""
    graph = fold_constants(graph_of(lambda x: conv(tf.pad(x, [[1, 0], [1, 1], [0, 0], [0, 0]])), IMAGE))
    assert ops(graph) == {"Pad": 1, "Conv2D": 1}


def test_folding_twice_changes_nothing():
    graph = freeze(model_of((8, 8, 3), layers.ZeroPadding2D(1), layers.Conv2D(4, 3), layers.BatchNormalization()))
    again = fold_constants(graph)
    assert ops(again) == ops(graph)
    assert constant_bytes(again) == constant_bytes(graph)


def test_random_numbers_are_not_constants():
    graph = fold_constants(graph_of(lambda x: x + tf.random.uniform([5]), VECTOR))
    assert ops(graph)["RandomUniform"] == 1


def test_a_rewritten_node_is_found_by_the_name_of_the_original_one():
    model = model_of((6, 4), layers.Conv1D(4, 3), layers.ReLU(), layers.Conv1D(4, 3), layers.Dense(3))
    unfolded = freeze(model, fold=False)
    names = {node.op: node.name for node in unfolded.graph_def.node}
    folded = fold_constants(unfolded)
    editor = GraphEditor(folded.graph_def, fold_constants(folded).origins)  # the table survives a second folding
    assert names["Relu"] not in editor.nodes
    relu = editor.replacement(names["Relu"])
    assert editor.nodes[relu].op == "Relu"
    assert editor.origin(relu) == names["Relu"]
    assert editor.replacement(names["Conv2D"]) == names["Conv2D"] == editor.origin(names["Conv2D"])
    assert editor.replacement("no such node") is None
