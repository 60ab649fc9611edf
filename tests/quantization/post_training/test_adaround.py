"""Adaptive rounding against all roundings there are, and what it measures against the convolutions themselves."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import GraphEditor, freeze
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.annotation.grids import Range
from tfopt.quantization.post_training.adaround import _grams, _grouped, round_adaptively

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(20, 9, 9, 4)).astype("float32")
ADAPTIVE = QuantizationConfig(rounding="adaptive", bias_correction=False, equalization=False)


def correlated(inputs, seed):
    factors = np.random.default_rng(seed).normal(size=(200, 3)) @ np.random.default_rng(seed + 1).normal(
        size=(3, inputs)
    )
    x = factors + 0.1 * np.random.default_rng(seed + 2).normal(size=factors.shape)
    return x, (x.T @ x / len(x))[None]


@pytest.mark.slow
def test_it_gains_most_of_what_any_rounding_could():
    gained, possible = 0.0, 0.0
    for seed in range(4):
        x, gram = correlated(8, seed)
        weights = np.random.default_rng(seed).uniform(-5, 5, (1, 8, 3))
        rounded, ratio = round_adaptively(weights, np.ones((1, 1, 3)), gram)
        np.testing.assert_array_equal(rounded, np.rint(rounded))
        assert np.abs(rounded - weights).max() < 1

        def error(rows, x=x, weights=weights):
            return ((x @ (rows - weights[0])) ** 2).mean(axis=0)

        choices = [np.floor(weights[0]) + np.array(up)[:, None] for up in itertools.product((0, 1), repeat=8)]
        best, nearest = np.min([error(choice) for choice in choices], axis=0), error(np.rint(weights[0]))
        assert (error(rounded[0]) <= nearest + 1e-9).all()
        assert ratio == pytest.approx(error(rounded[0]).sum() / nearest.sum())
        gained += (nearest - error(rounded[0])).sum()
        possible += (nearest - best).sum()
    assert gained > 0.6 * possible
    np.testing.assert_array_equal(round_adaptively(weights, np.ones((1, 1, 3)), gram)[0], rounded)


def test_weights_on_the_grid_stay_and_so_does_what_cannot_be_bettered():
    _, gram = correlated(8, 0)
    on_grid = np.random.default_rng(0).integers(-3, 4, (1, 8, 3)).astype(float)
    np.testing.assert_array_equal(round_adaptively(on_grid, np.ones((1, 1, 3)), gram)[0], on_grid)
    weights = np.random.default_rng(0).uniform(-5, 5, (1, 8, 3))
    alone, ratio = round_adaptively(weights, np.ones((1, 1, 3)), np.eye(8)[None])  # nothing to cancel
    np.testing.assert_array_equal(alone, np.rint(weights))
    assert ratio == 1.0


class Dilated(layers.Layer):
    """As a graph has it; Keras writes dilation as a convolution between two rearrangements."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 4, 5), name="kernel")

    def call(self, x):
        return tf.nn.conv2d(x, self.kernel, 1, "SAME", dilations=2)


LAYERS = {
    "same": layers.Conv2D(5, 3, padding="same"),
    "strided": layers.Conv2D(5, 3, strides=2),
    "dilated": Dilated(),
    "padded": keras.Sequential([layers.ZeroPadding2D(((0, 3), (2, 0))), layers.Conv2D(5, 3)]),
    "depthwise": layers.DepthwiseConv2D(3, strides=2, padding="same"),
    "dense": keras.Sequential([layers.Flatten(), layers.Dense(5)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_kept_of_the_data_tells_the_error_of_the_results(name):
    """D' H D is the mean square of what the layer computes from its inputs with D as weights."""
    model = keras.Sequential([keras.Input((9, 9, 4)), LAYERS[name]])
    graph = freeze(model)
    editor = GraphEditor(graph.graph_def)
    (fusion,), _ = find_fusions(graph, editor)
    limit = float(np.abs(X).max())
    ranges = {node.name: Range(limit=limit, signed=True) for node in graph.graph_def.node}
    (gram,) = _grams(graph, editor, [fusion], ranges, [graph.feed(X)])
    weights = _grouped(editor.value(fusion.weights), editor.nodes[fusion.op].op)
    quantized = np.clip(np.rint(X * (127 / limit)), -127, 127) * (limit / 127)
    expected = (np.asarray(model(quantized.astype("float32"))) ** 2).mean(
        axis=tuple(range(len(model.output_shape) - 1))
    )
    errors = (weights * (gram @ weights)).sum(axis=1).reshape(-1)
    np.testing.assert_allclose(errors, expected, rtol=1e-3)


def small():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((9, 9, 4))
    x = layers.Conv2D(6, 3, activation="relu")(inputs)
    x = layers.DepthwiseConv2D(3, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def test_the_model_is_closer_and_the_kernels_compute_it():
    images = tf.image.resize(GENERATOR.normal(size=(40, 3, 3, 4)), (9, 9)).numpy()  # neighbours are alike
    exact = np.asarray(small()(images))
    plain = quantize(small(), QuantizationConfig(bias_correction=False), calibration_data=images)
    adaptive = quantize(small(), ADAPTIVE, calibration_data=images)
    distances = [np.linalg.norm(each.predict(images) - exact) for each in (adaptive, plain)]
    assert distances[0] < distances[1]
    lowered = lower_to_int8(adaptive.graph).predict(images)["output_0"]
    assert np.linalg.norm(lowered - adaptive.predict(images)) < 0.5 * distances[0]
    assert [step.kind for step in adaptive.report.steps] == ["adaptive_rounding"] * 3
