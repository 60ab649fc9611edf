"""What depends on a tensor's shape alone does not compute the tensor."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.graph import FrozenGraph, fold_constants, freeze

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(2, 2, 6, 5)).astype("float32")


def folded(function, *shapes):
    """Returns a function's graph before and after folding."""
    specs = [tf.TensorSpec(shape, tf.float32, name=f"x{index}") for index, shape in enumerate(shapes)]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = FrozenGraph(
        graph_def=concrete.graph.as_graph_def(),
        inputs={each.op.name: tf.TensorSpec(each.shape, each.dtype, each.op.name) for each in concrete.inputs},
        outputs={"y": (concrete.outputs[0].name.removesuffix(":0"), tf.TensorSpec(concrete.outputs[0].shape))},
        name="sizes",
    )
    return graph, fold_constants(graph)


def ops(graph):
    return Counter(node.op for node in graph.graph_def.node)


KEEPS = {
    "elementwise": lambda x: tf.nn.relu(x * 2.0) + tf.exp(x),
    "of one step": lambda x: tf.transpose(x, (1, 0, 2))[0] @ tf.ones((6, 4)) + tf.zeros((tf.shape(x)[0], 4)),
    "split": lambda x: tf.split(tf.exp(x), 3, axis=2)[1],
    "gathered": lambda x: tf.gather(tf.constant(RNG.normal(size=(9, 4)), tf.float32), tf.cast(x, tf.int32)),
    "reduced": lambda x: (
        tf.reduce_mean(tf.exp(x), axis=-1, keepdims=True) + tf.expand_dims(tf.reduce_sum(x, axis=2), 2)
    ),
    "squeezed": lambda x: tf.squeeze(tf.expand_dims(tf.exp(x), 1), 1),
    "padded": lambda x: tf.pad(tf.exp(x), [(0, 0), (0, 0), (1, 1)]),
    "joined": lambda x: tf.concat([tf.exp(x), tf.reverse(x, [1])], axis=2),
    "reshaped": lambda x: tf.reshape(tf.exp(x), (tf.shape(x)[0], tf.shape(x)[1], 2, 3)),
    "multiplied": lambda x: tf.matmul(tf.exp(x), x, transpose_b=True),
    "einsum": lambda x: tf.einsum("abc,dc->adb", tf.exp(x), RNG.normal(size=(4, 6)).astype("float32")),
    "convolved": lambda x: tf.nn.conv2d(tf.expand_dims(tf.exp(x), 2), KERNEL, 1, "SAME"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", KEEPS)
def test_a_tensor_of_zeros_is_made_without_the_tensor_it_is_like(case):
    graph, result = folded(lambda x: 1.0 + tf.raw_ops.ZerosLike(x=KEEPS[case](x)), (None, None, 6))
    for batch, length in ((1, 3), (4, 1), (2, 7)):
        x = RNG.uniform(1, 8, (batch, length, 6)).astype("float32")
        np.testing.assert_array_equal(result.predict(x)["y"], graph.predict(x)["y"])
    assert ops(result).keys() <= {"Placeholder", "Const", "Shape", "StridedSlice", "Pack", "Fill", "AddV2", "Identity"}


CHANGES = {
    "broadcast": lambda x, y: x + y,
    "a part": lambda x, y: tf.exp(x)[:, 1:],
    "every other": lambda x, y: tf.exp(x)[:, ::2],
    "padded": lambda x, y: tf.pad(tf.exp(x), [(0, 0), (1, 0), (0, 0)]),
    "joined": lambda x, y: tf.concat([tf.exp(x), x], axis=1),
    "strided": lambda x, y: tf.nn.conv2d(tf.exp(x)[:, :, None], KERNEL, 2, "SAME"),
    "flattened": lambda x, y: tf.reshape(tf.exp(x), (-1, 6)),
    "of what is not zero": lambda x, y: tf.where(x[:, :, 0] > 4.0),
}


@pytest.mark.parametrize("case", CHANGES)
def test_sizes_that_do_not_follow_are_read_where_they_are(case):
    graph, result = folded(lambda x, y: 1 + tf.raw_ops.ZerosLike(x=CHANGES[case](x, y)), *[(None, None, 6)] * 2)
    for one, other in ((3, 1), (1, 3), (4, 4)):
        x, y = (RNG.uniform(1, 8, (2, length, 6)).astype("float32") for length in (one, other))
        np.testing.assert_array_equal(result.predict([x, y])["y"], graph.predict([x, y])["y"])


CELLS = (layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell)


def test_recurrent_layers_with_a_mask_compute_their_cells_in_the_loop_alone():
    """For the shape of the result, Keras computes a step before the loop. Cells of one's own keep Keras' loop."""
    lstm, gru, simple = (type(kind.__name__, (kind,), {}) for kind in CELLS)
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 8, mask_zero=True)(ids)
    directions = (layers.RNN(lstm(6), return_sequences=True, go_backwards=backwards)(x) for backwards in (False, True))
    x = layers.Add()(list(directions))
    x = layers.RNN(gru(5), return_sequences=True)(x)
    model = keras.Model(ids, layers.Dense(3)(layers.RNN(simple(4))(x)))
    graph = freeze(model)
    assert ops(graph)["MatMul"] == ops(graph)["BiasAdd"] == 1
    assert ops(graph)["StatelessWhile"] == 4
    tokens = RNG.integers(1, 50, (5, 9)).astype("int32")
    tokens[:, 6:] = 0
    tokens[0, 2:] = 0
    for fed in (tokens, tokens[:2, :4]):
        np.testing.assert_allclose(graph.predict(fed)["output_0"], model(fed).numpy(), rtol=1e-5, atol=1e-6)
