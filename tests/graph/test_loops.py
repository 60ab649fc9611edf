"""Loops of a frozen graph run side by side, and those of Keras' recurrent layers are short and compute the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.compat import recurrent
from tfopt.compat.recurrent import short_loops
from tfopt.graph import freeze

GENERATOR = np.random.default_rng(0)
LOOPS = ("While", "StatelessWhile")


def ops(graph):
    return [node.op for node in graph.graph_def.node]


def saved(function, path, shape=(2, 3)):
    module = tf.Module()
    module.weight = tf.Variable(GENERATOR.normal(size=(3, 3)).astype("float32"))
    serve = tf.function(lambda x: {"y": function(x, module.weight)}, autograph=False)
    tf.saved_model.save(module, str(path), signatures=serve.get_concrete_function(tf.TensorSpec(shape, name="x")))
    return path


def repeated(x, weight, change=tf.tanh):
    return tf.while_loop(lambda step, _: step < 5, lambda step, x: (step + 1, change(x @ weight)), (0, x))[1]


def both(x, weight):
    larger = tf.cond(tf.reduce_sum(x) > 0, lambda: repeated(x, weight), lambda: x @ weight)
    return repeated(x, weight) + repeated(-x, weight) + larger


def test_loops_and_branches_without_effects_are_in_no_order(tmp_path):
    """An op with effects waits for the one before it: two directions would run one after the other."""
    graph = freeze(saved(both, tmp_path / "saved"))
    assert [op for op in ops(graph) if op in (*LOOPS, "If", "StatelessIf")] == ["StatelessWhile"] * 2 + ["StatelessIf"]
    inner = [node.op for function in graph.graph_def.library.function for node in function.node_def]
    assert {*inner} & {*LOOPS} == {"StatelessWhile"}
    served = graph.as_function().graph.get_operations()
    assert not any(operation.control_inputs for operation in served if operation.type in LOOPS)
    x = GENERATOR.normal(size=(2, 3)).astype("float32")
    expected = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"](x=tf.constant(x))["y"]
    np.testing.assert_allclose(graph.predict(x)["y"], expected, atol=1e-6)


def test_a_loop_with_random_numbers_keeps_its_place(tmp_path):
    graph = freeze(saved(lambda x, w: repeated(x, w, lambda y: y + tf.random.normal((2, 3))), tmp_path / "saved"))
    assert [op for op in ops(graph) if op in LOOPS] == ["While"]


def drawn(seed):
    """A random layer, and the arguments that it is called with, by name."""
    draw = np.random.default_rng(seed)
    kind = [layers.LSTM, layers.GRU, layers.SimpleRNN][seed % 3]
    names = ("return_sequences", "return_state", "go_backwards", "use_bias", "unroll", "zero_output_for_mask")
    options = {name: bool(draw.integers(2)) for name in names}
    if kind is layers.GRU:
        options["reset_after"] = bool(draw.integers(2))
    steps = int(draw.choice([1, 3, 4, 9, 17]))
    if kind is not layers.SimpleRNN:
        options["recurrent_activation"] = ["sigmoid", "softmax"][seed // 3 % 2]  # softmax is along the units of a gate
    layer = kind(5, activation=str(draw.choice(["tanh", "relu"])), bias_initializer="glorot_normal", **options)
    layer.build((None, steps, 4))
    given = {"sequences": draw.normal(size=(3, steps, 4)).astype("float32")}
    if draw.integers(2):
        given["mask"] = draw.integers(0, 2, (3, steps)).astype(bool)
    if draw.integers(2):
        given["initial_state"] = [draw.normal(size=(3, 5)).astype("float32") for _ in layer.state_size]
    return layer, given


def traced(layer, given, *, open_size):
    """A function of one layer, whose batch size and number of steps may be open, and its results."""

    def spec(value):
        shape = (None, 5) if value.shape == (3, 5) and value.dtype != bool else (None, None, 4)[: value.ndim]
        return tf.TensorSpec(shape if open_size else value.shape, value.dtype)

    call = tf.function(lambda given: layer(**given), autograph=False)
    function = call.get_concrete_function(tf.nest.map_structure(spec, given))
    return function, tf.nest.flatten(function(tf.nest.map_structure(tf.constant, given)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 18))])
def test_random_recurrent_layers_compute_what_keras_does(seed, monkeypatch):
    monkeypatch.setattr(recurrent, "SEVERAL_LOOPS_FROM", [64, 17][seed // 3 % 2])
    layer, given = drawn(seed)
    open_size = not layer.unroll and seed % 2 == 0
    _, expected = traced(layer, given, open_size=open_size)
    with short_loops():
        function, results = traced(layer, given, open_size=open_size)
    for result, by_keras in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, by_keras, atol=1e-5)
    assert "While" not in {operation.type for operation in function.graph.get_operations()}


@pytest.mark.parametrize("rank", [1, 2])
def test_a_convolutional_lstm_convolves_for_all_gates_at_once(rank):
    size = (7, 6)[:rank]
    kind = [layers.ConvLSTM1D, layers.ConvLSTM2D][rank - 1]
    layer = kind(4, 3, strides=rank, return_sequences=rank == 1, return_state=True, bias_initializer="glorot_normal")
    layer.build((2, 5, *size, 3))
    draw = np.random.default_rng(rank)
    x = tf.constant(draw.normal(size=(2, 5, *size, 3)).astype("float32"))
    mask = tf.constant(draw.integers(0, 2, (2, 5)).astype(bool))
    expected = layer(x, mask=mask)
    with short_loops():
        call = tf.function(lambda x, mask: layer(x, mask=mask), autograph=False).get_concrete_function(x, mask)
    for result, by_keras in zip(call(x, mask), expected, strict=True):
        np.testing.assert_allclose(result, by_keras, atol=1e-5)
    assert [operation.type for operation in call.graph.get_operations()].count("Conv2D") == 1


@pytest.mark.parametrize("kind", [layers.LSTM, pytest.param(layers.GRU, marks=pytest.mark.slow)])
def test_a_frozen_bidirectional_layer_has_one_product_of_its_inputs_for_each_direction(kind):
    inputs = keras.Input((9, 4))
    x = layers.Bidirectional(kind(5, return_sequences=True))(layers.Masking()(inputs))
    model = keras.Model(inputs, layers.Bidirectional(kind(3), merge_mode="sum")(x))
    graph = freeze(model)
    assert [ops(graph).count(op) for op in ("MatMul", "StatelessWhile")] == [4, 8]  # a loop for the ninth step
    x = GENERATOR.normal(size=(2, 9, 4)).astype("float32")
    x[0, 6:] = 0
    np.testing.assert_allclose(graph.predict(x)["output_0"], model(x), atol=1e-5)


def test_a_long_sequence_has_two_products_so_that_one_runs_beside_the_first_loop_but_the_weights_once():
    model = keras.Sequential([keras.Input((130, 4)), layers.LSTM(3, return_sequences=True)])
    graph = freeze(model)
    assert [ops(graph).count(op) for op in ("MatMul", "StatelessWhile")] == [2, 3]  # 32 steps, 96, and the last 2
    shapes = [
        [size.size for size in node.attr["value"].tensor.tensor_shape.dim]
        for node in graph.graph_def.node
        if node.op == "Const"
    ]
    assert shapes.count([4, 12]) == shapes.count([3, 12]) == 1
    x = GENERATOR.normal(size=(2, 130, 4)).astype("float32")
    np.testing.assert_allclose(graph.predict(x)["output_0"], model(x), atol=1e-5)


class Mine(layers.LSTMCell):
    """A cell of one's own."""

    def call(self, inputs, states, training=False):
        output, states = super().call(inputs, states, training)
        return output + 1, states


def loops_of(layer, *, training=False):
    layer.build((2, 8, 3))
    with short_loops():
        call = tf.function(lambda x: layer(x, training=training)).get_concrete_function(tf.TensorSpec((2, 8, 3)))
    return [operation.type for operation in call.graph.get_operations() if operation.type in LOOPS]


def test_other_cells_and_training_are_left_as_keras_has_them():
    assert loops_of(layers.RNN(layers.LSTMCell(4))) == ["StatelessWhile"]
    assert loops_of(layers.RNN(Mine(4))) == ["While"]
    assert loops_of(layers.RNN([layers.LSTMCell(4), layers.LSTMCell(4)])) == ["While"]
    assert loops_of(layers.LSTM(4), training=True) == ["While"]
    changed = layers.GRU(4)
    as_keras = changed.cell.call
    changed.cell.call = lambda inputs, states, training=False: as_keras(inputs, states)
    assert loops_of(changed) == ["While"]


def test_whole_numbers_are_computed_as_in_keras():
    numbers = keras.Input((8, 3), dtype="int32")
    model = keras.Model(numbers, layers.LSTM(4)(numbers))
    x = GENERATOR.integers(0, 5, (2, 8, 3)).astype("int32")
    np.testing.assert_allclose(freeze(model).predict(x)["output_0"], model(x), atol=1e-5)


def test_keras_has_its_loop_back_after_the_scope():
    before = vars(layers.RNN)["inner_loop"]
    with pytest.raises(ZeroDivisionError), short_loops(), short_loops():
        raise ZeroDivisionError
    assert vars(layers.RNN)["inner_loop"] is before


def test_a_convolutional_lstm_of_large_images_stays_with_keras_which_holds_one_step_at_a_time(monkeypatch):
    layer = layers.ConvLSTM2D(4, 3)
    layer.build((2, 5, 7, 6, 3))
    together = 5 * 2 * 4 * 4 * 5 * 4 * 4  # steps, examples, gates, filters, rows, columns, bytes
    for limit, is_short in ((together, True), (together - 1, False)):
        monkeypatch.setattr(recurrent, "BYTES_TOGETHER", limit)
        with short_loops():
            call = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec((2, 5, 7, 6, 3)))
        convolutions = [operation.type for operation in call.graph.get_operations()].count("Conv2D")
        assert (convolutions == 1) == is_short
