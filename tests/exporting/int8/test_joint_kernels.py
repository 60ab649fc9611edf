"""Concatenation, average pooling and repetition in int8: by the bytes, and against the annotated graph of models."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from keras import layers

import tfopt
from tfopt.compat.tensorflow import uses_onednn
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import GraphEditor
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops

PLAIN = tfopt.QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)
SHAPE = (16, 16, 3)


def conv(x, filters=8, kernel=3, strides=1, activation="relu", scale=1.0):
    """A convolution whose results are about as large as `scale`."""
    spread = keras.initializers.RandomNormal(stddev=scale / (kernel * x.shape[-1] ** 0.5))
    return layers.Conv2D(filters, kernel, strides, "same", activation=activation, kernel_initializer=spread)(x)


def concat(*parts):
    return layers.Concatenate()(list(parts))


def head(x):
    return layers.Dense(5)(layers.Flatten()(x))


def branches(x):
    x = conv(x)
    return head(conv(concat(conv(x), conv(conv(x, kernel=1)), conv(x, 4, 1))))


def reduction(x):
    """A part is the maximum of another concatenation, which others read as well."""
    x = concat(conv(x), conv(x, kernel=1))
    x = concat(conv(x, strides=2), layers.MaxPooling2D(3, 2, padding="same")(x))
    return head(conv(x))


def every_earlier_result(x):
    x = conv(x)
    for _ in range(3):
        x = concat(x, conv(x))
    return head(x)


def upsampled(x):
    fine = conv(x)
    coarse = conv(layers.MaxPooling2D()(fine))
    return head(conv(concat(layers.UpSampling2D(2)(coarse), fine)))


def signed(x):
    x = conv(x)
    return head(conv(concat(conv(x, activation=None), conv(x, kernel=1, activation=None))))


def with_an_offset(x):
    """One part is a summand that is not rectified: it has an offset in int8, which the bytes lose on their way."""
    x = conv(x, activation=None)
    total = layers.Add()([conv(conv(x), activation=None), x])
    return head(conv(concat(total, conv(total, activation=None))))


def read_by_float_too(x):
    joined = concat(conv(x), conv(x, kernel=1))
    return head(concat(conv(joined), layers.Activation("tanh")(joined)))


def also_returned(x):
    joined = concat(conv(x), conv(x, kernel=1))
    return [conv(joined), joined]


def twice_the_same(x):
    x = conv(x)
    return head(conv(concat(x, x)))


def along_the_rows(x):
    x = conv(x)
    return head(conv(layers.Concatenate(axis=1)([conv(x), conv(x, kernel=1)])))


def pooled(x):
    """As in Inception: what is pooled is a concatenation that others read too."""
    joined = concat(conv(x), conv(x, kernel=1))
    pooled = layers.AveragePooling2D(3, 1, padding="same")(joined)
    return head(conv(concat(conv(joined), conv(pooled, kernel=1))))


def pooled_before_a_product(x):
    return head(layers.AveragePooling2D(4)(conv(x)))


def one_part_is_small(x):
    """Nothing else reads the small part, so it takes the coarser grid that the whole has anyway."""
    return head(conv(concat(conv(x), conv(x, scale=0.01))))


MODELS = {
    branches: 1,
    reduction: 2,
    every_earlier_result: 3,
    upsampled: 1,
    signed: 1,
    with_an_offset: 1,
    read_by_float_too: 1,
    also_returned: 1,
    twice_the_same: 1,
    along_the_rows: 1,
    pooled: 2,
    pooled_before_a_product: 0,
    one_part_is_small: 1,
}


def build(topology):
    keras.utils.set_random_seed(0)
    inputs = keras.Input(SHAPE, name="x")
    return keras.Model(inputs, topology(inputs))


def images(count=16, seed=0):
    """Returns images of large squares, so that pooling leaves the largest values about as large as they are."""
    squares = np.random.default_rng(seed).normal(size=(count, 2, 2, 3)).astype("float32")
    return squares.repeat(8, axis=1).repeat(8, axis=2)


def concats_in(graph):
    types = (node.attr["T"].type for node in graph.graph_def.node if node.op == "ConcatV2")
    return Counter(tf.as_dtype(each).name for each in types if tf.as_dtype(each) not in (tf.int32, tf.int64))


def assert_agree(results, references):
    """A value on the edge between two steps may be rounded otherwise, and later ones with it.

    Without oneDNN, TensorFlow's kernel of the average pooling cuts means off.
    """
    for name, expected in references.items():
        assert np.linalg.norm(results[name] - expected) <= (0.01 if uses_onednn() else 0.02) * np.linalg.norm(expected)


def poolings_in(graph):
    return Counter(node.op for node in graph.graph_def.node if node.op in ("AvgPool", "QuantizedAvgPool"))


QUICK = (reduction, upsampled, with_an_offset, pooled)
CASES = [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow, id=each.__name__) for each in MODELS]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", CASES)
def test_concatenations_move_bytes_and_change_nothing(topology):
    quantized = tfopt.quantize(build(topology), PLAIN, calibration_data=images())
    lowered = lower_to_int8(quantized.graph)
    in_int8 = sum(count for kind, count in concats_in(lowered).items() if kind in ("quint8", "qint8"))
    assert in_int8 == MODELS[topology]
    assert poolings_in(lowered) == ({"QuantizedAvgPool": 1} if topology in (pooled, pooled_before_a_product) else {})
    x = images(seed=1)
    assert_agree(lowered.predict(x), quantized.graph.predict(x))


def different_ranges(x):
    """The small part is read by another convolution too, which needs its finer grid."""
    small = conv(x, scale=0.01)
    return [head(conv(concat(conv(x), small))), conv(small)]


def different_signs(x):
    return head(conv(concat(conv(x), conv(x, activation=None))))


def no_kernel_reads_it(x):
    return head(layers.Activation("tanh")(concat(conv(x), conv(x, kernel=1))))


def a_part_in_float(x):
    return head(conv(concat(conv(x), layers.Activation("tanh")(x))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [different_ranges, different_signs, no_kernel_reads_it, a_part_in_float])
def test_concatenations_that_stay_float(topology):
    model, x = build(topology), images()
    quantized = tfopt.quantize(model, PLAIN, calibration_data=x)
    lowered = lower_to_int8(quantized.graph)
    assert concats_in(lowered) == {"float32": 1}
    assert_agree(lowered.predict(x), quantized.graph.predict(x))


def test_a_small_part_that_others_read_keeps_its_range():
    quantized = tfopt.quantize(build(different_ranges), PLAIN, calibration_data=images())
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions, _ = find_fusions(quantized.float_graph, editor)
    limits = [quantized.ranges[fusion.output].limit for fusion in fusions if fusion.output in quantized.ranges]
    assert min(limits) < 0.1 * max(limits)


def test_a_branch_kept_float_leaves_the_concatenation_float():
    quantized = tfopt.quantize(build(branches), PLAIN, calibration_data=images())
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions, _ = find_fusions(quantized.float_graph, editor)
    ((first, *_),) = find_shared_range_ops(editor, fusions, quantized.ranges).values()
    branch = next(fusion for fusion in fusions if fusion.output == first)
    fewer = quantized.leaving_float({branch.op: "tried"})
    lowered = lower_to_int8(fewer.graph)
    assert concats_in(lowered) == {"float32": 1}
    x = images(seed=1)
    assert_agree(lowered.predict(x), fewer.graph.predict(x))


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    channels=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    rectified=st.booleans(),
    axis=st.sampled_from([1, 2, 3, -1]),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_bytes_are_those_of_the_parts(channels, rectified, axis, repeats, seed):
    """The bytes of the concatenation, and of its repetition, against NumPy's of the parts' bytes."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6, 6, 2), name="x")
    widths = channels if axis in (3, -1) else [channels[0]] * len(channels)
    activation = "relu" if rectified else None
    parts = [layers.Conv2D(width, 3, padding="same", activation=activation)(inputs) for width in widths]
    joined = layers.UpSampling2D(repeats)(layers.Concatenate(axis=axis)(parts))
    model = keras.Model(inputs, layers.Conv2D(3, 1)(joined))
    x = np.random.default_rng(seed).normal(size=(3, 6, 6, 2)).astype("float32")
    lowered = lower_to_int8(tfopt.quantize(model, PLAIN, calibration_data=x).graph)
    nodes = {node.name: node for node in lowered.graph_def.node}
    (moved,) = (node for node in nodes.values() if node.op == "ConcatV2" and node.attr["T"].type != tf.int32)
    kernels = [node for node in nodes.values() if node.op == "_FusedQuantizedConv2D"]
    (reader,) = (kernel for kernel in kernels if _comes_from(nodes, kernel.input[0], moved.name))
    fetched = lowered.as_function(fetch=[*moved.input[:-1], moved.name, reader.input[0]])(x=tf.constant(x))
    *own, whole, read = (tf.bitcast(each, tf.uint8).numpy() for each in fetched)
    assert any(part.any() for part in own)
    expected = np.concatenate(own, axis=axis)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(read, expected.repeat(repeats, axis=1).repeat(repeats, axis=2))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.integers(1, 3),
    padding=st.sampled_from(["same", "valid"]),
    channels=st.integers(1, 9),
    rectified=st.booleans(),
    seed=st.integers(0, 99),
)
def test_average_pooling_against_integer_arithmetic(size, window, strides, padding, channels, rectified, seed):
    """The mean of the bytes in the window, those outside of the image not counted, rounded to the nearest even.

    TensorFlow's own kernel, which runs where oneDNN is off, cuts it off.
    """
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((*size, 2), name="x")
    # Large images of one shade each, so that the mean's range is that of what is pooled.
    spread = layers.Conv2D(channels, 1, activation="relu" if rectified else None)(inputs)
    pooled = layers.AveragePooling2D(window, strides, padding)(spread)
    model = keras.Model(inputs, layers.Conv2D(3, 1)(pooled))
    generator = np.random.default_rng(seed)
    shades = generator.normal(size=(6, 1, 1, 2)).astype("float32") * 3
    x = shades + generator.normal(size=(6, *size, 2)).astype("float32")
    x[:3] = shades[:3]
    lowered = lower_to_int8(tfopt.quantize(model, PLAIN, calibration_data=x).graph)
    found = [node for node in lowered.graph_def.node if node.op == "QuantizedAvgPool"]
    assume(found)  # not where the mean's range is less than half of the values'
    fetched = lowered.as_function(fetch=[found[0].input[0], found[0].name])(x=tf.constant(x))
    kind = np.uint8 if fetched[0].dtype == tf.quint8 else np.int8
    steps, means = (tf.bitcast(each, kind).numpy() for each in fetched)
    ones = np.ones((1, *size, 1))
    sums, counts = (tf.nn.avg_pool2d(v.astype("float64"), window, strides, padding.upper()) for v in (steps, ones))
    np.testing.assert_allclose(counts, 1.0)  # TensorFlow too leaves out what lies outside
    to_whole = np.rint if uses_onednn() else np.trunc
    np.testing.assert_array_equal(means, to_whole(sums.numpy()).astype(kind))


def _comes_from(nodes, name, source):
    while name != source and nodes[name].op in ("Bitcast", "ResizeNearestNeighbor", "Identity"):
        name = nodes[name].input[0]
    return name == source


def test_trained_ranges_stay_as_they_were_trained():
    """Each was trained for itself, so what joins tensors of several ranges computes in float."""
    model = build(branches)
    x = images(32)
    trained = tfopt.quantize(model, tfopt.QuantizationConfig(training=True), calibration_data=x)
    lowered = lower_to_int8(tfopt.quantize(trained).graph)
    assert concats_in(lowered) == {"float32": 1}
    expected = np.asarray(trained(x))
    assert np.linalg.norm(lowered.predict(x)["output_0"] - expected) <= 0.01 * np.linalg.norm(expected)
