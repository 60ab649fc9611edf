"""Bias correction: the mean of every quantized layer's results is that of the float model."""

from dataclasses import replace

import keras
import numpy as np
from keras import layers

from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import GraphEditor
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import find_fusions

X = np.random.default_rng(0).normal(size=(32, 8, 8, 3)).astype("float32")
# Weights of 4 bits shift the means by more than the rounding of activations does.
ONLY = QuantizationConfig(observer="minmax", weight_bits=4, equalization=False, smooth_quant=0.0)
OFF = replace(ONLY, bias_correction=False)


def model():
    """Has a convolution without bias that leaves the graph, a depthwise one, and products with and without bias."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, activation="relu")(inputs)
    x = layers.DepthwiseConv2D(3, activation="relu", use_bias=False)(x)
    out = layers.Conv2D(4, 1, use_bias=False)(x)
    x = layers.Dense(16, activation="gelu")(layers.Flatten()(x))
    return keras.Model(inputs, [out, layers.Dense(3, use_bias=False)(x)])


def shifts(quantized):
    """By how much the mean of each fusion's results before any activation differs, in every channel."""
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions, _ = find_fusions(quantized.float_graph, editor)
    tensors = [fusion.nodes[1] if fusion.bias else fusion.op for fusion in fusions]
    means = []
    for graph in (quantized.float_graph, quantized.graph):
        values = graph.as_function(fetch=tensors)(**graph.feed(X))
        means.append([value.numpy().mean(axis=tuple(range(value.shape.rank - 1))) for value in values])
    return [np.abs(one - other).max() for one, other in zip(*means, strict=True)]


def test_the_means_of_all_layers_are_those_of_the_float_model():
    corrected, plain = (
        shifts(quantize(model(), ONLY, calibration_data=X)),
        shifts(quantize(model(), OFF, calibration_data=X)),
    )
    assert len(corrected) == len(plain) == 5
    assert max(corrected) < 1e-4
    assert min(plain) > 3 * max(corrected)


def test_the_corrections_of_many_batches_are_their_mean():
    whole = quantize(model(), ONLY, calibration_data=X).adjustments
    parts = quantize(model(), ONLY, calibration_data=[X[:20], X[20:]]).adjustments
    for one, other in zip(parts.values(), whole.values(), strict=True):
        np.testing.assert_allclose(one.bias, other.bias, atol=0.2 * np.abs(other.bias).max() + 1e-4)


def test_results_are_closer_and_int8_kernels_compute_them():
    exact = [output.numpy() for output in model()(X)]
    corrected, plain = (quantize(model(), config, calibration_data=X) for config in (ONLY, OFF))
    lowered = lower_to_int8(corrected.graph).predict(X)
    for number, (key, value) in enumerate(corrected.predict(X).items()):
        error = np.linalg.norm(value - exact[number])
        assert error < np.linalg.norm(plain.predict(X)[key] - exact[number])
        assert np.linalg.norm(lowered[key] - value) < 0.5 * error


def test_what_is_kept_float_keeps_its_own_bias():
    quantized = quantize(model(), ONLY, calibration_data=X)
    names = [change.name for change in quantized.report.changed]
    exact = [output.numpy() for output in model()(X)]
    for one, other in zip(
        quantized.leaving_float(dict.fromkeys(names, "asked")).predict(X).values(), exact, strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)
    partly = quantized.leaving_float({names[0]: "asked"})
    assert len(partly.report.changed) == 4
    assert set(partly.adjustments) == set(names)
