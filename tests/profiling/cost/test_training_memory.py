"""The memory of training: parts that are known exactly, what changes them, and what the walk over the graph finds."""

import json
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.profiling.cost.memory import peak_memory, training_memory

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "training_memory.json"


def peak(function, *shapes):
    graph = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph
    return peak_memory(graph).total_bytes


def test_a_tensor_ends_with_its_last_reader():
    # Two results of a product exist at the same time, never three.
    assert peak(lambda x: x @ x @ x @ x @ x, (100, 100)) == 2 * 40_000


def test_a_tensor_that_is_read_later_stays():
    def kept(x):
        first = x @ x
        return first + first @ first @ first

    assert peak(kept, (100, 100)) == 3 * 40_000


def test_elementwise_operations_write_over_their_input_and_views_take_no_memory():
    assert peak(lambda x: tf.nn.relu(tf.reshape(x @ x, (-1,)) * 2 + 1), (100, 100)) == 40_000


def test_the_input_of_an_elementwise_operation_that_is_read_later_is_kept():
    def kept(x):
        product = x @ x
        return tf.exp(product) @ product

    assert peak(kept, (100, 100)) == 3 * 40_000


def test_the_lists_of_a_loop_hold_what_each_round_adds():
    def rounds(x):
        return tf.map_fn(lambda row: tf.tile(row, [4]), x)

    # The list of the rows, the list of the results, and the results in one tensor.
    assert peak(rounds, (10, 100)) == pytest.approx((1 + 4 + 4) * 4_000, rel=0.15)


def test_weights_slots_inputs_and_gradients_have_their_sizes():
    model = keras.Sequential([keras.Input((1000,)), layers.Dense(1000, use_bias=False)])
    matrix = 4 * 1000 * 1000
    for optimizer, slots in (("sgd", 0), ("rmsprop", 1), ("adam", 2)):
        memory = training_memory(model, 16, optimizer=optimizer)
        assert memory.weights_bytes == matrix
        assert memory.optimizer_bytes == pytest.approx(slots * matrix, abs=100)
        assert memory.input_bytes == 16 * 4 * 1000
        assert memory.gradient_bytes == matrix
        assert memory.total_bytes == sum(memory.parts().values())
        assert memory.optimizer == optimizer


def test_activations_grow_with_the_batch_and_shrink_in_half_precision():
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for _ in range(4):
        x = layers.Conv2D(32, 3, padding="same", activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    small, large = (training_memory(model, size).activation_bytes for size in (8, 64))
    assert large == pytest.approx(8 * small, rel=0.1)
    before = keras.config.dtype_policy().name
    half = training_memory(model, 64, "mixed_bfloat16")
    assert half.precision == "mixed_bfloat16"
    assert half.activation_bytes < 0.75 * large
    assert half.weights_bytes == training_memory(model, 64).weights_bytes
    assert model.layers[1].dtype_policy.name == "float32"
    assert keras.config.dtype_policy().name == before


def test_recurrent_layers_keep_what_each_step_needs_for_the_gradient():
    model = keras.Sequential([keras.Input((32, 8)), layers.LSTM(64), layers.Dense(1)])
    memory = training_memory(model, 64)
    a_state = 64 * 64 * 4
    assert 5 * 32 * a_state < memory.activation_bytes < 20 * 32 * a_state  # each step reads the same weights


def test_the_model_and_the_optimizer_are_unchanged():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    before = [value.copy() for value in model.get_weights()]
    training_memory(model, 8, optimizer=optimizer)
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    assert not optimizer.built
    assert not model.compiled


def test_wrong_settings_are_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(ConfigError, match="batch_size=0"):
        training_memory(model, 0)
    with pytest.raises(ConfigError, match="Did you mean 'mixed_float16'"):
        training_memory(model, 1, "mixed_float61")

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    own = Own()
    own(tf.zeros((1, 4)))
    assert training_memory(own, 8).weights_bytes == 40
    with pytest.raises(UnsupportedModelError, match="Build it with the policy 'mixed_bfloat16'"):
        training_memory(own, 8, "mixed_bfloat16")


def test_the_stated_error_is_that_of_the_recorded_cells():
    results = json.loads(RESULTS.read_text())
    for cell in results["cells"]:
        error = cell["estimated_bytes"] / cell["measured_bytes"] - 1
        assert cell["relative_error"] == pytest.approx(error, abs=1e-3)
    assert results["largest_error"] == max(abs(cell["relative_error"]) for cell in results["cells"])
    assert len({cell["case"] for cell in results["cells"]}) >= 3
