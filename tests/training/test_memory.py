"""Settings for GPU memory and TensorFloat-32, rematerialisation in Keras, and the advice when memory runs out."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError
from tfopt.hardware import Gpu, Hardware, detect
from tfopt.training.config import REMAT_MODES, TrainingConfig
from tfopt.training.memory import (
    out_of_memory_message,
    remat_scope,
    set_memory_growth,
    tensor_float_32,
    tensor_float_32_scope,
)

GIB = 2**30


def machine(*capabilities, memory=16 * GIB):
    gpus = tuple(
        Gpu(name=f"GPU {number}", compute_capability=value, memory_bytes=memory)
        for number, value in enumerate(capabilities)
    )
    return Hardware(logical_cores=2, memory_bytes=8 * GIB, tensorflow_version="2.21.0", gpus=gpus)


def test_memory_growth_without_a_gpu_is_unknown():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU; tests/gpu looks at it")
    assert set_memory_growth() == (None, "no GPU")


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (machine(), "no effect: no GPU"),
        (machine((7, 5)), "no effect: needs compute capability 8.0"),
        (machine(None), "no effect: compute capability unknown"),
        (machine((7, 5), (8, 0)), "TensorFlow's default; float32 products on GPU 1 keep 10 bits of mantissa"),
    ],
)
def test_tensor_float_32_is_stated_with_its_effect(hardware, reason):
    assert tensor_float_32(hardware) == (True, reason)


def test_the_tensor_float_32_scope_puts_back_what_was_set():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    with tensor_float_32_scope(False):
        assert not enabled()
        assert tensor_float_32(machine((9, 0)))[0] is False
        with tensor_float_32_scope(True):
            assert enabled()
        assert not enabled()
    assert enabled()
    with pytest.raises(ZeroDivisionError), tensor_float_32_scope(False):
        _ = 1 / 0
    assert enabled()


def dense():
    return [layers.Dense(16, activation="gelu"), layers.Dropout(0.5, seed=1), layers.Dense(16, activation="relu")], (6,)


def convolutional():
    return [
        layers.Conv2D(4, 3, activation="swish"), layers.BatchNormalization(), layers.Activation("relu"),
        layers.Conv2D(4, 3, activation="gelu"), layers.Flatten(),
    ], (8, 8, 3)  # fmt: skip


class SelfAttention(keras.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, inputs):
        return self.attention(inputs, inputs)


def attention():
    return [SelfAttention(), layers.Dense(8, activation="gelu"), layers.LayerNormalization(), layers.Flatten()], (4, 8)


def train(make, scope, *, jit_compile=False, strategy=None, policy="float32"):
    """Returns the weights after four steps."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            with scope:
                middle, shape = make()
                model = keras.Sequential([keras.Input(shape), *middle, layers.Dense(3, dtype="float32")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
    finally:
        keras.config.set_dtype_policy(before)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, *shape)).astype("float32"), rng.integers(0, 3, 16)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    initial = model.get_weights()
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert any(not np.array_equal(one, other) for one, other in zip(initial, model.get_weights(), strict=True))
    return model.get_weights()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", REMAT_MODES)
@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("plain", dense),
        ("plain", convolutional),
        ("plain", attention),
        pytest.param("jit_compile", attention, marks=pytest.mark.slow),
        pytest.param("two_replicas", attention, marks=pytest.mark.slow),
        pytest.param("mixed_float16", convolutional, marks=pytest.mark.slow),
    ],
)
def test_a_mode_offered_trains_the_same_weights(mode, make, setting, two_replicas):
    options = {
        "plain": {},
        "jit_compile": {"jit_compile": True},
        "two_replicas": {"strategy": two_replicas},
        "mixed_float16": {"policy": "mixed_float16"},
    }[setting]
    without = train(make, contextlib.nullcontext(), **options)
    for one, other in zip(without, train(make, remat_scope(mode), **options), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def recomputations(scope):
    """Returns the number of Erf operations in a gradient step of one gelu layer."""
    with scope:
        layer = layers.Dense(4, activation="gelu")
    layer.build((None, 4))

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer(x))
        return tape.gradient(y, layer.kernel.value)

    graph = gradient.get_concrete_function(tf.TensorSpec((2, 4))).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return sum(node.op in ("Erf", "Erfc") for node in nodes)


def test_the_mode_offered_does_compute_the_activation_again():
    plain = recomputations(remat_scope(None))
    assert plain == recomputations(contextlib.nullcontext()) >= 1
    assert recomputations(remat_scope("activations")) > plain


@pytest.mark.parametrize("mode", ["full", "larger_than", "list_of_layers"])
def test_a_mode_refused_is_one_that_fails_in_fit(mode):
    with pytest.raises(ConfigError, match=f"remat='{mode}'"), remat_scope(mode):
        pass
    options = {"larger_than": {"output_size_threshold": 1}, "list_of_layers": {"layer_names": ["named"]}}
    model = lambda: ([layers.Dense(16, name="named")], (6,))  # noqa: E731
    with pytest.raises(ValueError, match="eager execution"):
        train(model, keras.RematScope(mode=mode, **options.get(mode, {})))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'activations'"), remat_scope("activation"):
        pass


EXHAUSTED = (
    "OOM when allocating tensor with shape[4194304,4194304] and type float on "
    "/job:localhost/replica:0/task:0/device:CPU:0"
)


@pytest.fixture
def exhausted():
    """Returns an error in TensorFlow's words, since TensorFlow itself tries for ten seconds."""
    return tf.errors.ResourceExhaustedError(None, None, EXHAUSTED)


def advice(error, *, precision="float32", replicas=1, hardware=None, **options):
    config = TrainingConfig(**options)
    return out_of_memory_message(error, config, precision, replicas, hardware or machine()).splitlines()


@pytest.mark.slow
def test_a_real_error_is_read():
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught, tf.device("CPU:0"):
        tf.zeros((2**22, 2**22))
    assert EXHAUSTED in str(caught.value)  # as the other tests have it
    lines = advice(caught.value, hardware=detect())
    assert lines[0].startswith(
        "Out of memory: a float32 tensor of shape [4194304,4194304], 64.0 TiB, could not be allocated (machine: "
    )
    assert "with 64 examples on each replica at a time" in lines[0]


@pytest.mark.slow
def test_a_real_error_in_fit_names_the_node():
    wide = [layers.RepeatVector(2**22, name="wide"), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *wide])
    model.compile("sgd", "mse")
    examples = 2**20
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        model.fit(np.zeros((examples, 4)), np.zeros((examples, 1)), batch_size=examples, verbose=0)
    line = advice(caught.value)[0]
    assert "shape [1048576,1,4194304,4], 64.0 TiB, at sequential" in line
    assert "wide" in line


@pytest.mark.slow
def test_a_real_error_of_xla_is_read():
    @tf.function(jit_compile=True)
    def product(x):
        return tf.matmul(tf.transpose(x), x)

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        product(tf.ones((1, 2**23)))
    assert advice(caught.value)[0].startswith("Out of memory: 256.0 TiB could not be allocated (machine: 8.0 GiB)")


def test_what_to_lower_comes_in_order_with_the_numbers(exhausted):
    lines = advice(exhausted, hardware=machine((8, 0)), global_batch_size=256, replicas=2, accumulate=2)
    assert "with 64 examples on each replica" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[2:]] == [
        "accumulate=4", "remat='activations'", "precision='mixed_bfloat16'", "global_batch_size=128",
    ]  # fmt: skip
    assert "32 examples at a time" in lines[2]


@pytest.mark.parametrize(("accumulate", "next_power"), [(1, 2), (2, 4), (3, 4), (4, 8), (5, 8)])
def test_accumulation_goes_to_the_next_power_of_two(accumulate, next_power, exhausted):
    assert advice(exhausted, accumulate=accumulate)[2].strip().startswith(f"accumulate={next_power}:")


def test_what_is_used_up_is_not_advised(exhausted):
    hardware = machine((7, 5))
    used = advice(exhausted, hardware=hardware, remat="activations", precision="mixed_float16", global_batch_size=4)
    assert [line.split("=")[0].strip() for line in used[2:]] == ["accumulate", "global_batch_size"]
    nothing_left = advice(exhausted, remat="activations", global_batch_size=1)
    assert len(nothing_left) == 3
    assert "pipeline" in nothing_left[2]
    # Half precision slows a CPU down, so it is not advised there.
    assert not any("precision" in line for line in advice(exhausted)[2:])
