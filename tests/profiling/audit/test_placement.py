"""The operations without a kernel for GPUs, against the registry read in another way and against a look by hand."""

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels as registry

from tfopt.compat.recurrent import as_on_a_gpu
from tfopt.profiling.audit import placements
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
        return tf.cond(x[0] > 0, lambda: tf.raw_ops.UniqueV2(x=x, axis=[0])[0], lambda: 2 * x)

    return graph_of(branch, tf.TensorSpec((6,), tf.int64))


GRAPHS = {
    each.__name__: each
    for each in (
        *(recurrent_dropout, lstm, words, in_numpy, float64_convolution, suppression, combined_suppression, ragged),
        *(embedding, unique_in_a_branch),
    )
}

# Looked up by hand in TensorFlow 2.21: cuDNN has the LSTM, but not with recurrent dropout, which Keras computes in a
# loop of operations that all have kernels; there is a convolution of float64; NonMaxSuppressionV3 has a kernel and
# CombinedNonMaxSuppression none; Unique has one, and UniqueV2 none.
BY_HAND = {
    "recurrent_dropout": [],
    "lstm": [],
    "words": ["StringLength", "StringLower"],
    "in_numpy": ["PyFunc"],
    "float64_convolution": [],
    "suppression": [],
    "combined_suppression": ["CombinedNonMaxSuppression"],
    "ragged": ["RaggedTensorToTensor"],
    "embedding": [],
    "unique_in_a_branch": ["UniqueV2"],
}


@pytest.fixture(scope="module")
def kernels():
    """The kernels of all operations, as TensorFlow lists them at once."""
    found = {}
    for kernel in registry.get_all_registered_kernels().kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label:
            allowed = {each.name: set(each.allowed_values.list.type) for each in kernel.constraint}
            found.setdefault(kernel.op, []).append(allowed)
    return found


def without_kernel(graph, kernels):
    """Returns the kinds of all nodes of a graph and its functions that no kernel takes: executed or not."""
    graph_def = graph.as_graph_def()
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    return {
        node.op
        for node in nodes
        if node.op not in ("Placeholder", "Const")
        and not any(
            all({node.attr[name].type, *node.attr[name].list.type} - {0} <= types for name, types in each.items())
            for each in kernels.get(node.op, [])
        )
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GRAPHS)
def test_operations_on_the_host_are_those_that_the_registry_has_no_kernel_for(name, kernels):
    graph = GRAPHS[name]()
    found = sorted({each.kind for each in placements(graph).on_host})
    assert found == BY_HAND[name]
    assert found == sorted(without_kernel(graph, kernels))


def test_xla_has_its_own_kernels_and_must_have_them_where_it_must_compile():
    @tf.function(jit_compile=True)
    def island(x):
        return tf.strings.to_hash_bucket_fast(x, 8)

    inside = placements(graph_of(lambda x: island(x), tf.TensorSpec((4,), tf.string)))
    assert [each.kind for each in inside.on_host] == ["StringToHashBucketFast"]
    cudnn = placements(lstm())
    assert {each.kind for each in cudnn.not_in_xla} == {"CudnnRNNV3", "CudnnRNNBackpropV3"}
    assert all(each.places for each in cudnn.not_in_xla)


def test_what_the_host_calls_and_what_nothing_needs_is_not_counted():
    def function(x):
        tf.unique_with_counts(tf.strings.as_string(x))  # nothing reads it
        return 2 * x

    assert placements(graph_of(function, tf.TensorSpec((4,)))).on_host == ()
    assert placements(graph_of(function, tf.TensorSpec((4,)))).operations == 2  # the product, and the result
