"""Channels that leave in rounds during a fit."""

import re

import keras
import numpy as np
import pytest
from keras import layers
from masked_parent import outputs

import tfopt
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.pruning import ShrinkSchedule, StructuredPruningConfig

X = np.random.default_rng(0).normal(size=(64, 8, 8, 1)).astype("f4")
Y = np.arange(64) % 4


def network():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", name="first")(x)
    y = layers.BatchNormalization(name="norm")(x)
    y = layers.Conv2D(16, 3, padding="same", activation="relu", name="second")(y)
    x = layers.Flatten()(layers.Add()([x, layers.Dropout(0.1)(y)]))
    model = keras.Model(inputs, layers.Dense(4, name="logits")(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def zero_channels(model):
    return sum(not model.get_layer("first").kernel.numpy()[..., channel].any() for channel in range(16))


class Watch(keras.callbacks.Callback):
    """Counts the channels that are zero after each step."""

    def __init__(self):
        super().__init__()
        self.zeros = []

    def on_train_batch_end(self, batch, logs=None):
        self.zeros.append(zero_channels(self.model))


def test_channels_leave_in_rounds_and_the_smaller_model_computes_the_same():
    model = network()
    schedule = ShrinkSchedule(model, StructuredPruningConfig(ratio=0.5, rounds=2, end_step=8, round_to=4))
    watch = Watch()
    history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[schedule, watch])
    assert watch.zeros == [4] * 8 + [8] * 4
    smaller = schedule.result.model
    assert [smaller.get_layer(name).filters for name in ("first", "second")] == [8, 8]
    costs = history.history["multiply_adds"]
    assert costs[-1] == schedule.result.report.metrics["multiply_adds"] < costs[0]
    np.testing.assert_allclose(outputs(smaller, [X])[0], outputs(model, [X])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_second_schedule_goes_on_from_the_zeros():
    model = network()
    first = ShrinkSchedule(model, StructuredPruningConfig(ratio=0.25, rounds=1, end_step=1, round_to=1))
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[first])
    second = ShrinkSchedule(
        model, StructuredPruningConfig(ratio=0.5, rounds=1, end_step=1, round_to=1, criterion="random")
    )
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[second])
    assert len(second.result.channels["first"]) == 8
    assert set(second.result.channels["first"]) < set(first.result.channels["first"])


def test_a_target_is_met_at_the_end_of_the_fit():
    model = network()
    schedule = ShrinkSchedule(model, StructuredPruningConfig(target_flops=0.5, rounds=3, round_to=1))
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[schedule])
    metrics = schedule.result.report.metrics
    assert 0.45 < metrics["multiply_adds"] / metrics["multiply_adds_before"] <= 0.5


@pytest.mark.parametrize("strategy", ["none", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_masks_hold_under_the_step_of_tfopt(strategy):
    settings = {"precision": "float32", "jit_compile": False, "steps_per_execution": 2}
    plan = tfopt.plan(tfopt.TrainingConfig(strategy=strategy, global_batch_size=16, **settings))
    with plan.scope():
        model = network()
    tfopt.compile(model, plan, optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    schedule = ShrinkSchedule(model, StructuredPruningConfig(ratio=0.5, rounds=2, end_step=2))
    watch = Watch()
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[schedule, watch])
    assert watch.zeros == [0, 8, 8, 8]  # an execution has two steps
    assert schedule.result.model.get_layer("first").filters == 8


def test_wrong_settings():
    with pytest.raises(ConfigError, match=re.escape("target_latency cannot be met during a fit")):
        ShrinkSchedule(network(), StructuredPruningConfig(target_latency=0.5))
    model = network()
    schedule = ShrinkSchedule(model, StructuredPruningConfig(ratio=0.5, rounds=2, end_step=50))
    with pytest.warns(TfoptWarning, match="end_step=50 lies beyond the 4 steps"):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[schedule])
    assert schedule.result.model.get_layer("first").filters == 8
    endless = ((X[:4], Y[:4]) for _ in range(2))
    with pytest.raises(ConfigError, match="end_step must be given when the number of steps is unknown"):
        model.fit(
            endless,
            verbose=0,
            callbacks=[ShrinkSchedule(model, StructuredPruningConfig(ratio=0.6, rounds=2, round_to=1))],
        )
