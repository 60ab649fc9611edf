"""Products in half precision on the frozen graph: the same numbers as NumPy with ml_dtypes, and few conversions."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.compat.tensorflow import uses_onednn
from tfopt.exporting.half.overflow import refuse_overflow
from tfopt.exporting.half.rewrite import compute_in_half
from tfopt.exporting.half.sides import PRODUCTS
from tfopt.graph import FrozenGraph, GraphEditor, fold_constants, freeze
from tfopt.graph.edit import producer

BFLOAT16 = ml_dtypes.bfloat16
ROUNDING = 2.0**-8  # half a step, of 8 bits
SUMS_IN_FLOAT32 = pytest.mark.skipif(
    not uses_onednn(), reason="without oneDNN, TensorFlow cuts products in bfloat16 off, and sums depthwise ones in it"
)


def convolve(x, w, depthwise=False):
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    parts = [
        padded[:, i : i + height, j : j + width] * w[i, j, :, 0]
        if depthwise
        else padded[:, i : i + height, j : j + width] @ w[i, j]
        for i in range(3)
        for j in range(3)
    ]
    return np.sum(parts, axis=0)


def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


EMULATED = {
    "Conv2D": convolve,
    "DepthwiseConv2dNative": lambda x, w: convolve(x, w, depthwise=True),
    "MatMul": np.matmul,
    "BatchMatMulV2": np.matmul,
    **dict.fromkeys(("BiasAdd", "AddV2"), np.add),
    "Mul": np.multiply,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Softmax": softmax,
    "Mean": lambda x, axes: x.mean(axis=tuple(axes)),
    "MaxPool": lambda x: x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max(axis=(2, 4)),
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1], axis=int(parts[-1])),
    "Reshape": lambda x, shape: x.reshape(shape),
    "Transpose": lambda x, order: x.transpose(order),
    "Cast": lambda x: x,
    "Identity": lambda x: x,
}


def random_graph(seed):
    """A frozen graph of seven random ops on an image, with residuals, a pooled tail and a softmax."""
    rng = np.random.default_rng(seed)

    def weights(*shape):
        return tf.constant(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), tf.float32)

    def step(x, earlier):
        channels = x.shape[-1]
        match rng.integers(9):
            case 0:
                return tf.nn.conv2d(x, weights(3, 3, channels, 6), 1, "SAME")
            case 1:
                return tf.nn.depthwise_conv2d(x, 3 * weights(3, 3, channels, 1), (1, 1, 1, 1), "SAME")
            case 2:
                return tf.nn.relu(tf.nn.bias_add(x, weights(channels)))
            case 3:
                return x * tf.sigmoid(x)
            case 4 if earlier is not None and earlier.shape == x.shape:
                return x + earlier
            case 5 if x.shape[1] > 4:
                return tf.nn.max_pool2d(x, 2, 2, "VALID")
            case 6:
                return tf.concat([x, tf.tanh(x)], axis=-1)
            case 7:
                return tf.transpose(x, (0, 2, 1, 3)) * 0.7
            case _:
                rows = tf.reshape(x, (-1, x.shape[1] * x.shape[2], channels))
                return tf.reshape(
                    tf.matmul(tf.nn.softmax(tf.matmul(rows, tf.transpose(rows, (0, 2, 1)))), rows), (-1, *x.shape[1:])
                )

    @tf.function(input_signature=[tf.TensorSpec((2, 8, 8, 3), tf.float32, name="x")], autograph=False)
    def compute(x):
        earlier = None
        for _ in range(7):
            x, earlier = step(x, earlier), x
        pooled = tf.reduce_mean(x, (1, 2))
        return tf.nn.softmax(tf.nn.bias_add(tf.matmul(pooled, weights(pooled.shape[-1], 5)), weights(5)))

    concrete = compute.get_concrete_function()
    spec = tf.TensorSpec((2, 8, 8, 3), tf.float32, name="x")
    output = concrete.outputs[0]
    return FrozenGraph(
        graph_def=concrete.graph.as_graph_def(),
        inputs={"x": spec},
        outputs={"y": (producer(output.name), tf.TensorSpec(output.shape))},
        name=f"random_{seed}",
    )


def emulate(node, inputs):
    """Returns the result of a node in float32 arithmetic, rounded to bfloat16 if the node is a half one."""
    result = np.asarray(EMULATED[node.op](*inputs))
    kind = node.attr["DstT" if node.op == "Cast" else "T"].type
    return result.astype(BFLOAT16).astype(np.float32) if kind == tf.bfloat16.as_datatype_enum else result


@SUMS_IN_FLOAT32
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 50), marks=pytest.mark.slow)])
def test_random_graphs_compute_what_numpy_does_with_one_rounding_per_op(seeds):
    products = 0
    for seed in seeds:
        source = random_graph(seed)
        graph, report = compute_in_half(source, "bfloat16")
        products += len(report.changed)
        x = np.random.default_rng(seed).normal(size=(2, 8, 8, 3)).astype(np.float32)
        editor = GraphEditor(graph.graph_def)
        order = [name for name in editor.topological() if editor.nodes[name].op not in ("Placeholder", "Const")]
        found = dict(zip(order, graph.as_function(fetch=order)(x=x), strict=True))
        known = {name: value.numpy().astype(np.float32) for name, value in found.items()} | {"x": x}

        def read(tensor, editor=editor, known=known):
            constant = editor.constant(tensor)
            if constant is None:
                return known[tensor]
            return constant.astype(np.float32) if constant.dtype == BFLOAT16 else constant

        roundings = 0
        for name in order:
            node = editor.nodes[name]
            inputs = [read(tensor) for tensor in node.input]
            expected = emulate(node, inputs)
            half = found[name].dtype == tf.bfloat16
            roundings += half
            scale = np.abs(expected) + (1e-4 if half else 1e-5) * np.abs(expected).max()
            steps = 4 if node.op == "Sigmoid" else 2  # where it is not part of swish, Eigen's kernel rounds in between
            assert np.all(np.abs(known[name] - expected) <= (steps * ROUNDING if half else 1e-4) * scale), node.op
            if node.op in PRODUCTS:
                assert half, name
            if node.op in ("Softmax", "Mean", "Tanh"):
                assert found[name].dtype == tf.float32, name
        if seed % 10 == 0:  # as it is served, with kernels that round once for several ops
            exact, served = source.predict(x)["y"], graph.predict(x)["y"]
            assert served.dtype == np.float32
            assert np.abs(served - exact).max() <= max(1, roundings) * ROUNDING
    assert products > 1.5 * len(seeds)


def residual_network():
    images = keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(images)
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))
    x = layers.MaxPooling2D()(layers.ReLU()(layers.Add()([x, y])))
    x = layers.Dense(12, activation="gelu", bias_initializer="ones")(layers.Flatten()(x))
    x = layers.LayerNormalization()(x)
    return keras.Model(images, layers.Dense(4, activation="softmax")(x))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_only_the_ends_and_the_norm_are_converted(kind):
    graph = fold_constants(freeze(residual_network()))
    half, report = compute_in_half(graph, kind)
    assert len(report.changed) == 4
    assert report.metrics["conversions"] == 4  # the image, around the norm, and before the softmax
    types = {}
    for node in half.graph_def.node:
        types.setdefault(node.op, set()).add(tf.as_dtype(node.attr["T"].type).name if "T" in node.attr else "")
    half_ops = ("Conv2D", "MatMul", "BiasAdd", "Relu", "MaxPool", "Reshape", "Erfc")
    assert all(types[op] == {kind} for op in half_ops)
    assert all(types[op] == {"float32"} for op in ("Mean", "Rsqrt", "SquaredDifference", "Softmax"))
    x = np.random.default_rng(0).random((3, 16, 16, 3), np.float32)
    (exact,), (found,) = graph.predict(x).values(), half.predict(x).values()
    np.testing.assert_allclose(found, exact, atol=0.02)


def test_a_product_whose_weights_exceed_float16_stays_in_float32():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.layers[0].kernel.assign(np.full((4, 3), 1e5))
    _, report = compute_in_half(freeze(model), "float16")
    assert len(report.changed) == 1
    assert [(skip.kind, skip.reason) for skip in report.skipped] == [
        ("MatMul", "its constants exceed the range of float16")
    ]
    assert len(compute_in_half(freeze(model), "bfloat16")[1].changed) == 2


def test_what_no_product_has_rounded_reaches_float32_whole():
    x = keras.Input((4,))
    flipped = keras.ops.flip(x, axis=1)
    model = keras.Model(x, [layers.Dense(3)(x) + layers.Dense(3)(flipped), flipped])
    half, report = compute_in_half(freeze(model), "bfloat16")
    assert len(report.changed) == 2
    values = np.array([[1000.3, 0.1, 3.7, 7e-3]], "float32")
    np.testing.assert_array_equal(half.predict(values)["output_1"], values[:, ::-1])


def test_a_mask_of_large_numbers_is_added_in_float32():
    x, mask = keras.Input((6, 4)), keras.Input((6,))
    scores = keras.ops.matmul(layers.Dense(4)(x), keras.ops.transpose(layers.Dense(4)(x), (0, 2, 1)))
    scores = scores + (1 - keras.ops.cast(mask > 0, "float32"))[:, None] * -1e9
    graph = freeze(keras.Model([x, mask], keras.ops.softmax(scores)))
    half, _ = compute_in_half(graph, "float16")
    given = dict(zip(graph.inputs, (np.random.default_rng(0).normal(size=(2, 6, 4)), np.eye(2, 6)), strict=True))
    refuse_overflow(half, {name: value.astype("float32") for name, value in given.items()})
    np.testing.assert_allclose(*(next(iter(each.predict(given).values())) for each in (graph, half)), atol=0.01)


def test_a_loop_stays_in_float32_and_what_surrounds_it_does_not():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.LSTM(5)(layers.Dense(8)(layers.Embedding(9, 4)(tokens)))
    graph = fold_constants(freeze(keras.Model(tokens, layers.Dense(3)(x))))
    half, report = compute_in_half(graph, "bfloat16")
    assert {change.kind for change in report.changed} == {"MatMul"}
    assert {skip.reason for skip in report.skipped} == {"in a loop or branch, whose body stays in float32"}
    ids = np.arange(12).reshape(2, 6) % 9
    np.testing.assert_allclose(*(next(iter(each.predict(ids).values())) for each in (graph, half)), atol=0.02)
