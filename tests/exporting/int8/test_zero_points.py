"""Activations with a zero point, from the ranges to the kernels: where they are, and where they cannot be."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from test_kernels import graph_of

import tfopt
from tfopt.errors import UnsupportedLayerError
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import GraphEditor
from tfopt.quantization import QuantizationConfig
from tfopt.quantization.annotation.annotate import annotate
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.annotation.grids import Range

X = np.random.default_rng(0).normal(size=(32, 12, 12, 3)).astype("float32")
PLAIN = QuantizationConfig(observer="minmax", equalization=False, smooth_quant=0.0, bias_correction=False)


def swish_network(size):
    """Everything that reads a tensor with a zero point: padded and unpadded kernels, a sum, a concatenation, floats."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((size, size, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="swish", name="stem")(inputs)
    y = layers.DepthwiseConv2D(3, padding="same", activation="swish", name="depthwise")(x)
    y = layers.Conv2D(8, 1, name="project")(y)
    x = layers.Add(name="sum")([x, y])
    x = layers.Concatenate(name="both")([layers.Activation("swish")(x), layers.Activation("swish")(y)])
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="swish", name="down")(x)
    x = layers.MaxPooling2D(2, name="pool")(layers.ZeroPadding2D(1, name="zeros")(x))
    x = layers.Conv2D(4, 2, name="last")(x)
    return keras.Model(inputs, layers.Dense(5, name="head")(layers.GlobalAveragePooling2D()(x)))


def ops(graph):
    return [node.op for node in graph.graph_def.node]


@pytest.mark.parametrize("size", [12, None], ids=["known size", "open size"])
def test_kernels_compute_the_annotated_graph(size):
    model = swish_network(size)
    quantized = tfopt.quantize(model, PLAIN, calibration_data=X)
    lowered = lower_to_int8(quantized.graph)
    padding = [node for node in lowered.graph_def.node if node.op == "PadV2"]
    # The layer's padding needs no size. That of a convolution does.
    assert [node.name.endswith("/padded/bytes") for node in padding].count(True) == (2 if size else 0)
    assert [node.name.endswith("/padded/bytes") for node in padding].count(False) == 1
    zeros = [GraphEditor(lowered.graph_def).value(node.input[2]) for node in padding]
    assert all(zero > 0 for zero in zeros)
    annotated, result = quantized.predict(X), lowered.predict(X)["output_0"]
    exact = np.asarray(model(X))
    # Roundings of ties differ by a step now and then.
    assert np.linalg.norm(result - annotated) < 0.3 * np.linalg.norm(annotated - exact)


def test_behind_swish_the_step_is_half_as_large():
    quantized = tfopt.quantize(swish_network(12), PLAIN, calibration_data=X)
    behind = [span for name, span in quantized.ranges.items() if "stem" in name and name.endswith("mul_1")]
    (span,) = behind
    assert span.zero_point > 0
    assert span.low == pytest.approx(-0.2785, rel=0.05)  # the least value of swish
    assert span.symmetric().scale > 1.6 * span.scale


def test_the_result_of_a_fused_activation_has_no_zero_point():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(32, activation="gelu"), layers.Dense(4)])
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    quantized = tfopt.quantize(model, PLAIN, calibration_data=x)
    assert not any(span.zero_point for name, span in quantized.ranges.items() if "dense" in name)
    lowered = lower_to_int8(quantized.graph)
    assert ops(lowered).count("_QuantizedMatMul") == 2
    np.testing.assert_allclose(lowered.predict(x)["output_0"], quantized.predict(x), atol=0.02)


@pytest.mark.parametrize("kind", ["fused activation", "padding of an open size"])
def test_a_zero_point_that_no_kernel_could_take_is_an_error(kind):
    generator = np.random.default_rng(0)
    if kind == "fused activation":
        weights = generator.normal(size=(2, 6, 6)).astype("float32")
        graph = graph_of(lambda x: tf.matmul(tf.nn.elu(tf.matmul(x, weights[0])), weights[1]), (None, 6))
    else:
        kernel = generator.normal(size=(3, 3, 3, 4)).astype("float32")
        graph = graph_of(lambda x: tf.nn.conv2d(tf.nn.elu(x), kernel, 1, "SAME"), (None, None, None, 3))
    editor = GraphEditor(graph.graph_def)
    fusions, _ = find_fusions(graph, editor)
    names = {tensor for fusion in fusions for tensor in (fusion.input, fusion.output)}
    ranges = dict.fromkeys(names, Range(limit=3.0, signed=False, zero_point=60))
    with pytest.raises(UnsupportedLayerError, match=r"without a zero point\. Received: .*Annotate it with a symmetric"):
        lower_to_int8(annotate(graph, fusions, ranges))
    symmetric = {name: span.symmetric() for name, span in ranges.items()}
    assert ops(lower_to_int8(annotate(graph, fusions, symmetric)))


def test_a_later_output_of_a_node_has_a_size_of_its_own():
    """The first part of the split has a known height, the second has none."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 12, 3), name="image")
    rest = layers.Lambda(lambda x: tf.split(tf.nn.swish(x), [4, -1], axis=1)[1])(inputs)
    model = keras.Model(inputs, layers.Conv2D(4, 3, padding="same")(rest))
    quantized = tfopt.quantize(model, PLAIN, calibration_data=X)
    assert quantized.report.changed
    exact, result = np.asarray(model(X)), lower_to_int8(quantized.graph).predict(X)["output_0"]
    assert np.linalg.norm(result - exact) < 0.03 * np.linalg.norm(exact)
