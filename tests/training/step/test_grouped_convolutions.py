"""tfopt's step computes grouped convolutions and their gradients without XLA, and equal to Keras'."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.backend.tensorflow import nn

import tfopt
from tfopt.compat import convolutions
from tfopt.compat.convolutions import plain_convolutions
from tfopt.training.compile import put_step
from tfopt.training.plan import plan

GENERATOR = np.random.default_rng(0)


@pytest.fixture(params=["one kernel", "no grouped gradient"])
def _kernels(request, monkeypatch):
    """With the gradients of this machine, and as without oneDNN."""
    if request.param == "no grouped gradient":
        monkeypatch.setattr(convolutions, "_has_grouped_gradient", lambda dtype: False)


def drawn(seed):
    """A random grouped layer, and its input."""
    draw = np.random.default_rng(seed)
    rank = int(draw.choice([1, 2, 2, 3]))
    first = bool(draw.integers(4) == 0)
    groups, depth = int(draw.choice([2, 3, 4])), int(draw.choice([1, 1, 2]))
    strided = draw.integers(2)
    layer = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}[rank](
        groups * int(draw.choice([1, 2])),
        [int(each) for each in draw.integers(1, 4, rank)],
        strides=[int(each) for each in draw.integers(1, 4, rank)] if strided else 1,
        dilation_rate=1 if strided else int(draw.integers(1, 3)),
        padding=str(draw.choice(["valid", "same"])),
        data_format="channels_first" if first else "channels_last",
        groups=groups,
    )
    size, channels = draw.integers(6, 9, rank).tolist(), groups * depth
    x = draw.normal(size=(2, channels, *size) if first else (2, *size, channels)).astype("float32")
    layer.build(x.shape)
    return layer, x


def computed(layer, x):
    """The layer's result, and the gradients of the sum of its squares for the kernel and for the input."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(y * y)
    return y, *tape.gradient(loss, [layer.kernel.value, x])


def by_one_convolution(layer, x):
    """What the layer computes, by a convolution of all channels whose kernel is zero between the groups."""
    groups, kernel = layer.groups, layer.kernel.value
    rank, depth, filters = layer.rank, kernel.shape[-2], kernel.shape[-1] // layer.groups
    with tf.GradientTape() as tape:
        tape.watch(x)
        blocks = [
            tf.pad(part, [[0, 0]] * rank + [[index * depth, (groups - 1 - index) * depth], [0, 0]])
            for index, part in enumerate(tf.split(kernel, groups, -1))
        ]
        image = tf.transpose(x, [0, *range(2, rank + 2), 1]) if layer.data_format == "channels_first" else x
        whole = tf.concat(blocks, -1)
        assert whole.shape[-1] == groups * filters
        y = (
            tf.nn.convolution(
                image,
                whole,
                layer.strides,
                layer.padding.upper(),
                data_format=convolutions.LAST[rank + 2],
                dilations=layer.dilation_rate,
            )
            + layer.bias
        )
        if layer.data_format == "channels_first":
            y = tf.transpose(y, [0, rank + 1, *range(1, rank + 1)])
        loss = tf.reduce_sum(y * y)
    return y, *tape.gradient(loss, [kernel, x])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_eighty_random_layers_and_their_gradients(part):
    for seed in range(20 * part, 20 * part + 20):
        layer, x = drawn(seed)
        x = tf.constant(x)
        with plain_convolutions(gradients=True):
            found = computed(layer, x)
        assert_equal(found, by_one_convolution(layer, x))


def assert_equal(found, expected):
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("groups", "strides"), [(2, 1), (4, 2)])
def test_gradients_equal_those_in_numpy_and_those_of_xla(groups, strides):
    layer, x = layers.Conv2D(8, 3, strides=strides, groups=groups, use_bias=False), tf.random.normal((2, 6, 7, 4))
    layer.build(x.shape)
    with plain_convolutions(gradients=True):
        found = computed(layer, x)
    assert_equal(found, computed(layer, x))
    assert_equal(found, in_numpy(np.float64(x), np.float64(layer.kernel), groups, strides))


def in_numpy(x, kernel, groups, strides):
    """A VALID convolution of 3x3 and the gradients of the sum of its squares, by loops over its definition."""
    depth, filters = kernel.shape[2], kernel.shape[3] // groups
    rows, columns = ((size - 3) // strides + 1 for size in x.shape[1:3])
    y = np.zeros((len(x), rows, columns, kernel.shape[3]))
    of_kernel, of_x = np.zeros_like(kernel), np.zeros_like(x)
    for backwards, group, row, column in itertools.product(range(2), range(groups), range(rows), range(columns)):
        down, across = (slice(strides * place, strides * place + 3) for place in (row, column))
        taken, given = slice(group * depth, (group + 1) * depth), slice(group * filters, (group + 1) * filters)
        window, weights = x[:, down, across, taken], kernel[..., given]
        if not backwards:
            y[:, row, column, given] = np.einsum("nhwc,hwcf->nf", window, weights)
            continue
        of_y = 2 * y[:, row, column, given]
        of_kernel[..., given] += np.einsum("nhwc,nf->hwcf", window, of_y)
        of_x[:, down, across, taken] += np.einsum("nf,hwcf->nhwc", of_y, weights)
    return y, of_kernel, of_x


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype):
    layer, x = layers.Conv2D(8, 3, groups=2, dtype=dtype), tf.random.normal((2, 6, 7, 4), dtype=dtype)
    layer.build(x.shape)
    with plain_convolutions(gradients=True):
        found = computed(layer, x)
    for value, wanted in zip(found, by_one_convolution(layer, x), strict=True):
        wanted = np.asarray(wanted, "float64")
        tolerance = {"float64": 1e-9, "float16": 1e-2, "bfloat16": 5e-2}[dtype] * np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(value, "float64"), wanted, rtol=0, atol=tolerance)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy, groups):
    layer, x = layers.Conv2D(8, 3, groups=groups, dtype=policy), tf.random.normal((2, 6, 7, 4))
    layer.build(x.shape)
    with plain_convolutions(gradients=True):
        found = computed(layer, x)
    for value, wanted in zip(found, computed(layer, x), strict=True):
        wanted = np.asarray(wanted, "float32")
        np.testing.assert_allclose(np.asarray(value, "float32"), wanted, rtol=0, atol=0.03 * np.abs(wanted).max())


def block(x, convolution, inner):
    y = convolution(x)
    y = layers.Conv2D(inner, 1, activation="gelu")(layers.LayerNormalization()(y))
    return layers.Add()([x, layers.Conv2D(x.shape[-1], 1)(y)])


def small(kind):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 2, 2)(inputs)
    if kind == "ConvNeXt":
        x = block(x, layers.Conv2D(8, 7, padding="same", groups=8), 16)
    else:
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", groups=4)(x)))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(8, 1)(y))])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


DATA = GENERATOR.normal(size=(24, 12, 12, 3)).astype("float32"), GENERATOR.integers(0, 3, 24)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CONFIG = tfopt.TrainingConfig(precision="float32", jit_compile=False)


@functools.cache
def with_keras(kind):
    model = small(kind)
    model.compile(keras.optimizers.SGD(0.05), LOSS)
    losses = model.fit(*DATA, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, model.evaluate(*DATA, batch_size=8, verbose=0), model.predict(DATA[0], verbose=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("ConvNeXt", "compile"),
        ("ResNeXt", "put_step"),
        pytest.param("ConvNeXt", "put_step", marks=pytest.mark.slow),
        pytest.param("ResNeXt", "compile", marks=pytest.mark.slow),
    ],
)
def test_a_network_trains_as_with_keras(kind, way):
    model, optimizer = small(kind), keras.optimizers.SGD(0.05)
    if way == "compile":
        tfopt.compile(model, plan(CONFIG), optimizer=optimizer, loss=LOSS)
    else:  # as under accelerate
        model.compile(optimizer, LOSS)
        put_step(model, plan(CONFIG))
    losses = model.fit(*DATA, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    expected, evaluated, predicted = with_keras(kind)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(*DATA, batch_size=8, verbose=0), evaluated, rtol=1e-5)
    np.testing.assert_allclose(model.predict(DATA[0], verbose=0), predicted, atol=1e-5)
    assert not isinstance(nn.conv, functools.partial)


class Watching(layers.Layer):
    """Notes at each trace of its call whether Keras' convolution is replaced."""

    def __init__(self):
        super().__init__()
        self.found = []

    def call(self, x):
        self.found.append(isinstance(nn.conv, functools.partial))
        return x


@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_is_traced_for_fit_evaluate_and_predict_is_without_islands_unless_xla_compiles_all(jit_compile):
    watching = Watching()
    model = keras.Sequential([keras.Input((2,)), watching, layers.Dense(1)])
    config = tfopt.TrainingConfig(precision="float32", jit_compile=jit_compile)
    tfopt.compile(model, plan(config), optimizer="sgd", loss="mse")
    x, y = np.zeros((4, 2)), np.zeros((4, 1))
    for run in (lambda: model.fit(x, y, verbose=0), lambda: model.evaluate(x, y, verbose=0)):
        watching.found.clear()
        run()
        assert watching.found[-1] is not jit_compile
    watching.found.clear()
    model.predict(x, verbose=0)
    assert set(watching.found) == {not jit_compile}
    watching.found.clear()
    model(x)
    assert watching.found == [False]


def test_keras_convolution_is_back_after_an_error():
    with pytest.raises(ZeroDivisionError), plain_convolutions(gradients=True):
        1 / 0  # noqa: B018
    assert not isinstance(nn.conv, functools.partial)
