"""Rescaling channels: exact in float, found where it is possible and only there, done where rounding errors shrink."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.graph import GraphEditor, freeze
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.post_training.channel_groups import find_groups, rescale
from tfopt.quantization.post_training.equalization_and_smooth_quant import (
    ChannelStatistics,
    balancing_scales,
    rounding_error,
)

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(12, 8, 8, 6)).astype("float32")
TOKENS = GENERATOR.normal(size=(12, 5, 8)).astype("float32")
PLAIN = QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)


def conv(x, filters=8, activation="relu", **arguments):
    return layers.Conv2D(filters, 3, padding="same", activation=activation, bias_initializer="normal", **arguments)(x)


def residual(x):
    """The stream, and what is added to it, share one vector; inside the block there is another."""
    stream = conv(x)
    for _ in range(2):
        stream = layers.ReLU()(layers.Add()([conv(conv(stream), activation=None), stream]))
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(stream))


def preactivation(x):
    """The normalisation in front of a convolution takes the vector, since the stream before it has other readers."""
    stream = conv(x, activation=None)
    x = conv(layers.ReLU()(layers.BatchNormalization(beta_initializer="normal")(stream)), activation=None)
    return layers.Flatten()(layers.Add()([x, stream]))


def attention(x):
    x = layers.Dense(8)(x)
    norm = layers.LayerNormalization(beta_initializer="normal", gamma_initializer="uniform", name="before")
    y = layers.Add()([x, layers.MultiHeadAttention(2, 4)(*[norm(x)] * 2)])
    z = layers.Dense(16, activation="gelu")(layers.LayerNormalization(beta_initializer="normal", name="after")(y))
    return layers.Add()([y, layers.Dense(8)(z)])


def squeeze_and_excite(x):
    x = conv(x)
    gate = layers.Dense(8, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    return layers.Flatten()(conv(layers.Multiply()([x, gate]), activation=None))


# What is built, from which input, and how many groups it has.
EXACT = {
    "conv, conv": (lambda x: conv(conv(x), activation=None), IMAGES, 1),
    "no activation": (lambda x: conv(conv(x, activation=None), activation=None), IMAGES, 1),
    "leaky relu": (lambda x: conv(layers.LeakyReLU(0.1)(conv(x, activation=None))), IMAGES, 1),
    "depthwise": (
        lambda x: conv(layers.DepthwiseConv2D(3, activation="relu", bias_initializer="normal")(conv(x))),
        IMAGES,
        2,
    ),
    "pooling and flattening": (
        lambda x: layers.Dense(3)(layers.Flatten()(layers.MaxPooling2D()(conv(layers.AveragePooling2D(2)(conv(x)))))),
        IMAGES,
        2,
    ),
    "padding": (lambda x: layers.Conv2D(4, 3)(layers.ZeroPadding2D(((0, 2), (1, 0)))(conv(x))), IMAGES, 1),
    "enlargement": (lambda x: conv(layers.UpSampling2D(interpolation="bilinear")(conv(x)), activation=None), IMAGES, 1),
    "two readers": (lambda x: layers.Concatenate()([conv(y := conv(x)), conv(y, 4)]), IMAGES, 1),
    "without bias": (lambda x: conv(conv(x, use_bias=False), use_bias=False), IMAGES, 1),
    "residual": (residual, IMAGES, 3),
    "preactivation": (preactivation, IMAGES, 1),
    "squeeze and excite": (squeeze_and_excite, IMAGES, 1),
    "dense": (lambda x: layers.Dense(3)(layers.Dense(16, activation="relu")(x)), TOKENS, 1),
    "attention": (attention, TOKENS, 2),
}


def built(function, x):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(x.shape[1:])
    return keras.Model(inputs, function(inputs))


def groups_of(graph):
    editor = GraphEditor(graph.graph_def)
    fusions, _ = find_fusions(graph, editor)
    return editor, find_groups(graph, editor, fusions)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EXACT)
def test_rescaling_changes_nothing_in_float(name):
    function, x, count = EXACT[name]
    graph = freeze(built(function, x))
    editor, groups = groups_of(graph)
    assert len(groups) == count
    expected = graph.predict(x)["output_0"]
    inside = [group.seed for group in groups]
    before = graph.as_function(fetch=inside)(**graph.feed(x))
    scales = [10 ** GENERATOR.uniform(-1, 1, group.channels) for group in groups]
    for group, each in zip(groups, scales, strict=True):
        rescale(editor, group, each)
    rescaled = type(graph)(
        graph_def=editor.graph_def(graph.output_nodes), inputs=graph.inputs, outputs=graph.outputs, name="rescaled"
    )
    np.testing.assert_allclose(rescaled.predict(x)["output_0"], expected, atol=1e-5 * np.abs(expected).max())
    after = rescaled.as_function(fetch=inside)(**graph.feed(x))
    for one, other, each in zip(before, after, scales, strict=True):
        np.testing.assert_allclose(other, one / each, rtol=1e-3, atol=1e-5)


def post_norm(x):
    """What the normalisation gives is also added to the stream, which the next one reads."""
    x = layers.LayerNormalization()(x)
    return layers.LayerNormalization()(layers.Add()([x, layers.Dense(8)(x)]))


class Shared(layers.Layer):
    """One matrix, multiplied twice."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, 8), name="kernel")

    def call(self, x):
        return tf.matmul(tf.nn.relu(tf.matmul(x[:, 0], self.kernel)), self.kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: layers.Dense(3)(layers.Dense(16, activation="gelu")(x)), TOKENS),
        (lambda x: layers.Dense(3)(layers.Dense(16, activation="sigmoid")(x)), TOKENS),
        (lambda x: layers.Dense(3)(layers.Dense(16)(x) + 0 * layers.Softmax()(layers.Dense(16)(x))), TOKENS),
        (post_norm, TOKENS),
        (Shared(), TOKENS),
        (lambda x: layers.Conv2D(8, 3, groups=2)(conv(x)), IMAGES),
        (lambda x: [conv(y := conv(x)), y], IMAGES),
        (lambda x: layers.Dense(2)(x), TOKENS),
    ],
)
def test_where_it_would_change_something_there_is_no_group(function, x):
    assert groups_of(freeze(built(function, x)))[1] == []


def two_convolutions(activation):
    return lambda x: conv(conv(x, activation=activation), 4, activation=None)


def spread_out(function, x, decades=4.0):
    """Returns a model of two weighted layers, and the same with hidden channels whose ranges lie far apart."""
    model, hard = built(function, x), built(function, x)
    first, second = [layer for layer in hard.layers if layer.weights]
    factors = 10 ** np.linspace(-decades / 2, decades / 2, first.kernel.shape[-1])
    first.kernel.assign(first.kernel * factors)
    first.bias.assign(first.bias * factors)
    second.kernel.assign(second.kernel / factors[:, None])
    return model, hard


def distance(one, other):
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_channels_far_apart_become_like_those_of_the_plain_model():
    plain, hard = spread_out(two_convolutions("relu"), IMAGES)
    exact = np.asarray(plain(IMAGES))
    np.testing.assert_allclose(np.asarray(hard(IMAGES)), exact, atol=1e-4)
    usual = distance(quantize(plain, PLAIN, calibration_data=IMAGES).predict(IMAGES), exact)
    assert usual < 0.02
    assert distance(quantize(hard, PLAIN, calibration_data=IMAGES).predict(IMAGES), exact) > 10 * usual
    config = QuantizationConfig(smooth_quant=0.0, bias_correction=False)
    equalized = quantize(hard, config, calibration_data=IMAGES)
    assert distance(equalized.predict(IMAGES), exact) < 1.3 * usual
    (step,) = equalized.report.steps
    assert step.kind == "equalization"
    assert "8 channels" in step.detail
    np.testing.assert_allclose(equalized.float_graph.predict(IMAGES)["output_0"], exact, atol=1e-4)


def test_a_relu6_is_rescaled_only_where_nothing_reaches_6():
    _, hard = spread_out(two_convolutions("relu6"), IMAGES / 100, decades=2.0)
    quantized = quantize(hard, calibration_data=IMAGES / 100)
    assert len(quantized.report.steps) == 1
    assert "Relu6" not in {node.op for node in quantized.graph.graph_def.node}
    assert quantize(hard, calibration_data=IMAGES).report.steps == []


def test_a_model_without_spread_is_left_alone():
    model = built(two_convolutions("relu"), IMAGES)
    assert quantize(model, calibration_data=IMAGES).report.steps == []


def test_smooth_quant_divides_the_normalisation_for_all_that_read_it():
    model = built(attention, TOKENS)
    norm, after = (layer for layer in model.layers if isinstance(layer, layers.LayerNormalization))
    projections = next(layer for layer in model.layers if isinstance(layer, layers.MultiHeadAttention))
    exact = np.asarray(model(TOKENS))
    usual = distance(quantize(model, PLAIN, calibration_data=TOKENS).predict(TOKENS), exact)
    factors = np.where(np.arange(8) == 3, 1000.0, 1.0)
    for weight in (norm.gamma, norm.beta):
        weight.assign(weight * factors)
    for kernel in (each.kernel for each in (projections.query_dense, projections.key_dense, projections.value_dense)):
        kernel.assign(kernel / factors[:, None, None])
    np.testing.assert_allclose(np.asarray(model(TOKENS)), exact, atol=1e-5)
    assert distance(quantize(model, PLAIN, calibration_data=TOKENS).predict(TOKENS), exact) > 2 * usual
    config = QuantizationConfig(equalization=False, bias_correction=False)
    smoothed = quantize(model, config, calibration_data=TOKENS)
    assert distance(smoothed.predict(TOKENS), exact) < 1.3 * usual
    (step,) = smoothed.report.steps
    assert step.kind == "smooth_quant"
    assert norm.name in step.name
    assert all(f"/{name}" in step.detail for name in ("query", "key", "value"))
    assert after.name not in step.name
    np.testing.assert_allclose(smoothed.float_graph.predict(TOKENS)["output_0"], exact, atol=1e-5)


def test_the_scales_are_those_of_the_papers():
    activation, weights = np.array([4.0, 1.0, 9.0]), np.array([0.5, 2.0, 1.0])
    for alpha in (0.25, 0.5, 1.0):
        ratios = activation**alpha / weights ** (1 - alpha)
        np.testing.assert_allclose(
            balancing_scales(activation, weights, alpha), ratios / np.exp(np.log(ratios).mean()), rtol=1e-12
        )
    scales = balancing_scales(activation, weights)
    np.testing.assert_allclose(activation / scales, weights * scales * (activation / scales / weights / scales)[0])


def test_channels_that_are_not_used_stay_within_the_others():
    activation, weights = np.array([100.0, 1.0, 0.0, 50.0]), np.array([1.0, 1.0, 1e3, 0.0])
    scales = balancing_scales(activation, weights)
    np.testing.assert_allclose(weights[2] * scales[2], np.median((weights * scales)[:2]), rtol=0.5)
    assert (weights * scales)[2] <= (weights * scales)[:2].max()
    assert (activation / scales)[3] <= (activation / scales)[:2].max()
    np.testing.assert_array_equal(balancing_scales(np.zeros(2), np.ones(2)), [1, 1])


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_the_rounding_error_is_what_rounding_causes(depthwise, signed):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(4000, 6)) * 10 ** np.linspace(-1, 1, 6)
    x = x if signed else np.abs(x)
    weights = generator.normal(size=(1, 6) if depthwise else (1, 6, 40))
    weights /= np.abs(weights).max(axis=0 if depthwise else (0, 1))
    reading = ChannelStatistics(
        limits=np.abs(x).max(axis=0), squares=(x**2).mean(axis=0), signed=signed, weights=weights
    )
    scales = 10 ** generator.uniform(-0.5, 0.5, 6)

    def rounded(values, limit, steps):
        return np.rint(values / (limit / steps)) * limit / steps

    scaled, moved = x / scales, (weights[0].T * scales).T
    coarse = rounded(scaled, np.abs(scaled).max(), 127 if signed else 255)
    if depthwise:
        errors = (coarse - scaled) * moved
    else:
        errors = coarse @ rounded(moved, np.abs(moved).max(axis=0), 127) - scaled @ moved
    assert rounding_error(reading, scales) == pytest.approx((errors**2).mean(axis=0).sum(), rel=0.25)
