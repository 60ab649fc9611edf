"""Residual networks of many shapes, each lowered to int8 and compared with its annotated graph.

Run as a script, since a wrong fused sum can crash the process: it prints one JSON line per topology. A line is printed
only after the lowered graph ran several times, serially and in parallel, so a crash shows as a missing line.
"""

import json
import sys

import keras
import numpy as np
from keras import layers

from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.quantization import QuantizationConfig, quantize

# Corrected biases fall between the steps in which the kernels sum, and so move more values over the edge of a step.
PLAIN = QuantizationConfig(observer="minmax", equalization=False, smooth_quant=0.0, bias_correction=False)
SHAPE = (8, 8, 16)
RUNS = 4


def conv(x, filters=16, kernel=3, activation="relu", strides=1):
    return layers.Conv2D(filters, kernel, strides, padding="same", activation=activation, bias_initializer="normal")(x)


def batch_norm(x, relu=True):
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(x) if relu else x


def add(*tensors):
    return layers.ReLU()(layers.Add()(list(tensors)))


class Plus(layers.Layer):
    """Adds a constant of a given shape."""

    def __init__(self, shape):
        super().__init__()
        self.constant = np.random.default_rng(3).normal(size=shape).astype("float32")

    def call(self, x):
        return x + self.constant


def basic_block(x):
    r = conv(x)
    return add(conv(conv(r), activation=None), r)


def summand_first(x):
    r = conv(x)
    return add(r, conv(conv(r), activation=None))


def two_branches(x):
    """Both operands of the sum are results of convolutions: the signed summand gets its offset."""
    r = conv(x)
    return add(conv(conv(r), activation=None), conv(r, kernel=1, activation=None))


def two_branches_batch_norm(x):
    r = conv(x)
    one = batch_norm(layers.Conv2D(16, 3, padding="same", use_bias=False)(conv(r)), relu=False)
    two = batch_norm(layers.Conv2D(16, 1, use_bias=False)(r), relu=False)
    return add(one, two)


def strided_projection(x):
    r = conv(x)
    return add(conv(conv(r, 24, strides=2), 24, activation=None), conv(r, 24, 1, None, 2))


def relu6_sum(x):
    r = conv(x, activation="relu6")
    return layers.ReLU(6.0)(layers.Add()([conv(conv(r), activation=None), r]))


def same_conv_reads_summand(x):
    r = conv(x)
    return add(conv(r, activation=None), r)


def later_conv_reads_summand(x):
    r = conv(x)
    return layers.Concatenate()([add(conv(conv(r), activation=None), r), conv(r, 8)])


def later_dense_reads_summand(x):
    r = conv(x)
    total = layers.Flatten()(add(conv(conv(r), activation=None), r))
    return layers.Concatenate()([layers.Dense(5)(total), layers.Dense(5)(layers.Flatten()(r))])


def summand_is_output(x):
    r = conv(x)
    return [add(conv(conv(r), activation=None), r), r]


def sum_is_output(x):
    r = conv(x)
    total = layers.Add()([conv(conv(r), activation=None), r])
    return [layers.ReLU()(total), total]


def signed_summand_is_output(x):
    r = conv(x)
    shortcut = conv(r, kernel=1, activation=None)
    return [add(conv(conv(r), activation=None), shortcut), shortcut]


def reshape_alias(x):
    """The reshape reads the summand before the sum; what it gives shares the buffer and is read after it."""
    r = conv(x)
    alias = layers.Reshape(SHAPE)(r)
    total = add(conv(conv(alias), activation=None), r)
    return [total, conv(alias, 8)]


def reshape_alias_to_float(x):
    r = conv(x)
    alias = layers.Reshape(SHAPE)(r)
    total = add(conv(conv(alias), activation=None), r)
    return [conv(conv(total)), layers.GlobalAveragePooling2D()(alias)]


def reshape_summand(x):
    r = conv(x)
    return add(conv(conv(r), activation=None), layers.Reshape(SHAPE)(r))


def max_pool_alias(x):
    """The pooling is an ancestor of the sum, but its float twin reads the summand when it likes."""
    r = conv(x)
    pooled = layers.MaxPooling2D(2, 1, padding="same")(r)
    total = add(conv(conv(pooled), activation=None), r)
    return [total, layers.GlobalAveragePooling2D()(pooled)]


def max_pool_alias_to_output(x):
    r = conv(x)
    pooled = layers.MaxPooling2D(2, 1, padding="same")(r)
    return [add(conv(conv(pooled), activation=None), r), pooled]


def pad_alias(x):
    r = conv(x)
    padded = layers.ZeroPadding2D(1)(r)
    inner = layers.Conv2D(16, 3, padding="valid", activation="relu")(padded)
    return [add(conv(inner, activation=None), r), layers.GlobalAveragePooling2D()(padded)]


def max_pool_summand(x):
    r = conv(x)
    pooled = layers.MaxPooling2D(2)(r)
    return add(conv(conv(r, strides=2), activation=None), pooled)


def identity_summand(x):
    r = conv(x)
    return add(conv(conv(r), activation=None), layers.Identity()(r))


def two_sums_share_a_summand(x):
    r = conv(x)
    first = add(conv(conv(r), activation=None), r)
    return add(conv(conv(first), activation=None), r)


def two_parallel_sums_share_a_summand(x):
    r = conv(x)
    return layers.Concatenate()([add(conv(conv(r), activation=None), r), add(conv(conv(r, 8), activation=None), r)])


def long_fusion(x):
    r = conv(x)
    for _ in range(6):
        r = add(conv(conv(r), activation=None), r)
    return r


def broadcast_constant(x):
    return layers.ReLU()(Plus((1, 8, 8, 1))(conv(x, activation=None)))


def channel_constant(x):
    return layers.ReLU()(Plus((1, 1, 1, 16))(conv(conv(x), activation=None)))


def whole_constant(x):
    return layers.ReLU()(Plus((1, *SHAPE))(conv(conv(x), activation=None)))


def squeeze_and_add(x):
    """[N, 1, 1, C] is broadcast over the image."""
    r = conv(x)
    pooled = layers.GlobalAveragePooling2D(keepdims=True)(r)
    return add(conv(r, activation=None), conv(pooled, kernel=1))


def squeeze_excite(x):
    r = conv(x)
    gate = conv(conv(layers.GlobalAveragePooling2D(keepdims=True)(r), 4, 1), 16, 1, "sigmoid")
    return add(conv(layers.Multiply()([r, gate]), activation=None), r)


def preactivation(x):
    """ResNet v2: the sum has no activation and is read twice."""
    r = conv(x, activation=None)
    for _ in range(3):
        inner = conv(batch_norm(r))
        r = layers.Add()([conv(inner, activation=None), r])
    return batch_norm(r)


def preactivation_projection(x):
    r = conv(x, activation=None)
    active = batch_norm(r)
    shortcut = conv(active, 24, 1, None, 2)
    inner = conv(conv(active, 24, 1), 24, 3, "relu", 2)
    return batch_norm(layers.Add()([shortcut, conv(inner, 24, 1, None)]))


def dense_net(x):
    r = conv(x)
    for _ in range(3):
        r = layers.Concatenate()([r, conv(batch_norm(r), 8)])
    return layers.AveragePooling2D(2)(conv(batch_norm(r), 8, 1))


def inverted_residual(x):
    """MobileNetV2: no activation behind the sum."""
    r = conv(x, activation=None)
    inner = conv(r, 32, 1, "relu6")
    inner = layers.ReLU(6.0)(layers.DepthwiseConv2D(3, padding="same")(inner))
    return conv(layers.Add()([conv(inner, 16, 1, None), r]), 8, 1)


def linear_bottlenecks(x):
    """Sums of sums, none with an activation."""
    r = conv(x, activation=None)
    for _ in range(4):
        r = layers.Add()([conv(conv(r, 32, 1), 16, 1, None), r])
    return conv(r, 8, 1)


def linear_sum_read_in_every_way(x):
    """What reads a sum with an offset undoes it: without padding or with, moved, pooled, in float."""
    r = conv(x, activation=None)
    total = layers.Add()([conv(conv(r), activation=None), r])
    return [
        conv(total, 8, 1),
        conv(total, 8, 3),
        layers.Conv2D(8, 3, padding="valid")(total),
        layers.Conv2D(8, 3, padding="valid")(layers.ZeroPadding2D(1)(total)),
        layers.DepthwiseConv2D(3, padding="same")(total),
        conv(layers.MaxPooling2D(2)(total), 8, 3),
        layers.Dense(5)(layers.Flatten()(total)),
        layers.GlobalAveragePooling2D()(total),
    ]


def pooled_linear_sum(x):
    """ResNet v2 thins out its shortcut by a pooling."""
    r = conv(x, activation=None)
    total = layers.Add()([conv(conv(r), activation=None), r])
    return layers.Add()([conv(conv(total), activation=None, strides=2), layers.MaxPooling2D(1, 2)(total)])


def linear_sum_with_a_float_sum(x):
    """The sum that is added was not fused, and comes as a float: one of its summands is read later."""
    r = conv(x, activation=None)
    inner = conv(conv(r), activation=None)
    first = layers.Add()([inner, r])
    second = layers.Add()([conv(conv(first), activation=None), first])
    return [second, layers.Activation("tanh")(inner), layers.Activation("tanh")(r)]


def three_way(x):
    r = conv(x)
    return add(conv(conv(r), activation=None), conv(r, kernel=1, activation=None), r)


def three_way_of_convolutions(x):
    r = conv(x)
    return add(*(conv(r, kernel=size, activation=None) for size in (1, 3, 5)))


def added_to_itself(x):
    r = conv(x, activation=None)
    return add(r, r)


def shared_convolution(x):
    shared = layers.Conv2D(16, 3, padding="same", activation="relu")
    r = shared(x)
    return add(conv(shared(r), activation=None), r)


def shared_convolution_on_both_sides(x):
    shared = layers.Conv2D(16, 3, padding="same")
    r = conv(x)
    return add(shared(conv(r)), shared(r))


def signed_calibrated_as_positive(x):
    """No activation, yet never negative in calibration: an unsigned result without a Relu in the kernel."""
    r = conv(x)
    positive = layers.Conv2D(16, 1, kernel_initializer=keras.initializers.RandomUniform(0, 0.1))(r)
    return add(conv(conv(r), activation=None), positive)


def zero_summand(x):
    r = layers.Conv2D(16, 1, kernel_initializer="zeros", activation="relu")(x)
    return add(conv(conv(x), activation=None), r)


def fusioned_signed_sums(x):
    r = conv(x)
    first = add(conv(conv(r), activation=None), conv(r, kernel=1, activation=None))
    return add(conv(conv(first), activation=None), conv(first, kernel=1, activation=None))


def sum_of_fusion_and_float(x):
    r = conv(x)
    wave = layers.Activation("tanh")(r)
    return add(conv(conv(r), activation=None), wave)


def relu_of_float(x):
    """A Relu that belongs to no convolution: the summand comes from QuantizeV2."""
    r = batch_norm(x)
    return add(conv(conv(r), activation=None), r)


def relu_of_float_read_again(x):
    r = batch_norm(x)
    return [add(conv(conv(r), activation=None), r), layers.GlobalMaxPooling2D()(r)]


def summand_is_pooled_twice(x):
    """TensorFlow would merge the equal poolings, and the sum be written over what the other convolution reads."""
    r = conv(x)
    one, two = (layers.MaxPooling2D(2)(r) for _ in range(2))
    total = add(conv(r, kernel=1, activation=None, strides=2), one)
    return layers.Concatenate()([total, conv(conv(two), 8)])


def two_sums_with_equal_poolings(x):
    r = conv(x)
    sums = [add(conv(r, kernel=size, activation=None, strides=2), layers.MaxPooling2D(2)(r)) for size in (1, 3)]
    return layers.Concatenate()(sums)


def dilated_block(x):
    r = conv(x)
    dilated = layers.Conv2D(16, 3, padding="same", dilation_rate=2, use_bias=False)(conv(r))
    return add(batch_norm(dilated, relu=False), r)


def causal_blocks(x):
    """Of sequences, with dilations, as in a temporal convolutional network."""
    x = layers.Reshape((64, 16))(x)
    x = layers.Conv1D(16, 1, activation="relu")(x)
    for dilation in (1, 2):
        r = x
        x = layers.Conv1D(16, 3, padding="causal", dilation_rate=dilation, activation="relu")(x)
        x = layers.Conv1D(16, 3, padding="causal", dilation_rate=dilation, use_bias=False)(x)
        x = add(batch_norm(x, relu=False), r)
    return layers.MaxPooling1D(2)(x)


TOPOLOGIES = [value for value in list(globals().values()) if getattr(value, "__code__", None) is not None]
TOPOLOGIES = [f for f in TOPOLOGIES if f.__module__ == __name__ and f.__code__.co_varnames[:1] == ("x",)]
TOPOLOGIES = [f for f in TOPOLOGIES if f.__code__.co_argcount == 1]


def build(topology):
    keras.utils.set_random_seed(7)
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, topology(inputs), name=topology.__name__)
    generator = np.random.default_rng(1)
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            width = layer.gamma.shape
            layer.set_weights([generator.uniform(0.5, 1.5, width) for _ in range(4)])
    return model


def compare(topology):
    """Returns, of one topology: fused sums, and by output the largest difference in units of the annotated range."""
    model = build(topology)
    data = np.random.default_rng(0).normal(size=(32, *SHAPE)).astype("float32")
    annotated = quantize(model, PLAIN, calibration_data=data).graph
    lowered = lower_to_int8(annotated)
    sums = sum(b"Sum" in node.attr["fused_ops"].list.s for node in lowered.graph_def.node if "fused_ops" in node.attr)
    reference, function = annotated.predict(data), lowered.as_function()
    errors = {}
    for _ in range(RUNS):
        for batch in (data[:1], data, data[:5]):
            results = function(**lowered.feed(batch))
            for name, value in results.items():
                expected = reference[name][: len(batch)]
                step = max(float(np.abs(expected).max()), 1e-6) / 127
                difference = np.abs(value.numpy() - expected) / step
                worst, mean = errors.get(name, (0.0, 0.0))
                errors[name] = max(worst, float(difference.max())), max(mean, float(difference.mean()))
    return {"name": topology.__name__, "sums": sums, "errors": errors}


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for topology in TOPOLOGIES:
        if not wanted or topology.__name__ in wanted:
            print(json.dumps(compare(topology)), flush=True)
