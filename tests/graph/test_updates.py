"""Updates of variables: left out where no output needs them, refused with the reason where one does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.graph import freeze


def stack(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts], name="mine")


class Seeded(layers.Layer):
    """Draws random numbers from a seed of its own at each call, as Keras' recurrent layers do."""

    def __init__(self, use=lambda x, noise: x):
        super().__init__(name="own")
        self.use = use
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.use(x, keras.random.normal(keras.ops.shape(x), seed=self.seed_generator))


class SeededInLoop(Seeded):
    def call(self, x):
        def draw(step, value):
            return step + 1, self.use(value * 2, keras.random.normal((), seed=self.seed_generator))

        return keras.ops.while_loop(lambda step, _: step < 3, draw, (0, x))[1]


class SeededInBranch(Seeded):
    def call(self, x):
        def draw():
            return self.use(x * 2, keras.random.normal((), seed=self.seed_generator))

        return tf.cond(tf.reduce_sum(x) > 0, draw, lambda: x)


class Counts(layers.Layer):
    def __init__(self, use=lambda x, count: x):
        super().__init__(name="own")
        self.use = use

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        before = self.count * 1
        self.count.assign_add(1.0)
        return self.use(x, before)


class Remembers(layers.Layer):
    """Puts what it has seen into a table of TensorFlow."""

    def __init__(self):
        super().__init__(name="own")
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def call(self, x):
        self.table.insert(tf.range(2, dtype=tf.int64), x[0, :2])
        return x * 2


def cells():
    return layers.RNN([layers.LSTMCell(4, dropout=0.2), layers.GRUCell(3, recurrent_dropout=0.2)])


DROPS = {
    "lstm": lambda: stack((5, 3), layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2)),
    "gru": lambda: stack((5, 3), layers.GRU(4, dropout=0.2, return_sequences=True)),
    "unrolled": lambda: stack((5, 3), layers.SimpleRNN(4, dropout=0.2, unroll=True)),
    "bidirectional": lambda: stack((5, 3), layers.Bidirectional(layers.LSTM(4, dropout=0.2))),
    "cells": lambda: stack((5, 3), cells()),
    "conv lstm": lambda: stack((3, 5, 5, 2), layers.ConvLSTM2D(3, 2, dropout=0.2, recurrent_dropout=0.2)),
    "time distributed": lambda: stack((2, 5, 3), layers.TimeDistributed(layers.GRU(4, dropout=0.2))),
    "noise": lambda: stack((3,), layers.GaussianNoise(0.2), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2)),
    "own seed": lambda: stack((3,), Seeded()),
    "own seed in a loop": lambda: stack((3,), SeededInLoop()),
    "own seed in a branch": lambda: stack((3,), SeededInBranch()),
    "counter": lambda: stack((3,), Counts()),
    "table": lambda: stack((3,), Remembers()),
}


ALIKE = ("gru", "bidirectional", "time distributed")  # as "lstm", "cells" and "conv lstm"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in DROPS]
)
def test_an_update_that_no_output_needs_is_left_out(name):
    model = DROPS[name]()
    x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
    expected = np.asarray(model(x, training=False))
    graph = freeze(model)
    np.testing.assert_allclose(graph.predict(x)["output_0"], expected, atol=1e-6)
    bodies = (graph.graph_def.node, *(body.node_def for body in graph.graph_def.library.function))
    assert not [node.op for nodes in bodies for node in nodes if "Assign" in node.op or "Insert" in node.op]


NEEDS = {
    "stateful lstm": lambda: keras.Sequential(
        [keras.Input((5, 3), batch_size=2), layers.LSTM(4, stateful=True, name="own")], name="mine"
    ),
    "noise": lambda: stack((3,), Seeded(lambda x, noise: x + noise)),
    "noise in a loop": lambda: stack((3,), SeededInLoop(lambda x, noise: x + noise)),
    "noise in a branch": lambda: stack((3,), SeededInBranch(lambda x, noise: x + noise)),
    "counter": lambda: stack((3,), Counts(lambda x, count: x * count)),
}


@pytest.mark.parametrize("name", NEEDS)
def test_an_output_that_depends_on_what_the_model_changes_is_refused_with_the_place(name):
    with pytest.raises(UnsupportedModelError, match=r"must not depend on a variable.*'mine' \('.*own.*updates what"):
        freeze(NEEDS[name]())


@pytest.mark.slow
def test_the_saved_model_that_keras_exports_and_int8_work_too(tmp_path):
    model = stack((5, 3), layers.SimpleRNN(8, dropout=0.2), layers.Dense(8))
    x = np.random.default_rng(0).normal(size=(16, 5, 3)).astype("float32")
    expected = np.asarray(model(x))
    model.export(tmp_path / "keras", verbose=False)
    assert np.abs(freeze(tmp_path / "keras").predict(x)["output_0"] - expected).max() < 1e-6
    config = ExportConfig(precision="int8", int8_nodes="all")
    export(model, tmp_path / "int8", config, calibration_data=x)
    served = tf.saved_model.load(str(tmp_path / "int8")).signatures["serving_default"](tf.constant(x))
    assert np.abs(served["output_0"] - expected).max() < 0.05
