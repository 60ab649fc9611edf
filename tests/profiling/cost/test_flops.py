"""The count of multiply-adds against arithmetic, against published figures and against TensorFlow's own profiler."""

import math
from dataclasses import replace

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.models.table import PUBLISHED_MODELS
from tfopt.profiling.cost.flops import count_flops, count_graph

MODELS = {
    "dense": (lambda: layers.Dense(5), (3, 4), 3 * 4 * 5),
    "convolution": (lambda: layers.Conv2D(8, 3, strides=2), (9, 9, 4), 4 * 4 * 8 * 3 * 3 * 4),
    "groups": (lambda: layers.Conv2D(8, 3, groups=2), (5, 5, 4), 3 * 3 * 8 * 3 * 3 * 2),
    "dilation": (lambda: layers.Conv2D(8, 3, dilation_rate=2), (9, 9, 4), 5 * 5 * 8 * 3 * 3 * 4),
    "convolution of signals": (lambda: layers.Conv1D(8, 3, padding="causal"), (9, 4), 9 * 8 * 3 * 4),
    "convolution of volumes": (lambda: layers.Conv3D(8, 3), (4, 4, 4, 2), 2 * 2 * 2 * 8 * 27 * 2),
    "depthwise": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), (5, 5, 4), 3 * 3 * 8 * 3 * 3),
    "separable": (lambda: layers.SeparableConv2D(6, 3), (5, 5, 4), 3 * 3 * 4 * 9 + 3 * 3 * 4 * 6),
    "transposed": (lambda: layers.Conv2DTranspose(6, 3, strides=2), (5, 5, 4), 5 * 5 * 4 * 3 * 3 * 6),
    "transposed of volumes": (lambda: layers.Conv3DTranspose(6, 2), (3, 3, 3, 4), 27 * 4 * 8 * 6),
    "lstm": (lambda: layers.LSTM(16), (12, 8), 12 * 4 * 16 * (8 + 16)),
    "unrolled lstm": (lambda: layers.LSTM(16, unroll=True), (12, 8), 12 * 4 * 16 * (8 + 16)),
    "gru": (lambda: layers.GRU(16), (12, 8), 12 * 3 * 16 * (8 + 16)),
    "two directions": (lambda: layers.Bidirectional(layers.LSTM(16)), (12, 8), 2 * 12 * 4 * 16 * (8 + 16)),
    "convolutional lstm": (lambda: layers.ConvLSTM2D(4, 3, padding="same"), (7, 9, 9, 3), 7 * 81 * 16 * 9 * (3 + 4)),
    "normalization and pooling": (lambda: layers.MaxPooling2D(), (4, 4, 3), 0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_the_multiply_adds_of_its_formula(name):
    layer, shape, expected = MODELS[name]
    model = keras.Sequential([keras.Input(shape), layer(), layers.Activation("gelu")])
    count = count_flops(model)
    assert count.multiply_adds == expected
    assert not count.uncounted
    assert count_flops(model, batch_size=3).multiply_adds == 3 * expected


def test_attention_has_four_projections_and_two_products():
    inputs = keras.Input((10, 16))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 4)(inputs, inputs))
    assert count_flops(model).multiply_adds == 4 * 10 * 16 * 8 + 2 * 10 * 10 * 8


def test_loops_inside_loops_and_rounds_that_follow_from_shapes():
    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(5)

        def call(self, rows):
            return tf.map_fn(lambda row: tf.map_fn(lambda word: self.dense(word[None])[0], row), rows)

    model = Nested()
    model(tf.zeros((2, 3, 8)))
    assert count_flops(model, inputs=tf.zeros((1, 3, 8))).multiply_adds == 3 * 8 * 5


def test_a_loop_with_rounds_that_change_from_round_to_round_is_not_guessed():
    def triangle(x):
        def inner(rounds, x):
            body = lambda number, x: (number + 1, x @ x)  # noqa: E731
            return rounds + 1, tf.while_loop(lambda *_: True, body, (0, x), maximum_iterations=rounds)[1]

        return tf.while_loop(lambda rounds, x: rounds < 4, inner, (1, x), maximum_iterations=3)[1]

    count = count_graph(tf.function(triangle).get_concrete_function(tf.TensorSpec((2, 2))).graph)
    assert count.multiply_adds == 3 * 8
    assert "rounds" in count.uncounted[0]


def test_of_two_branches_the_expensive_one_counts():
    def either(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ x @ x, lambda: x)

    assert count_graph(tf.function(either).get_concrete_function(tf.TensorSpec((2, 2))).graph).multiply_adds == 2 * 8


def test_what_no_output_needs_is_not_executed_and_does_not_count():
    def unused(x):
        _ = x @ x
        return x + 1

    assert count_graph(tf.function(unused).get_concrete_function(tf.TensorSpec((2, 2))).graph).multiply_adds == 0


def test_an_ellipsis_in_an_einsum_stands_for_the_batch():
    product = tf.function(lambda x, y: tf.einsum("...ab,...bc->...ac", x, y))
    graph = product.get_concrete_function(tf.TensorSpec((2, 3, 4, 5)), tf.TensorSpec((3, 5, 6))).graph
    assert count_graph(graph).multiply_adds == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize("kind", ["lstm", "convolution", "dense"])
def test_training_has_three_times_the_multiply_adds_without_the_gradient_for_the_inputs(kind):
    """The products of the first layer with the inputs' gradient are the only ones that training leaves out."""
    if kind == "lstm":
        first, second, shape = layers.LSTM(16, return_sequences=True), layers.LSTM(8), (12, 4)
        left_out = 12 * 4 * 16 * 4
    elif kind == "convolution":
        first, second, shape = layers.Conv2D(6, 3), layers.Conv2D(4, 3), (9, 9, 4)
        left_out = 7 * 7 * 6 * 9 * 4
    else:
        first, second, shape = layers.Dense(6), layers.Dense(4), (3,)
        left_out = 3 * 6
    model = keras.Sequential([keras.Input(shape), first, second])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, [weight.value for weight in model.trainable_weights])

    counted = count_graph(step.get_concrete_function(tf.TensorSpec((1, *shape))).graph)
    assert counted.multiply_adds == 3 * count_flops(model).multiply_adds - left_out
    assert not counted.uncounted


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_precision_does_not_change_the_count(policy):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, dtype=policy)])
    assert count_flops(model).multiply_adds == 32


def test_an_open_dimension_needs_its_size():
    model = keras.Sequential([keras.Input((None, 8)), layers.LSTM(16)])
    with pytest.raises(ConfigError, match=r"open_size=None, an input of shape \(None, None, 8\)"):
        count_flops(model)
    assert count_flops(model, open_size=12).multiply_adds == 12 * 4 * 16 * (8 + 16)
    halved = keras.Sequential([keras.Input((None, 8)), layers.MaxPooling1D(2), layers.Conv1D(4, 9)])
    with pytest.raises(ConfigError, match=r"open_size must fit the layers.*open_size=16, and Conv1D: "):
        count_flops(halved, open_size=16)


def test_inputs_of_a_subclassed_model_are_those_of_its_first_call():
    class Sum(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(5)

        def call(self, inputs):
            return self.dense(inputs["a"]) + inputs["b"]

    model = Sum()
    with pytest.raises(UnsupportedModelError, match="must be built"):
        count_flops(model)
    model({"a": tf.zeros((2, 3)), "b": tf.zeros((2, 5))})
    assert count_flops(model).multiply_adds == 15


def test_the_count_is_tensorflows_own_where_that_has_no_gaps():
    """TensorFlow's profiler counts no einsum, no function and no loop; in a flat graph without them it is right."""
    inputs = keras.Input((12, 12, 3))
    x = layers.DepthwiseConv2D(3)(layers.Conv2D(8, 3)(inputs))
    x = layers.Reshape((-1, 8))(x)
    x = keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1)))
    model = keras.Model(inputs, layers.Dense(3)(x))
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(tf.TensorSpec((1, 12, 12, 3))).graph
    with graph.as_default():
        options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation() | {"output": "none"}
        counted = tf.compat.v1.profiler.profile(graph=graph, cmd="scope", options=options)
    count = count_flops(model)
    products = {operation.name for operation in count.operations}
    assert count.flops == _operations(counted, products)


def _operations(node, names):
    return node.float_ops * (node.name in names) + sum(_operations(child, names) for child in node.children)


@pytest.mark.parametrize(
    ("length", "width", "depth"),
    [(128, 64, 2), (384, 64, 1), pytest.param(128, 768, 12, marks=pytest.mark.slow)],
)
def test_bert_has_the_products_of_its_formula(length, width, depth):
    """Each layer of width d: projections (4 d d), dense layers (8 d d), scores and values (2 n d)."""
    arguments = {"width": width, "depth": depth, "heads": width // 64, "units": 4 * width}
    model = replace(PUBLISHED_MODELS["bert_base"], input_shape=(length,), arguments=arguments).build()
    layer = length * (12 * width * width + 2 * length * width)
    head = width * width + 2 * width  # the pooled first token, and two classes
    count = count_flops(model)
    assert count.multiply_adds == pytest.approx(depth * layer + head, rel=1e-3)
    if (length, width) == (128, 768):  # Jiao et al. 2020 (TinyBERT), table 1: 22.5 * 10^9 floating-point operations
        assert count.flops == pytest.approx(22.5e9, rel=0.02)


@pytest.mark.slow
def test_the_published_count_of_vit_base_at_384_pixels():
    # Liu et al. 2021 (Swin), table 1: ViT-B/16 at 384 * 384 pixels has 55.4 * 10^9 multiply-adds.
    model = replace(PUBLISHED_MODELS["vit_base"], input_shape=(384, 384, 3)).build()
    assert count_flops(model).multiply_adds == pytest.approx(55.4e9, rel=0.02)


# Others of the same builder are counted, and their layers differ in width and number only.
LARGER = ("efficientnet_v2_s", "keras:EfficientNetV2B0", "mobilenet_v3_large", "vit_small")
COUNTED = [name for name, model in PUBLISHED_MODELS.items() if model.multiply_adds and name not in LARGER]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_published_counts_of_the_table(name):
    entry = PUBLISHED_MODELS[name]
    model = entry.build()
    assert entry.parameters in (None, sum(math.prod(weight.shape) for weight in model.trainable_weights))
    assert count_flops(model, open_size=128).multiply_adds == pytest.approx(entry.multiply_adds, rel=0.02)
