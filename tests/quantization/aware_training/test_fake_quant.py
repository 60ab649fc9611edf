"""Fake quantization: its values, the gradients of straight-through and LSQ, moving averages, what freezing stops."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.quantization.aware_training.fake_quant import FakeQuantize, WeightRange, fake_quantize, learning_limit
from tfopt.quantization.aware_training.layers import (
    FrozenLateBatchNormalization,
    QuantizedConv1D,
    QuantizedConv2D,
    QuantizedConv2DTranspose,
    QuantizedDense,
    QuantizedDepthwiseConv2D,
    QuantizedEinsumDense,
    QuantizedEmbedding,
)

RNG = np.random.default_rng(0)
GRIDS = [(8, True), (8, False), (4, True), (4, False)]


def reference(x, limit, bits, signed):
    top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    step = np.float64(limit) / top
    return np.clip(np.rint(x / step), -top if signed else 0, top) * step


@pytest.mark.parametrize(("bits", "signed"), GRIDS)
def test_values_are_numpys_and_tensorflows(bits, signed):
    x = RNG.normal(size=(500, 3)).astype("float32")
    limits = np.float32([0.3, 1.1, 6.0])
    ours = fake_quantize(tf.constant(x), limits, bits=bits, signed=signed).numpy()
    np.testing.assert_allclose(ours, reference(x, limits, bits, signed), atol=1e-6)
    theirs = tf.quantization.fake_quant_with_min_max_vars_per_channel(
        x, -limits if signed else 0 * limits, limits, num_bits=bits, narrow_range=signed
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not fake_quantize(tf.zeros((4, 3)), limits, bits=bits, signed=signed).numpy().any()


@pytest.mark.parametrize(("bits", "signed"), GRIDS)
def test_straight_through_passes_gradients_inside_the_range_only(bits, signed):
    x = tf.constant(RNG.normal(size=400).astype("float32"))
    incoming = RNG.normal(size=400).astype("float32")
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(fake_quantize(x, 0.8, bits=bits, signed=signed) * incoming)
    inside = (x.numpy() > (-0.8 if signed else 0)) & (x.numpy() < 0.8)
    np.testing.assert_allclose(tape.gradient(loss, x), np.where(inside, incoming, 0), rtol=1e-6)


@pytest.mark.parametrize(("bits", "signed"), GRIDS)
def test_the_learned_limit_moves_as_the_step_of_the_paper(bits, signed):
    """One update of SGD on the limit is the update of LSQ, equations 3 and 4 with the gradient scale of 2.2."""
    x = RNG.normal(size=(16, 25)).astype("float32")
    incoming = RNG.normal(size=x.shape).astype("float32")
    top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    limit = keras.Variable(0.8)
    with tf.GradientTape() as tape:
        y = fake_quantize(x, learning_limit(limit.value, 25, bits=bits, signed=signed), bits=bits, signed=signed)
        loss = tf.reduce_sum(y * incoming)
    keras.optimizers.SGD(1e-6).apply([tape.gradient(loss, limit.value)], [limit])

    step = 0.8 / top
    scaled = x.astype(np.float64) / step
    low = -top if signed else 0
    by_step = np.where(scaled <= low, low, np.where(scaled >= top, top, np.rint(scaled) - scaled))
    moved = step - 1e-6 * np.sum(by_step * incoming) / np.sqrt(25 * top)
    assert abs(moved - step) > 1e-8
    np.testing.assert_allclose((float(limit.numpy()) - 0.8) / top, moved - step, rtol=0.02)


@pytest.mark.parametrize("training", [True, False])
def test_a_channel_of_zeros_stays_zero(training):
    layer = QuantizedDense(2, use_bias=False)
    layer.build((None, 3))
    layer.kernel.assign([[1.0, 0.0], [-2.0, 0.0], [0.5, 0.0]])
    with tf.GradientTape() as tape:
        result = layer(np.eye(3, dtype="float32"), training=training)
    np.testing.assert_array_equal(result[:, 1], np.zeros(3))
    assert np.isfinite(tape.gradient(result, layer.kernel.value)).all()


def test_learned_weight_limits_get_the_gradient_of_their_own_channel():
    layer = QuantizedDense(3, learned_ranges=True, weight_bits=4, use_bias=False)
    layer.build((None, 40))
    kernel = RNG.normal(size=(40, 3)).astype("float32")
    layer.kernel.assign(kernel)
    layer.weight_range.limit.assign([1.0, 0.5, 2.0])
    x = RNG.normal(size=(8, 40)).astype("float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x, training=True) ** 2)
    by_limit, by_kernel = tape.gradient(loss, [layer.weight_range.limit.value, layer.kernel.value])

    limits = np.array([1.0, 0.5, 2.0])
    rounded = reference(kernel, limits, 4, True)
    incoming = x.T.astype(np.float64) @ (2 * (x @ rounded))
    scaled = kernel / (limits / 7)
    by_step = np.where(np.abs(scaled) >= 7, 7 * np.sign(scaled), np.rint(scaled) - scaled)
    expected = np.sum(incoming * by_step, axis=0) * 7 / np.sqrt(40 * 7)
    np.testing.assert_allclose(by_limit, expected, rtol=1e-3)
    np.testing.assert_allclose(by_kernel, np.where(np.abs(scaled) < 7, incoming, 0), rtol=1e-3, atol=1e-3)


def test_a_range_is_the_moving_average_of_the_batches_largest_values():
    layer = FakeQuantize(signed=True)
    layer.build((None, 5))
    expected = 1.0
    for _ in range(4):
        x = 3 * RNG.normal(size=(6, 5)).astype("float32")
        layer(x, training=True)
        expected = 0.99 * expected + 0.01 * np.abs(x).max()
    assert float(layer.limit.numpy()) == pytest.approx(expected, rel=1e-6)
    layer(100 * x, training=False)
    assert float(layer.limit.numpy()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", [np.zeros((0, 5), "float32"), np.full((2, 5), np.inf, "float32")])
def test_an_empty_or_overflown_batch_leaves_the_range(batch):
    layer = FakeQuantize(signed=False)
    layer(batch, training=True)
    assert float(layer.limit.numpy()) == 1.0


@pytest.mark.parametrize("learned", [False, True])
def test_ranges_are_float32_in_half_precision(learned):
    layer = FakeQuantize(learned=learned, dtype="mixed_float16")
    x = tf.constant(RNG.normal(size=(6, 5)), tf.float16)
    assert layer(x, training=True).dtype == tf.float16
    assert layer.limit.dtype == "float32"
    dense = QuantizedDense(3, learned_ranges=learned, dtype="mixed_float16")
    assert dense(x, training=True).dtype == tf.float16
    # Rounded in float32: the grid of weights that were cast first is another.
    kernel = dense.kernel.numpy()
    dense.bias.assign(np.zeros(3))
    limit = np.abs(kernel).max(0) if not learned else np.ones(3, "float32")
    expected = reference(kernel, limit, 8, True).astype("float16")
    np.testing.assert_array_equal(dense(tf.eye(5, dtype=tf.float16), training=True), expected)


def test_ranges_stay_after_so_many_calls():
    average = FakeQuantize(freeze_after=2)
    limits = []
    for _ in range(4):
        average(tf.constant([[5.0]]), training=True)
        limits.append(float(average.limit.numpy()))
    assert 1 < limits[0] < limits[1] == limits[2] == limits[3]

    learned = FakeQuantize(freeze_after=1, learned=True)
    gradients = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(learned(tf.constant([[5.0]]), training=True))
        gradients.append(float(tape.gradient(loss, learned.limit.value)))
    assert gradients[0] != 0 == gradients[1]


def test_a_batch_norm_that_is_frozen_normalises_as_at_inference():
    layer = FrozenLateBatchNormalization(freeze_after=2, momentum=0.5)
    plain = layers.BatchNormalization(momentum=0.5)
    x = 2 + 3 * RNG.normal(size=(16, 4)).astype("float32")
    for _ in range(2):
        np.testing.assert_allclose(layer(x, training=True), plain(x, training=True), rtol=1e-6)
    statistics = layer.moving_mean.numpy()
    np.testing.assert_array_equal(layer(x, training=True), layer(x, training=False))
    np.testing.assert_array_equal(layer.moving_mean, statistics)
    assert not np.allclose(layer(x, training=True), plain(x, training=True), atol=1e-3)


CASES = {
    "dense": (QuantizedDense(4), (5, 6), (0,)),
    "einsum, channels split": (QuantizedEinsumDense("abc,cde->abde", (None, 3, 2)), (5, 2, 6), (0,)),
    "einsum, channels last": (QuantizedEinsumDense("abde,dec->abc", (None, 4)), (5, 2, 3, 2), (0, 1)),
    "einsum, channels first": (QuantizedEinsumDense("ab,cb->ac", 4), (5, 6), (1,)),
    "conv1d, causal": (QuantizedConv1D(4, 3, padding="causal"), (5, 8, 3), (0, 1)),
    "conv2d": (QuantizedConv2D(4, 3), (5, 8, 8, 3), (0, 1, 2)),
    "conv2d, grouped": (QuantizedConv2D(4, 3, groups=2), (5, 8, 8, 6), (0, 1, 2)),
    "depthwise": (QuantizedDepthwiseConv2D(3, depth_multiplier=2), (5, 8, 8, 3), (0, 1)),
    "transposed": (QuantizedConv2DTranspose(4, 3), (5, 8, 8, 3), (0, 1, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_computes_what_the_original_computes_with_weights_rounded_per_output_channel(name, training):
    layer, shape, contracted = CASES[name]
    x = RNG.normal(size=shape).astype("float32")
    found = layer(x, training=training)
    kernel = layer.kernel.numpy()
    limit = np.abs(kernel).max(axis=contracted, keepdims=True)
    config = layer.get_config()
    for key in ("weight_bits", "learned_ranges", "freeze_after"):
        config.pop(key)
    original = next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("keras."))
    plain = original.from_config(config)
    plain.build(shape)
    plain.set_weights([reference(kernel, limit, 8, True), *layer.get_weights()[1:]])
    np.testing.assert_allclose(found, plain(x), atol=1e-5)
    np.testing.assert_array_equal(layer.kernel.numpy(), kernel)


def test_an_embedding_looks_up_rounded_vectors():
    layer = QuantizedEmbedding(7, 3)
    found = layer(np.array([[1, 4]]), training=True)
    table = layer.embeddings.numpy()
    np.testing.assert_allclose(found[0], reference(table, np.abs(table).max(0), 8, True)[[1, 4]], atol=1e-7)


def test_learned_weight_limits_start_as_in_the_paper_but_within_the_weights():
    kernel = np.stack([RNG.normal(size=1000), np.zeros(1000), RNG.uniform(-1, 1, 1000)], 1).astype("float32")
    kernel[0, 0] = 50.0
    limits = WeightRange(bits=4, learned=True)
    limits.build(kernel.shape)
    limits.start(kernel)
    found = limits.limit.numpy()
    assert found[0] == pytest.approx(2 * np.abs(kernel[:, 0]).mean() * np.sqrt(7), rel=1e-5)
    assert found[1] == 1.0
    assert found[2] == pytest.approx(np.abs(kernel[:, 2]).max())
