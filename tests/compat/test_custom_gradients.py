"""The memory of a trained model is freed: TensorFlow's registry of gradients keeps no graph of it."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import tfopt
from tfopt.compat.tensorflow import custom_gradients_forgotten
from tfopt.profiling.cost import training_memory
from tfopt.profiling.cost.training import train_graph

X, Y = np.random.default_rng(0).random((8, 6, 3)).astype("float32"), np.arange(8) % 2


def model():
    layers = [keras.layers.Dense(4, "silu"), keras.layers.LSTM(4), keras.layers.Dense(2)]  # silu has a custom gradient
    return keras.Sequential([keras.Input((6, 3)), *layers])


def registered():
    return {name for name in ops.gradient_registry._registry if name.startswith("CustomGradient-")}


def handles(trained):
    """Returns weak references to what holds the memory of the optimizer's variables, on each replica."""
    variables = [each.value for each in trained.optimizer.variables]
    found = [each.handle for variable in variables for each in getattr(variable, "values", (variable,))]
    assert len(found) >= 6
    return [weakref.ref(each) for each in found]


STEPS = {
    "a step": {},
    "accumulated": {"accumulate": 2},
    "several in a call": {"steps_per_execution": 2},
    "XLA": {"jit_compile": True},
    "replicas": {"strategy": "mirrored"},
    "replicas, accumulated, XLA": {"strategy": "mirrored", "accumulate": 2, "jit_compile": True},
}


COMPILED = [kind for kind in STEPS if "XLA" in kind]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in COMPILED else kind for kind in STEPS]
)
def test_a_fit_leaves_no_variable(kind, two_replicas):
    settings = {"precision": "float32", "strategy": "none", "jit_compile": False, **STEPS[kind]}
    plan = tfopt.plan(tfopt.TrainingConfig(**settings))
    with plan.scope():
        trained = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(trained, plan, optimizer="adam", loss=loss, metrics=["accuracy"])
    trained.fit(X, Y, batch_size=4, validation_data=(X, Y), verbose=0)
    kept = handles(trained)
    del trained, plan
    gc.collect()
    assert not [each for each in kept if each() is not None]


@pytest.mark.slow
def test_what_is_only_traced_leaves_none():
    traced = model()
    traced.compile("adam", "mse")
    train_graph(traced, (tf.TensorSpec((4, 6, 3)), tf.TensorSpec((4, 2))))
    training_memory(traced, 4)
    kept = handles(traced)
    del traced
    gc.collect()
    assert not [each for each in kept if each() is not None]


def test_functions_that_are_called_keep_theirs_and_eager_gradients_are_as_before():
    @tf.function
    def inner(x):
        return tf.nn.silu(x)

    @tf.function
    def outer(x):
        with custom_gradients_forgotten(), tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.silu(inner(x))
            return tape.gradient(y, x)

    x = tf.constant([1.0, -2.0])
    with tf.GradientTape() as tape, custom_gradients_forgotten():
        tape.watch(x)
        y = tf.nn.silu(tf.nn.silu(x))
    expected = tape.gradient(y, x)
    before = registered()
    np.testing.assert_allclose(outer(x), expected, rtol=1e-6)
    assert registered() > before  # of the inner one, whose gradient may be taken again
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = inner(x)
    assert np.isfinite(tape.gradient(y, x)).all()


def test_a_gradient_that_the_user_has_registered_stays():
    @tf.RegisterGradient("OfTheUser")
    def triple(operation, gradient):
        return 3 * gradient

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32)
        with custom_gradients_forgotten(), graph.gradient_override_map({"IdentityN": "OfTheUser"}):
            (y,) = tf.identity_n([x])
        (slope,) = tf.gradients(y, x)
        with tf.compat.v1.Session() as session:
            assert session.run(slope, {x: 1.0}) == 3
