"""Products of two tensors: the same values with fewer transposes, whichever way they are written."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tfopt.graph import FrozenGraph, fold_constants

RNG = np.random.default_rng(0)


def graph_of(function, *shapes, dtype=tf.float32):
    specs = [tf.TensorSpec(shape, dtype, name=f"x{index}") for index, shape in enumerate(shapes)]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return FrozenGraph(
        graph_def=concrete.graph.as_graph_def(),
        inputs={each.op.name: tf.TensorSpec(each.shape, each.dtype, each.op.name) for each in concrete.inputs},
        outputs={"y": (concrete.outputs[0].name.removesuffix(":0"), tf.TensorSpec(concrete.outputs[0].shape))},
        name="products",
    )


def values(shape, dtype=np.float32):
    real = RNG.normal(size=[3 if size is None else size for size in shape])
    return (real + 1j * RNG.normal(size=real.shape) if dtype == np.complex64 else real).astype(dtype)


def assert_same(function, *shapes, dtype=tf.float32):
    """Returns how many nodes of each op are left."""
    graph = graph_of(function, *shapes, dtype=dtype)
    folded = fold_constants(graph)
    fed = [values(shape, dtype.as_numpy_dtype) for shape in shapes]
    np.testing.assert_allclose(folded.predict(fed)["y"], graph.predict(fed)["y"], rtol=1e-5, atol=1e-5)
    return Counter(node.op for node in folded.graph_def.node)


@pytest.mark.parametrize(
    ("equation", "left", "right", "transposes"),
    [
        ("abc,acd->abd", (None, 4, 5), (None, 5, 6), 0),
        ("abc,adc->abd", (None, 4, 5), (None, 6, 5), 0),
        ("acb,acd->abd", (None, 5, 4), (None, 5, 6), 0),
        ("abc,acd->adb", (None, 4, 5), (None, 5, 6), 0),
        ("aecd,abcd->acbe", (None, 4, 2, 5), (None, 6, 2, 5), 2),
        ("acbe,aecd->abcd", (None, 2, 6, 4), (None, 4, 2, 5), 2),
        ("bac,acd->abd", (7, None, 5), (None, 5, 6), 1),
    ],
)
def test_an_einsum_becomes_a_product(equation, left, right, transposes):
    counted = assert_same(lambda x, y: tf.einsum(equation, x, y), left, right)
    assert (counted["Einsum"], counted["BatchMatMulV2"], counted["Transpose"]) == (0, 1, transposes)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ab,bc->ac", (None, 4), (4, 5)),  # no axis in common
        ("abc,abc->ab", (None, 4, 5), (None, 4, 5)),  # nothing but sums
        ("abcd,acde->abe", (None, 4, 2, 5), (None, 2, 5, 6)),  # a sum over two axes
        ("abc,acd->ad", (None, 4, 5), (None, 5, 6)),  # an axis summed on its own
        ("...bc,...cd->...bd", (None, 4, 5), (None, 5, 6)),
        ("abc,ade->abd", (None, 4, 5), (None, 6, 5)),
    ],
)
def test_another_einsum_stays(equation, left, right):
    raw = lambda x, y: tf.raw_ops.Einsum(inputs=[x, y], equation=equation)  # noqa: E731
    assert assert_same(raw, left, right)["Einsum"] == 1


@pytest.mark.parametrize("adj_x", [False, True])
@pytest.mark.parametrize("adj_y", [False, True])
@pytest.mark.parametrize("transposed", [(), ("x",), ("y",), ("result",), ("x", "y", "result")])
def test_a_product_takes_in_the_transposes_beside_it(adj_x, adj_y, transposed):
    def function(x, y):
        x = tf.transpose(x, (0, 2, 1)) if "x" in transposed else x
        y = tf.transpose(y, (0, 2, 1)) if "y" in transposed else y
        result = tf.raw_ops.BatchMatMulV2(x=x, y=y, adj_x=adj_x, adj_y=adj_y)
        return tf.transpose(result, (0, 2, 1)) if "result" in transposed else result

    left = (None, 5, 4) if adj_x != ("x" in transposed) else (None, 4, 5)
    right = (None, 6, 5) if adj_y != ("y" in transposed) else (None, 5, 6)
    # What is transposed to the order that it had needs no node.
    counted = assert_same(function, left, right)
    assert (counted["BatchMatMulV2"], counted["Transpose"]) == (1, 0)


def test_what_is_read_elsewhere_too_stays():
    def function(x, y):
        moved = tf.transpose(x, (0, 2, 1))
        product = tf.matmul(moved, y)
        return tf.matmul(product, tf.transpose(product, (0, 2, 1))) + tf.reduce_sum(moved)

    assert assert_same(function, (None, 5, 4), (None, 5, 6))["Transpose"] >= 1


def test_complex_numbers_are_left_alone():
    """What a product transposes of them, it conjugates."""
    counted = assert_same(
        lambda x, y: tf.transpose(tf.matmul(x, y), (0, 2, 1)), (None, 4, 5), (None, 5, 6), dtype=tf.complex64
    )
    assert counted["Transpose"] == 1


@pytest.mark.parametrize("bias", [False, True])
def test_the_scale_of_a_product_goes_into_the_weights_before_it(bias):
    weights, offset = values((5, 8)), values((8,))

    def function(x, y):
        query = tf.reshape(tf.matmul(tf.reshape(x, (-1, 5)), weights), (-1, 4, 8))
        return 0.125 * tf.matmul(query + offset if bias else query, y)

    counted = assert_same(function, (None, 4, 5), (None, 8, 6))
    assert (counted["Mul"], counted["MatMul"], counted["BatchMatMulV2"]) == (0, 1, 1)


def test_the_scale_of_another_product_stays():
    assert assert_same(lambda x, y: 0.125 * tf.matmul(tf.nn.relu(x), y), (None, 4, 5), (None, 5, 6))["Mul"] == 1
