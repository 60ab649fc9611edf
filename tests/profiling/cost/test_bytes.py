"""The bytes that kernels move, against arithmetic: unfused, and fused as XLA would."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfopt.profiling.cost.bytes import kernels, moved_bytes

N = 4 * 1000  # bytes of a vector of 1000 values


def moved(function, *shapes, fused=False):
    graph = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph
    return moved_bytes(kernels(graph, fused=fused))


def count(function, *shapes, fused=False):
    graph = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph
    return len(kernels(graph, fused=fused))


def test_a_product_reads_two_matrices_and_writes_one():
    for fused in (False, True):
        assert moved(tf.matmul, (10, 20), (20, 30), fused=fused) == 4 * (10 * 20 + 20 * 30 + 10 * 30)


def test_a_chain_reads_its_inputs_once_and_writes_its_end():
    def chain(x, y):
        return tf.exp(tf.nn.relu(x + y)) * y

    assert moved(chain, (1000,), (1000,)) == (3 + 2 + 2 + 3) * N
    assert moved(chain, (1000,), (1000,), fused=True) == 3 * N
    assert count(chain, (1000,), (1000,), fused=True) == 1


def test_what_another_kernel_reads_leaves_the_fusion():
    def chain(x):
        kept = tf.nn.relu(x * 2.0)
        return tf.exp(kept) + 1.0, kept

    # It reads x and the constants 2 and 1, and writes both results.
    assert moved(chain, (1000,), fused=True) == 3 * N + 8


def test_a_reduction_ends_a_chain_and_its_readers_are_another_kernel():
    def normalized(x):
        return x * 2.0 / tf.reduce_sum(tf.exp(x * 2.0))

    # exp and sum in one kernel: x in, one value out. The division reads x and that value, and writes its result.
    assert count(normalized, (1000,), fused=True) == 2
    assert moved(normalized, (1000,), fused=True) == pytest.approx(3 * N, abs=60)


def test_no_fusion_reaches_around_a_product():
    def residual(x):
        first = tf.nn.relu(x + 1.0)
        return tf.nn.relu(first + first @ first)

    size = 4 * 100 * 100
    # relu: in, out; product: twice in, out; sum and relu: twice in, out.
    assert moved(residual, (100, 100), fused=True) == (2 + 3 + 3) * size + 4
    assert count(residual, (100, 100), fused=True) == 3


def test_views_move_nothing_and_parts_only_themselves():
    assert moved(lambda x: tf.reshape(x, (10, 100)), (1000,)) == 0
    table = 4 * 16
    looked_up = tf.function(lambda rows, places: tf.gather(rows, places))
    graph = looked_up.get_concrete_function(tf.TensorSpec((10_000, 16)), tf.TensorSpec((8,), tf.int32)).graph
    assert moved_bytes(kernels(graph, fused=False)) == 2 * 8 * table


def test_a_loop_moves_the_bytes_of_each_round():
    def rounds(x):
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x @ x), (0, x), maximum_iterations=5)[1]

    assert moved(rounds, (100, 100)) == 5 * 3 * 4 * 100 * 100


def test_an_update_reads_and_writes_its_variable():
    weights = tf.Variable(tf.zeros(1000))

    @tf.function
    def update(x):
        weights.assign_sub(x, read_value=False)

    graph = update.get_concrete_function(tf.TensorSpec((1000,))).graph
    assert moved_bytes(kernels(graph, fused=False)) == moved_bytes(kernels(graph, fused=True)) == 3 * N


def test_half_precision_halves_the_bytes_of_activations():
    def bytes_of(policy):
        inputs = keras.Input((32, 32, 8), dtype="float32")
        x = inputs
        for _ in range(3):
            x = layers.Conv2D(8, 3, padding="same", activation="relu", dtype=policy)(x)
        model = keras.Model(inputs, x)
        step = tf.function(lambda x: model(x, training=True))
        return moved_bytes(kernels(step.get_concrete_function(tf.TensorSpec((16, 32, 32, 8))).graph, fused=False))

    assert 0.45 < bytes_of("mixed_bfloat16") / bytes_of("float32") < 0.7


def test_xla_fuses_the_chain_that_the_estimate_fuses():
    """The compiled program of XLA has as many fusions as the estimate."""

    @tf.function(jit_compile=True)
    def chain(x, y):
        return tf.exp(tf.nn.relu(x + y) * 2.0) * y + x

    x = tf.ones(100_000)
    text = chain.experimental_get_compiler_ir(x, x)(stage="optimized_hlo")
    fusions = text.split("ENTRY")[1].count(" fusion(")
    specs = tf.TensorSpec((100_000,)), tf.TensorSpec((100_000,))
    found = kernels(chain.get_concrete_function(*specs).graph, fused=True)
    assert len(found) == fusions == 1
