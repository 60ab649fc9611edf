"""The operations without a kernel for GPUs, against the registry read in another way and against a look by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels as registry

from tfopt.compat.recurrent import as_on_a_gpu
from tfopt.profiling.audit import placements, why_not_lowered
from tfopt.profiling.cost.training import train_graph


def graph_of(function, *specs):
    return tf.function(function).get_concrete_function(*specs).graph


def step_graph(layers, inputs, outputs, optimizer="sgd"):
    model = keras.Sequential([keras.Input(inputs.shape[1:], dtype=inputs.dtype.name), *layers])
    model.compile(optimizer, "mse")
    with as_on_a_gpu():
        return train_graph(model, (inputs, outputs))[0]


def recurrent_dropout():
    layers = [keras.layers.LSTM(8, recurrent_dropout=0.2)]
    return step_graph(layers, tf.TensorSpec((4, 5, 3)), tf.TensorSpec((4, 8)))


def lstm():
    return step_graph([keras.layers.LSTM(8)], tf.TensorSpec((4, 5, 3)), tf.TensorSpec((4, 8)))


def words():
    return graph_of(lambda x: tf.strings.length(tf.strings.lower(x)), tf.TensorSpec((4,), tf.string))


def in_numpy():
    def doubled(x):
        return tf.ensure_shape(tf.numpy_function(lambda each: 2 * each, [x], tf.float32), (4,)) + 1

    return graph_of(doubled, tf.TensorSpec((4,)))


def float64_convolution():
    return graph_of(
        lambda x, w: tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME")),
        tf.TensorSpec((1, 8, 8, 3), tf.float64),
        tf.TensorSpec((3, 3, 3, 4), tf.float64),
    )


def suppression():
    return graph_of(
        lambda boxes, scores: tf.gather(boxes, tf.image.non_max_suppression(boxes, scores, 5)),
        tf.TensorSpec((20, 4)),
        tf.TensorSpec((20,)),
    )


def combined_suppression():
    return graph_of(
        lambda boxes, scores: tf.image.combined_non_max_suppression(boxes, scores, 5, 5)[0],
        tf.TensorSpec((1, 20, 1, 4)),
        tf.TensorSpec((1, 20, 3)),
    )


def ragged():
    return graph_of(
        lambda values, splits: tf.RaggedTensor.from_row_splits(values, splits, validate=False).to_tensor(),
        tf.TensorSpec((20,)),
        tf.TensorSpec((5,), tf.int64),
    )


def embedding():
    layers = [keras.layers.Embedding(50, 8), keras.layers.GlobalAveragePooling1D()]
    return step_graph(layers, tf.TensorSpec((4, 6), tf.int32), tf.TensorSpec((4, 8)), "adam")


def unique_in_a_branch():
    def branch(x):
        return tf.cond(x[0] > 0, lambda: tf.unique(x)[0], lambda: 2 * x)

    return graph_of(branch, tf.TensorSpec((6,), tf.int64))


GRAPHS = {
    each.__name__: each
    for each in (
        *(recurrent_dropout, lstm, words, in_numpy, float64_convolution, suppression, combined_suppression, ragged),
        *(embedding, unique_in_a_branch),
    )
}
