"""Each int8 kernel against integer arithmetic in NumPy: quantize, multiply and sum as int32, rescale, round."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.hardware import has_vnni
from tfopt.quantization.annotation.annotate import annotate
from tfopt.quantization.annotation.fusion import FAKE_QUANT, find_fusions
from tfopt.quantization.annotation.ranged_tensors import tensors_to_observe, without_impossible_zero_points
from tfopt.quantization.calibration.calibrate import calibrate, read_calibration_data
from tfopt.quantization.config import QuantizationConfig

# Without VNNI the sums of 8-bit weights saturate, and signed activations lose a bit (docs/export.md). The
# weights that artifacts then have, and their exact sums, are tested in test_instructions.py.
pytestmark = pytest.mark.skipif(has_vnni() is False, reason="oneDNN's int8 products are exact with VNNI or AMX only")


def graph_of(function, *shapes):
    specs = [tf.TensorSpec(shape, tf.float32, name=f"x{index}") for index, shape in enumerate(shapes)]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return FrozenGraph(
        graph_def=concrete.graph.as_graph_def(),
        inputs={
            tensor.op.name: tf.TensorSpec(tensor.shape, tensor.dtype, tensor.op.name) for tensor in concrete.inputs
        },
        outputs={"y": (concrete.outputs[0].name.removesuffix(":0"), tf.TensorSpec(concrete.outputs[0].shape))},
        name="plain",
    )


def lower(graph, data):
    """Returns the lowered graph, the fusions and the range of each tensor."""
    editor = GraphEditor(graph.graph_def)
    fusions, _ = find_fusions(graph, editor)
    examples = read_calibration_data(graph, data, config=QuantizationConfig())
    ranges = calibrate(graph, tensors_to_observe(editor, fusions), examples.inputs, QuantizationConfig())
    ranges = without_impossible_zero_points(graph, editor, fusions, ranges)
    lowered = lower_to_int8(annotate(graph, fusions, ranges))
    assert not any(node.op.startswith("FakeQuant") for node in lowered.graph_def.node)
    return lowered, fusions, ranges


# The result of a kernel saturates at -128, a step beyond the range [-127, 127] that fake quantization keeps to.
LOWEST = -128


def quantized(values, span):
    low = -127 if span.signed else -span.zero_point
    high = span.steps
    return np.clip(np.rint(values.astype(np.float64) / span.scale), low, high).astype(np.int64)


def quantized_weights(weights):
    limits = np.abs(weights).reshape(-1, weights.shape[-1]).max(axis=0)
    limits[limits == 0] = 1
    scale = limits / np.float32(127)  # in float32, so that a weight on the edge of a step falls on the same side
    return np.clip(np.rint(weights / scale), -127, 127).astype(np.int64), scale.astype(np.float64)


def in_form(x, form):
    """Returns values whose range has one of the forms that a range may have."""
    if form == "unsigned":
        return np.abs(x)
    if form == "symmetric":
        return np.clip(x, -min(x.max(), -x.min()), min(x.max(), -x.min()))
    return np.where(x < 0, np.float32(0.3) * x, x)


def form_of(span):
    return "symmetric" if span.signed else "zero_point" if span.zero_point else "unsigned"


FORMS = ["unsigned", "symmetric", "zero_point"]


def convolve(x, weights, strides, pads, dilations):
    """An exact integer convolution, NHWC and HWIO."""
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    height, width = weights.shape[:2]
    rows = (x.shape[1] - (height - 1) * dilations[0] - 1) // strides[0] + 1
    columns = (x.shape[2] - (width - 1) * dilations[1] - 1) // strides[1] + 1
    result = np.zeros((x.shape[0], rows, columns, weights.shape[3]), np.int64)
    for i in range(height):
        for j in range(width):
            top, left = i * dilations[0], j * dilations[1]
            bottom, right = top + (rows - 1) * strides[0] + 1, left + (columns - 1) * strides[1] + 1
            result += x[:, top : bottom : strides[0], left : right : strides[1]] @ weights[i, j]
    return result


def same_padding(size, kernel, stride, dilation):
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def assert_agrees(result, reference, span, activation=None):
    """The reference holds real numbers before the activation, and is rounded to the grid of the result."""
    reference = REFERENCES[activation](reference)
    low, high = (LOWEST if span.signed else -span.zero_point), span.steps
    expected = np.clip(np.rint(reference / span.scale), low, high)
    steps = np.rint(result.astype(np.float64) / span.scale)
    assert result.shape == expected.shape
    np.testing.assert_allclose(steps * span.scale, result, rtol=0, atol=1e-4 * span.scale * 255)
    difference = np.abs(steps - expected)
    assert difference.max() <= 1
    # Where the exact value lies within float32's error of the edge between two steps, either is right.
    edge = np.abs(np.abs(reference / span.scale - np.floor(reference / span.scale)) - 0.5) < 1e-3
    assert np.mean((difference == 0) | edge) >= 0.999
    assert np.mean(difference == 0) >= 0.99


# What follows a convolution, and what follows a product besides.
RELUS = {None: lambda x: x, "relu": tf.nn.relu, "relu6": tf.nn.relu6}
ACTIVATIONS = {
    **RELUS,
    "leaky": lambda x: tf.nn.leaky_relu(x, 0.3),
    "elu": tf.nn.elu,
    "tanh": tf.nn.tanh,
    "sigmoid": tf.nn.sigmoid,
    "gelu": lambda x: keras.activations.gelu(x, approximate=False),
    "gelu_approximate": lambda x: keras.activations.gelu(x, approximate=True),
}
REFERENCES = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky": lambda x: np.where(x > 0, x, np.float32(0.3) * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "tanh": np.tanh,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "gelu": lambda x: x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2,
    "gelu_approximate": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(5, 11), st.integers(5, 11)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    padding=st.sampled_from(["SAME", "VALID", "EXPLICIT"]),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    form=st.sampled_from(FORMS),
    activation=st.sampled_from([None, "relu", "relu6"]),
    bias=st.booleans(),
    magnitude=st.sampled_from([1e-5, 1e-2, 1.0, 1e5]),
    seed=st.integers(0, 99),
)
def test_convolution(size, kernel, channels, padding, pads, stride, dilation, form, activation, bias, magnitude, seed):
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=(3, *size, channels[0])) * magnitude).astype("float32")
    x = in_form(x, form)
    weights = generator.normal(size=(*kernel, *channels)).astype("float32")
    offset = (generator.normal(size=channels[1]) * magnitude * bias).astype("float32")
    explicit = [[0, 0], list(pads[:2]), list(pads[2:]), [0, 0]]

    def function(x):
        y = tf.nn.conv2d(x, weights, stride, explicit if padding == "EXPLICIT" else padding, dilations=dilation)
        return RELUS[activation](tf.nn.bias_add(y, offset) if bias else y)

    lowered, (fusion,), ranges = lower(graph_of(function, (None, *size, channels[0])), x)
    assert {node.op for node in lowered.graph_def.node} & {"Conv2D", "_FusedQuantizedConv2D"} == {
        "_FusedQuantizedConv2D"
    }
    entering, leaving = ranges[fusion.input], ranges[fusion.output]
    assert form_of(entering) == form
    steps, scale = quantized_weights(weights)
    amounts = {
        "SAME": [same_padding(size[axis], kernel[axis], stride, dilation) for axis in (0, 1)],
        "VALID": [(0, 0), (0, 0)],
        "EXPLICIT": explicit[1:3],
    }[padding]
    sums = convolve(quantized(x, entering), steps, (stride, stride), amounts, (dilation, dilation))
    assert np.abs(sums).max() < 2**31
    reference = sums * (entering.scale * scale) + offset
    assert_agrees(lowered.predict(x)["y"], reference, leaving, activation)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(5, 11), st.integers(5, 11)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.integers(1, 35),
    padding=st.sampled_from(["SAME", "VALID"]),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    form=st.sampled_from(FORMS),
    activation=st.sampled_from([None, "relu", "relu6"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_depthwise_convolution(size, kernel, channels, padding, stride, dilation, form, activation, bias, seed):
    dilation = dilation if stride == 1 else 1  # TensorFlow takes one or the other
    # TensorFlow's float kernel takes a cached Conv2D of the same sizes for this one, and aborts.
    assume(kernel != (1, 1) or channels > 1)
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(3, *size, channels)).astype("float32")
    x = in_form(x, form)
    weights = (generator.normal(size=(*kernel, channels, 1)) * generator.uniform(0.1, 3, (channels, 1))).astype(
        "float32"
    )
    offset = (generator.normal(size=channels) * bias).astype("float32")

    def function(x):
        # tf.nn.depthwise_conv2d would take a dilated one apart into convolutions of every other pixel.
        y = tf.raw_ops.DepthwiseConv2dNative(
            input=x,
            filter=weights,
            strides=[1, stride, stride, 1],
            padding=padding,
            dilations=[1, dilation, dilation, 1],
        )
        return RELUS[activation](tf.nn.bias_add(y, offset) if bias else y)

    lowered, (fusion,), ranges = lower(graph_of(function, (None, *size, channels)), x)
    assert [node.op for node in lowered.graph_def.node].count("_FusedQuantizedDepthwiseConv2D") == 1
    entering, leaving = ranges[fusion.input], ranges[fusion.output]
    steps, scale = quantized_weights(weights[..., 0])
    amounts = [
        same_padding(size[axis], kernel[axis], stride, dilation) if padding == "SAME" else (0, 0) for axis in (0, 1)
    ]
    values = quantized(x, entering)
    sums = np.concatenate(
        [
            convolve(
                values[..., [channel]], steps[:, :, channel, None, None], (stride, stride), amounts, (dilation,) * 2
            )
            for channel in range(channels)
        ],
        axis=-1,
    )
    assert_agrees(lowered.predict(x)["y"], sums * (entering.scale * scale) + offset, leaving, activation)


@settings(max_examples=18, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)),
    form=st.sampled_from(FORMS),
    activation=st.sampled_from(list(ACTIVATIONS)),
    bias=st.booleans(),
    followed=st.booleans(),
    magnitude=st.sampled_from([1e-5, 1e-2, 1.0, 1e5]),
    seed=st.integers(0, 99),
)
def test_matrix_product(shape, form, activation, bias, followed, magnitude, seed):
    """With float32 results where nothing quantized follows, else with int8 results."""
    examples, inner, outer = shape
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=(examples, inner)) * magnitude).astype("float32")
    x = in_form(x, form)
    weights = generator.normal(size=(inner, outer)).astype("float32")
    offset = (generator.normal(size=outer) * magnitude * bias).astype("float32")

    def product(x):
        y = tf.matmul(x, weights)
        return ACTIVATIONS[activation](tf.nn.bias_add(y, offset) if bias else y)

    def function(x):
        y = product(x)
        # The identity matrix passes the quantized result on; 1 is 127 of its steps, so nothing is lost.
        return tf.matmul(y, np.eye(outer, dtype="float32")) if followed else y

    lowered, fusions, ranges = lower(graph_of(function, (None, inner)), x)
    assert [node.op for node in lowered.graph_def.node].count("_QuantizedMatMul") == 1 + followed
    assert "MatMul" not in {node.op for node in lowered.graph_def.node}
    entering = ranges[fusions[0].input]
    steps, scale = quantized_weights(weights)
    reference = (quantized(x, entering) @ steps) * (entering.scale * scale) + offset
    result = lowered.predict(x)["y"]
    if followed and activation in RELUS:
        assert_agrees(result, reference, ranges[fusions[1].input], activation)
    elif followed:  # the kernels' own approximations of these functions are good to a millionth
        span = ranges[fusions[1].input]
        expected = np.clip(REFERENCES[activation](reference), span.low, span.limit)
        np.testing.assert_allclose(result, expected, rtol=0, atol=0.51 * span.scale + 2e-6)
    else:
        expected = REFERENCES[activation](reference)
        rounding = 2e-7 if activation == "elu" else 0.0  # the kernel subtracts 1 from an exponential, in float32
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(reference).max() + rounding)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["relu", "relu6"])
@pytest.mark.parametrize("seed", range(2))
def test_fused_sum_with_an_unsigned_summand(form, activation, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(2, 7, 7, 6)).astype("float32")
    other = np.abs(generator.normal(size=(2, 7, 7, 9))).astype("float32")
    x = in_form(x, form)
    weights = generator.normal(size=(3, 3, 6, 9)).astype("float32")
    offset = generator.normal(size=9).astype("float32")

    def function(x, other):
        total = tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), offset) + tf.nn.relu(other)
        return ACTIVATIONS[activation](total)

    lowered, (fusion,), ranges = lower(graph_of(function, (None, 7, 7, 6), (None, 7, 7, 9)), [(x, other)])
    assert fused(lowered) == [["BiasAdd", "Sum", "Relu", "Requantize"]]
    entering, summand, leaving = ranges[fusion.input], ranges[fusion.summand], ranges[fusion.output]
    steps, scale = quantized_weights(weights)
    sums = convolve(quantized(x, entering), steps, (1, 1), [(1, 1), (1, 1)], (1, 1))
    reference = sums * (entering.scale * scale) + offset + quantized(other, summand) * summand.scale
    assert_agrees(lowered.predict([x, other])["y"], reference, leaving, activation)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    size=st.integers(4, 9),
    channels=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    reader=st.tuples(st.integers(1, 3), st.sampled_from(["SAME", "VALID"]), st.integers(1, 2)),
    bias=st.booleans(),
    magnitude=st.sampled_from([1e-5, 1.0, 1e5]),
    seed=st.integers(0, 99),
)
def test_fused_sum_without_an_activation(size, channels, reader, bias, magnitude, seed):
    """Summand and sum travel with an offset; the convolution that reads the sum undoes it, padded or not."""
    generator = np.random.default_rng(seed)
    inner, outer = channels
    kernel, padding, stride = reader
    x = (np.abs(generator.normal(size=(2, size, size, inner))) * magnitude).astype("float32")
    shapes = [(1, 1, inner, outer), (3, 3, inner, outer), (kernel, kernel, outer, 5)]
    weights = [generator.normal(size=shape).astype("float32") for shape in shapes]
    offsets = [(generator.normal(size=shape[-1]) * magnitude * bias).astype("float32") for shape in shapes]

    def convolution(x, index, stride=1, padding="SAME"):
        y = tf.nn.conv2d(x, weights[index], stride, padding)
        return tf.nn.bias_add(y, offsets[index]) if bias else y

    def function(x):
        return convolution(convolution(x, 0) + convolution(x, 1), 2, stride, padding)

    lowered, fusions, ranges = lower(graph_of(function, (None, size, size, inner)), x)
    assert ["BiasAdd", "Sum", "Relu", "Requantize"] in fused(lowered)
    first, adding, last = fusions
    assert (adding.summand, last.input) == (first.output, adding.output)
    entering, middle, total, leaving = (
        ranges[tensor] for tensor in (adding.input, first.output, adding.output, last.output)
    )

    def real(values, span, fusion, index, stride, padding):
        steps, scale = quantized_weights(weights[index])
        pads = same_padding(values.shape[1], len(steps), stride, 1) if padding == "SAME" else (0, 0)
        return convolve(values, steps, (stride, stride), [pads, pads], (1, 1)) * (span.scale * scale) + offsets[index]

    def steps_of(value, span):
        return np.clip(np.rint(value / span.scale), LOWEST if span.signed else -span.zero_point, span.steps)

    values = quantized(x, entering)
    index = int(first.op.endswith("_1"))
    summand = steps_of(real(values, entering, first, index, 1, "SAME"), middle)
    sums = steps_of(real(values, entering, adding, 1 - index, 1, "SAME") + summand * middle.scale, total)
    expected = steps_of(real(sums.astype(np.int64), total, last, 2, stride, padding), leaving)
    difference = np.abs(np.rint(lowered.predict(x)["y"] / leaving.scale) - expected)
    # A value on the edge of a step may round either way, and is then multiplied by a weight.
    assert difference.max() <= 4
    assert np.count_nonzero(difference) <= max(3, 0.02 * difference.size)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_fused_sum_with_a_signed_summand(bias, seed):
    """The summand is the result of another convolution without activation: it travels with an offset."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(2, 7, 7, 6)).astype("float32")
    weights = [generator.normal(size=(size, size, 6, 9)).astype("float32") for size in (1, 3)]
    offsets = [generator.normal(size=9).astype("float32") * bias for _ in range(2)]

    def function(x):
        x = tf.nn.relu(x)
        parts = [
            tf.nn.bias_add(y, offset) if bias else y
            for y, offset in zip((tf.nn.conv2d(x, w, 1, "SAME") for w in weights), offsets, strict=True)
        ]
        return tf.nn.relu(parts[0] + parts[1])

    lowered, fusions, ranges = lower(graph_of(function, (None, 7, 7, 6)), x)
    assert sorted(fused(lowered)) == [["BiasAdd", "Requantize"], ["BiasAdd", "Sum", "Relu", "Requantize"]]
    adding = next(fusion for fusion in fusions if fusion.summand)
    made = next(fusion for fusion in fusions if not fusion.summand)
    entering, middle, leaving = ranges[adding.input], ranges[adding.summand], ranges[adding.output]
    assert middle.low < 0
    values = quantized(np.maximum(x, 0), entering)

    def real(fusion):
        index = 1 if fusion.nodes[0].endswith("_1") else 0
        steps, scale = quantized_weights(weights[index])
        pad = (index, index)
        return convolve(values, steps, (1, 1), [pad, pad], (1, 1)) * (entering.scale * scale) + offsets[index]

    reference = real(adding) + quantized(real(made), middle) * middle.scale
    result = lowered.predict(x)["y"]
    expected = np.clip(np.rint(np.maximum(reference, 0) / leaving.scale), 0, 255)
    difference = np.abs(np.rint(result / leaving.scale) - expected)
    # A summand on the edge of a step may round either way, which is up to one step of its own, often a larger one.
    assert difference.max() <= 1 + np.ceil(middle.scale / leaving.scale)
    assert np.mean(difference == 0) >= 0.999


def fused(graph):
    nodes = [node for node in graph.graph_def.node if node.op == "_FusedQuantizedConv2D"]
    return [[name.decode() for name in node.attr["fused_ops"].list.s] for node in nodes]


def test_values_beyond_the_calibrated_range_saturate():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 6, 6, 3)).astype("float32")
    weights = generator.normal(size=(3, 3, 3, 5)).astype("float32")
    lowered, (fusion,), ranges = lower(graph_of(lambda x: tf.nn.conv2d(x, weights, 1, "SAME"), (None, 6, 6, 3)), x)
    entering, leaving = ranges[fusion.input], ranges[fusion.output]
    steps, scale = quantized_weights(weights)
    sums = convolve(quantized(x * 4, entering), steps, (1, 1), [(1, 1), (1, 1)], (1, 1))
    lowest = -128 if leaving.signed else -leaving.zero_point
    result = lowered.predict(x * 4)["y"]
    assert_agrees(result, sums * (entering.scale * scale), leaving)
    assert result.max() == pytest.approx(leaving.limit, rel=1e-5)
    assert result.min() == pytest.approx(lowest * leaving.scale, rel=1e-5)


def test_positive_results_without_an_activation_are_unsigned():
    """The kernel then has no Relu, and its result saturates at 0 as the annotated graph's does."""
    generator = np.random.default_rng(0)
    x = np.abs(generator.normal(size=(4, 6, 6, 3))).astype("float32")
    weights = np.abs(generator.normal(size=(3, 3, 3, 5))).astype("float32")
    lowered, (fusion,), ranges = lower(graph_of(lambda x: tf.nn.conv2d(x, weights, 1, "SAME"), (None, 6, 6, 3)), x)
    assert form_of(ranges[fusion.output]) == "unsigned"
    assert fused(lowered) == [["BiasAdd", "Requantize"]]
    steps, scale = quantized_weights(weights)
    sums = convolve(quantized(x, ranges[fusion.input]), steps, (1, 1), [(1, 1), (1, 1)], (1, 1))
    assert_agrees(lowered.predict(x)["y"], sums * (ranges[fusion.input].scale * scale), ranges[fusion.output])


@pytest.mark.parametrize("form", FORMS)
def test_moving_ops_work_on_the_quantized_tensor(form):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 8, 8, 3)).astype("float32")
    x = np.concatenate([x, -x])  # so that all that is linear in it is symmetric
    weights = generator.normal(size=(3, 3, 3, 5)).astype("float32")
    offset = np.full(5, 6.0 if form == "zero_point" else 0.0, "float32")
    second = generator.normal(size=(80, 6)).astype("float32")

    def function(x):
        y = tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), offset)
        y = tf.nn.relu(y) if form == "unsigned" else y
        y = tf.nn.max_pool2d(tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
        return tf.matmul(tf.reshape(tf.squeeze(tf.expand_dims(y, 1), 1), [-1, 80]), second)

    graph = graph_of(function, (None, 8, 8, 3))
    lowered, fusions, ranges = lower(graph, x)
    names = [node.op for node in lowered.graph_def.node]
    assert names.count("QuantizeV2") == 1
    assert "Dequantize" not in names
    assert "QuantizedMaxPool" in names
    assert form_of(ranges[fusions[0].output]) == form
    (pad,) = [node for node in lowered.graph_def.node if node.op == "PadV2"]
    assert tf.as_dtype(pad.attr["T"].type) == (tf.int8 if form == "symmetric" else tf.uint8)
    editor = GraphEditor(graph.graph_def)
    annotated = annotate(graph, fusions, ranges)
    assert sum(node.op == FAKE_QUANT for node in annotated.graph_def.node) == len(ranges) == 2
    assert editor.nodes.keys() >= {fusion.op for fusion in fusions}
    expected, result = annotated.predict(x)["y"], lowered.predict(x)["y"]
    # The convolution may round one step otherwise, which one weight at most multiplies.
    assert np.mean(np.abs(result - expected) < 1e-4 * np.abs(expected).max()) >= 0.99
    assert np.abs(result - expected).max() <= ranges[fusions[0].output].scale * np.abs(second).max() * 2


def test_what_is_computed_in_float_is_read_in_float():
    """A residual stream beside the product that it enters: it is quantized for the product alone."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(8, 6)).astype("float32")
    weights = generator.normal(size=(6, 6)).astype("float32")

    def function(x):
        stream = tf.tanh(x)
        return tf.matmul(stream, weights) + stream

    lowered, (fusion,), ranges = lower(graph_of(function, (None, 6)), x)
    assert [node.op for node in lowered.graph_def.node].count("QuantizeV2") == 1
    assert "Dequantize" not in {node.op for node in lowered.graph_def.node}
    entering = ranges[fusion.input]
    steps, scale = quantized_weights(weights)
    expected = (quantized(np.tanh(x), entering) @ steps) * (entering.scale * scale) + np.tanh(x)
    np.testing.assert_allclose(lowered.predict(x)["y"], expected, rtol=1e-5, atol=1e-5)


def test_a_transpose_before_a_product_moves_bytes():
    """What is transposed between a float op and a product is transposed as bytes."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 3, 4, 5)).astype("float32")
    weights = generator.normal(size=(15, 7)).astype("float32")

    def function(x):
        return tf.matmul(tf.reshape(tf.transpose(tf.tanh(x), (0, 2, 1, 3)), (-1, 15)), weights)

    lowered, _, ranges = lower(graph_of(function, (None, 3, 4, 5)), x)
    nodes = {node.op: node for node in lowered.graph_def.node}
    (span,) = ranges.values()
    assert nodes["Transpose"].attr["T"].type == (tf.int8 if span.signed else tf.uint8).as_datatype_enum
    steps, scale = quantized_weights(weights)
    moved = quantized(np.tanh(x), span).transpose(0, 2, 1, 3).reshape(-1, 15)
    expected = (moved @ steps) * (span.scale * scale)
    np.testing.assert_allclose(lowered.predict(x)["y"], expected, rtol=1e-5, atol=1e-4)
