"""What only a GPU can show of training: precision, XLA, replicas with XLA, memory growth, running out of memory."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.hardware import detect
from tfopt.training.memory import out_of_memory_message, tensor_float_32_scope

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 16)).astype("float32")
Y = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 0)


def train(plan, epochs=15):
    keras.utils.set_random_seed(0)
    with plan.scope():
        model = tfopt.models.mlp((16,), 3, units=[64, 64])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    history = model.fit(plan.pipeline((X, Y), training=False), epochs=epochs, shuffle=False, verbose=0).history
    return model, history


def config(**options):
    return tfopt.TrainingConfig(**{"strategy": "none", "global_batch_size": 64, **options})


def test_the_precision_chosen_for_the_gpu_trains():
    capability = detect().gpus[0].compute_capability
    expected = "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16" if capability >= (7, 0) else "float32"
    plan = tfopt.plan(config())
    assert plan.precision == expected
    model, history = train(plan)
    assert model.layers[-2].compute_dtype == expected.removeprefix("mixed_")
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert all("GPU" in weight.value.device for weight in model.weights)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_xla_trains_to_the_loss_of_plain_steps(precision):
    losses = [train(tfopt.plan(config(precision=precision, jit_compile=jit)))[1]["loss"] for jit in (False, True)]
    assert losses[1][-1] < 0.7 * losses[1][0]
    np.testing.assert_allclose(*losses, rtol=1e-3 if precision == "float32" else 3e-2)


def test_mirrored_with_xla_trains_the_weights_of_one_device():
    weights = []
    with tensor_float_32_scope(False):
        for strategy in ("none", tf.distribute.MirroredStrategy(["GPU:0"])):
            plan = tfopt.plan(config(strategy=strategy, jit_compile=True, precision="float32"))
            model, history = train(plan)
            assert history["loss"][-1] < 0.7 * history["loss"][0]
            weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_plan_turns_memory_growth_on(fresh_python):
    # In a process of its own, since it can only be set before the GPU is used.
    script = """
import tensorflow as tf, tfopt
gpus = tf.config.list_physical_devices("GPU")
print(any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus))
tfopt.plan(tfopt.TrainingConfig(strategy="none"))
print(all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus))
"""
    done = fresh_python("-c", script, imported="nothing", check=True)
    assert done.stdout.split() == ["False", "True"]


def without_flags():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_xla_of_a_plan_leaves_convolutions_unfused(fresh_python):
    # XLA names the kernels that it was offered for each convolution; a fused one is called BiasActivation.
    script = """
import keras, numpy as np, tensorflow as tf, tfopt
plan = tfopt.plan(tfopt.TrainingConfig(strategy="none", global_batch_size=8))
with plan.scope():
    hidden = [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.Conv2D(8, 3, activation="relu")]
    model = keras.Sequential([keras.Input((16, 16, 3)), *hidden, keras.layers.Flatten(), keras.layers.Dense(4)])
tfopt.compile(model, plan, loss="mse")
model.fit(np.ones((16, 16, 16, 3), "f4"), np.ones((16, 4), "f4"), 8, verbose=0)
text = tf.function(model, jit_compile=True).experimental_get_compiler_ir(tf.ones((8, 16, 16, 3)))("optimized_hlo")
print("cudnn$convForward" in text, "BiasActivation" in text, tfopt.ledger(model).fallback)
"""
    done = fresh_python("-c", script, imported="nothing", check=True, env=without_flags())
    assert done.stdout.splitlines()[-1] == "True False None"


def test_a_plan_after_a_gpu_is_in_use_says_that_the_flags_come_too_late(fresh_python):
    script = """
import os, tensorflow as tf
from tfopt.training.xla import leave_convolutions_unfused
tf.zeros(1) + 1
print(*leave_convolutions_unfused(), "XLA_FLAGS" in os.environ)
"""
    done = fresh_python("-c", script, imported="nothing", check=True, env=without_flags())
    assert done.stdout.startswith("True TensorFlow has started its devices")
    assert done.stdout.split()[-1] == "False"


def test_memory_growth_after_a_gpu_is_in_use_is_reported_and_not_raised(fresh_python):
    script = """
import tensorflow as tf
from tfopt.training.memory import set_memory_growth
tf.zeros(1) + 1
print(*set_memory_growth())
"""
    done = fresh_python("-c", script, imported="nothing", check=True)
    assert done.stdout.startswith("False TensorFlow already started its devices")


def test_out_of_memory_on_a_gpu_names_the_gpu_and_its_memory():
    hardware = detect()
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught, tf.device("GPU:0"):
        tf.random.uniform((2**22, 2**20))
    message = out_of_memory_message(caught.value, tfopt.TrainingConfig(), "float32", 1, hardware)
    assert "a float32 tensor of shape [4194304,1048576], 16.0 TiB" in message
    assert f"GPU 0, {hardware.gpus[0].name}: {hardware.gpus[0].memory_bytes / 2**30:.1f} GiB" in message
    assert "accumulate=2: 32 examples at a time" in message
