"""The cost of a training step, counted by hand on small models, and for each way to compile a model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.profiling.cost import count_flops, train_cost
from tfopt.profiling.cost.flops import count_graph
from tfopt.profiling.cost.training import train_graph

BATCH = (np.zeros((16, 8)), np.zeros((16, 2)))
# Forward, the gradient of the weights, and of the second layer's inputs.
EXPECTED = 16 * (2 * 8 * 4 + 3 * 4 * 2)


def network():
    return keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(2)])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_step_has_three_times_the_forward_pass_less_the_first_gradient(optimizer):
    model = network()
    model.compile(optimizer, "mse", metrics=["mae"])
    cost = train_cost(model, BATCH)
    assert cost.multiply_adds == EXPECTED == 3 * count_flops(model, batch_size=16).multiply_adds - 16 * 8 * 4
    assert (cost.examples, cost.flops, cost.uncounted) == (16, 2 * EXPECTED, ())
    assert cost.fused_bytes < cost.unfused_bytes
    assert cost.fused_kernels < cost.unfused_kernels


def test_a_convolutional_network_counted_by_hand():
    model = keras.Sequential(
        [keras.Input((9, 9, 4)), layers.Conv2D(6, 3), layers.Conv2D(5, 3), layers.Flatten(), layers.Dense(3)]
    )
    model.compile("sgd", "mse")
    first, second, third = 7 * 7 * 6 * 9 * 4, 5 * 5 * 5 * 9 * 6, 5 * 5 * 5 * 3
    assert train_cost(model, (np.zeros((8, 9, 9, 4)), np.zeros((8, 3)))).multiply_adds == 8 * (
        2 * first + 3 * second + 3 * third
    )


def test_a_frozen_layer_has_no_gradient_for_its_weights():
    model = network()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    assert train_cost(model, BATCH).multiply_adds == 16 * (8 * 4 + 2 * 4 * 2)


def test_the_optimizer_adds_bytes_and_no_products():
    def cost(optimizer):
        model = keras.Sequential([keras.Input((1000,)), layers.Dense(1000, use_bias=False)])
        model.compile(optimizer, "mse", jit_compile=True)
        return train_cost(model, (np.zeros((1, 1000)), np.zeros((1, 1000))))

    plain, adam = cost("sgd"), cost("adam")
    assert plain.multiply_adds == adam.multiply_adds
    matrix = 4 * 1000 * 1000
    # Adam reads and writes two more variables, and reads the gradient and the two again for each.
    assert 4 * matrix <= adam.fused_bytes - plain.fused_bytes <= 8 * matrix
    # Product, gradient (read 0, written 1), update of the weights (read 2, written 1).
    assert plain.fused_bytes == pytest.approx(5 * matrix, rel=0.1)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 4}, {"jit_compile": True}], ids=str)
def test_a_model_compiled_by_tfopt_has_the_same_cost(settings):
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=16, strategy="none", precision="float32", **settings))
    model = network()
    tfopt.compile(model, plan, optimizer="adam", loss="mse")
    cost = train_cost(model, BATCH)
    assert cost.multiply_adds == EXPECTED
    assert cost.jit_compile == bool(settings.get("jit_compile"))
    assert cost.moved_bytes == (cost.fused_bytes if cost.jit_compile else cost.unfused_bytes)


def test_the_step_of_tfopt_itself_has_the_products_of_the_traced_step():
    from tfopt.training.step.step import Step

    model = network()
    model.compile("adam", "mse")
    train_graph(model, BATCH)  # builds the optimizer
    step = Step(model, jit_compile=False)
    specs = (tf.TensorSpec((16, 8)), tf.TensorSpec((16, 2)))
    graph = tf.function(lambda *data: step.train(data)).get_concrete_function(*specs).graph
    assert count_graph(graph).multiply_adds == EXPECTED


def test_replicas_share_the_batch_and_the_cost_is_that_of_all():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    assert train_cost(model, BATCH).multiply_adds == EXPECTED


def test_a_model_with_its_own_step_is_counted_by_that():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(self(x)) - y) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, [w.value for w in weights]), weights, strict=True))
            return {"loss": loss}

    model = Twice()
    model(np.zeros((1, 2)))
    model.compile("sgd")
    assert train_cost(model, (np.zeros((4, 2)), np.zeros((4, 2)))).multiply_adds == 4 * 5 * (2 * 2)


def test_tracing_changes_no_weight_and_training_goes_on():
    model = network()
    model.compile("adam", "mse")
    before = [value.copy() for value in model.get_weights()]
    train_cost(model, BATCH)
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations) == 0
    model.fit(*BATCH, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_wrong_use_is_refused():
    model = network()
    with pytest.raises(UnsupportedModelError, match="must be compiled"):
        train_cost(model, BATCH)
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="batch must have known shapes"):
        train_cost(model, (tf.TensorSpec((None, 8)), tf.TensorSpec((None, 2))))
