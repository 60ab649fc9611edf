"""Products with constant matrices in one form: the same values, fewer nodes, no arithmetic on shapes."""

from collections import Counter

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.graph import freeze

RNG = np.random.default_rng(0)


def model_of(build, shape):
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, build(inputs))
    for variable in model.variables:  # so that biases count
        values = RNG.normal(size=variable.shape) * 0.3
        variable.assign(np.abs(values) + 0.1 if "variance" in variable.path else values)
    return model


def ops(graph):
    return Counter(node.op for node in graph.graph_def.node)


def assert_same(graph, model, x):
    expected = keras.tree.map_structure(np.asarray, keras.tree.flatten(model(x)))
    for one, other in zip(graph.predict(x).values(), expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(np.abs(other).max(), 1))


def block(x):
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(normal, normal)])
    hidden = layers.Dense(24, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(8)(hidden)])


def einsum(equation, shape, axes, activation=None):
    return lambda x: layers.EinsumDense(equation, shape, bias_axes=axes, activation=activation)(x)


CASES = {
    "block": (lambda x: block(block(x)), (6, 8), 12),
    "dense": (lambda x: layers.Dense(5, activation="relu")(layers.Dense(7, activation="tanh")(x)), (6, 8), 2),
    "rank 4": (lambda x: layers.Dense(5)(layers.Dense(7)(x)), (3, 4, 8), 2),
    "without a bias": (lambda x: layers.Dense(5, use_bias=False)(x), (6, 8), 1),
    "einsum": (einsum("abc,cd->abd", (None, 5), "d", "relu"), (6, 8), 1),
    "einsum, heads": (einsum("abc,cde->abde", (None, 2, 5), "de", "relu"), (6, 8), 1),
    "einsum, one bias for all heads": (einsum("abc,cde->abde", (None, 2, 5), "e"), (6, 8), 1),
    "einsum, a bias for each head": (einsum("abc,cde->abde", (None, 2, 5), "d"), (6, 8), 1),
    "einsum, a bias for each position": (einsum("abc,cd->abd", (6, 5), "bd"), (6, 8), 1),
    "einsum, heads joined": (einsum("abde,dec->abc", (None, 5), "c"), (6, 2, 4), 1),
    "scaled": (lambda x: layers.Rescaling(0.5, offset=1.0)(layers.Dense(5)(x)), (6, 8), 1),
    "reshaped": (lambda x: layers.ReLU()(layers.Reshape((2, 3))(layers.Dense(6)(x))), (8,), 1),
    "block, any length": (lambda x: block(x), (None, 8), 6),
    "einsum, heads, any length": (einsum("abc,cde->abde", (None, 2, 5), "de", "relu"), (None, 8), 1),
    "einsum, heads joined, any length": (einsum("abde,dec->abc", (None, 5), "c"), (None, 2, 4), 1),
    "einsum, two axes open": (einsum("abcd,de->abce", (None, None, 5), "e", "gelu"), (None, None, 8), 1),
    "einsum, weights first": (lambda x: keras.ops.einsum("cd,abc->abd", np.eye(8, 5, dtype="f"), x), (None, 8), 1),
    "rank 4, any size": (lambda x: layers.Dense(5)(layers.Dense(7, activation="gelu")(x)), (None, None, 8), 2),
    "any length": (lambda x: layers.Dense(5, activation="relu")(layers.Dense(7)(x)), (None, 8), 2),
    "normalized": (lambda x: layers.BatchNormalization()(layers.Dense(5)(x)), (6, 8), 1),
}


# Each has one of open size like it, or one of a single product.
IN_DEPTH = ("block", "dense", "rank 4", "einsum, heads", "einsum, heads joined", "einsum, one bias for all heads")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in IN_DEPTH else case for case in CASES]
)
def test_the_graph_computes_what_keras_computes(case):
    build, shape, products = CASES[case]
    model = model_of(build, shape)
    graph = freeze(model)
    for batch in (1, 3):
        assert_same(graph, model, RNG.normal(size=(batch, *(size or 9 for size in shape))).astype("float32"))
    counted = ops(graph)
    assert counted["MatMul"] == products
    # Each attention has two products of tensors, and moves the heads of its queries, keys, values and result.
    attentions = {"block": 2, "block, any length": 1}.get(case, 0)
    assert (counted["BatchMatMulV2"], counted["Transpose"], counted["Einsum"]) == (2 * attentions, 4 * attentions, 0)
    if None not in shape:
        assert not counted.keys() & {"GatherV2", "Prod", "Pack"}


@pytest.mark.parametrize(
    ("equation", "shape", "weights"),
    [
        ("abc,bd->adc", (6, None), (6, 5)),
        ("abc,bd->acd", (6, None), (6, 5)),
        ("abcd,bde->ace", (6, None, 3), (6, 3, 5)),
    ],
)
def test_an_einsum_over_another_axis_than_the_last_is_a_product_too(equation, shape, weights):
    held = RNG.normal(size=weights).astype("float32")
    model = model_of(lambda x: keras.ops.einsum(equation, x, held), shape)
    graph = freeze(model)
    assert_same(graph, model, RNG.normal(size=(3, *(size or 9 for size in shape))).astype("float32"))
    assert (ops(graph)["MatMul"], ops(graph)["Einsum"]) == (1, 0)


@pytest.mark.parametrize("equation", ["abcd,cde->abce", "abc,cd->ad", "abc,de->abde"])
def test_an_einsum_that_is_no_single_product_stays(equation):
    sizes = {"c": 4, "d": 3 if equation == "abcd,cde->abce" else 4, "e": 5}
    before, weights = equation.split("->")[0].split(",")
    shape = tuple(sizes.get(label) for label in before[1:])
    held = RNG.normal(size=[sizes[label] for label in weights]).astype("float32")
    model = model_of(lambda x: keras.ops.einsum(equation, x, held), shape)
    graph = freeze(model)
    assert_same(graph, model, RNG.normal(size=(3, *(size or 9 for size in shape))).astype("float32"))
    assert ops(graph)["MatMul"] == 0


def test_the_batch_norm_behind_a_product_of_rank_three_is_folded():
    model = model_of(CASES["normalized"][0], (6, 8))
    assert ops(freeze(model)).keys() <= {"Placeholder", "Const", "Reshape", "MatMul", "BiasAdd", "Identity"}


def test_two_products_that_are_broadcast_against_each_other_stay_apart():
    one, other = keras.Input((6, 8)), keras.Input((6, 8))
    model = keras.Model([one, other], layers.Multiply()([layers.Dense(5)(one), layers.Dense(5)(other)]))
    a, b = RNG.normal(size=(1, 6, 8)).astype("float32"), RNG.normal(size=(3, 6, 8)).astype("float32")
    found = freeze(model).predict([a, b])["output_0"]
    np.testing.assert_allclose(found, model([a, b]).numpy(), rtol=1e-5, atol=1e-6)
    assert found.shape == (3, 6, 5)


def test_values_that_leave_the_graph_in_between_are_kept():
    inputs = keras.Input((6, 8))
    product = layers.Dense(5)(inputs)
    model = keras.Model(inputs, [product, layers.ReLU()(product), keras.ops.reshape(product, (-1, 30))])
    assert_same(freeze(model), model, RNG.normal(size=(3, 6, 8)).astype("float32"))


def test_a_product_of_two_computed_tensors_is_left_alone():
    inputs = keras.Input((6, 8))
    model = keras.Model(inputs, layers.Dot(axes=(2, 2))([inputs, layers.Dense(8)(inputs)]))
    graph = freeze(model)
    assert_same(graph, model, RNG.normal(size=(3, 6, 8)).astype("float32"))
    assert ops(graph)["MatMul"] == 1
