"""The optimizer of a training: its schedule, its batch size, what decays, and the averages of its weights."""

import math

import keras
import numpy as np
import pytest

import tfopt
from tfopt.errors import ConfigError
from tfopt.training import TrainingConfig
from tfopt.training.config import OPTIMIZERS
from tfopt.training.optimizers import is_decayed, learning_rate_factor, make_optimizer

layers = keras.layers


def rate_at(step, config, **settings):
    optimizer = make_optimizer(config, **settings)
    optimizer.iterations.assign(step)
    return float(optimizer.learning_rate)


@pytest.mark.parametrize(
    ("decay", "warmup", "expected"),
    [
        ("cosine", 0, [0.5, 0.25, 0.0]),
        ("constant", 0, [0.5, 0.5, 0.5]),
        ("cosine", 20, [0.0, 0.5 * (1 + math.cos(math.pi * 30 / 80)) / 2, 0.0]),
        ("constant", 20, [0.0, 0.5, 0.5]),
    ],
)
def test_the_rate_at_the_start_half_way_and_at_the_end(decay, warmup, expected):
    config = TrainingConfig(learning_rate=0.5, decay=decay)
    found = [rate_at(step, config, steps=100, warmup_steps=warmup) for step in (0, 50, 100)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    if warmup:
        assert rate_at(5, config, steps=100, warmup_steps=warmup) == pytest.approx(0.125)
        assert rate_at(20, config, steps=100, warmup_steps=warmup) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("optimizer", "base", "size", "factor"),
    [("sgd", 256, 1024, 4), ("SGD", 256, 64, 0.25), ("adam", 256, 1024, 2), ("lamb", 64, 64, 1), ("sgd", None, 64, 1)],
)
def test_the_rate_follows_the_batch_size_and_the_plan_says_so(optimizer, base, size, factor):
    config = TrainingConfig(
        optimizer=optimizer, base_batch_size=base, global_batch_size=size, learning_rate=0.1, decay="constant"
    )
    assert learning_rate_factor(config)[0] == factor
    assert rate_at(0, config, steps=1) == pytest.approx(0.1 * factor)
    assert rate_at(0, config, steps=1, learning_rate=0.01) == pytest.approx(0.01 * factor)
    said = [each for each in tfopt.plan(config).decisions if each.setting == "learning_rate"]
    assert bool(said) == (base is not None)
    if base is None:
        return
    (said,) = said
    assert float(said.value) == pytest.approx(0.1 * factor)
    assert said.reason.startswith("as asked" if factor == 1 else f"times {factor:.3g}: batches of {size} for {base}, ")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_named_optimizer_is_made_with_the_common_settings(name):
    made = make_optimizer(TrainingConfig(optimizer=name, weight_decay=0.1, ema_momentum=0.9, warmup_epochs=1), steps=9)
    assert (type(made).__name__.lower(), made.weight_decay, made.ema_momentum) == (name, 0.1, 0.9)


def attention_model():
    inputs = keras.Input((6, 8))
    h = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    h = layers.LayerNormalization()(layers.Conv1D(8, 3)(h))
    h = layers.BatchNormalization()(layers.LSTM(4)(h))
    return keras.Model(inputs, layers.Dense(2, dtype="float32")(h))


@pytest.mark.parametrize(
    ("strategy", "precision"), [("none", "float32"), pytest.param("mirrored", "mixed_float16", marks=pytest.mark.slow)]
)
def test_only_kernels_decay(strategy, precision):
    """With gradients of zero, a step shrinks what decays by the rate times the decay, and leaves the rest."""
    config = TrainingConfig(
        optimizer="sgd",
        learning_rate=0.5,
        weight_decay=0.2,
        decay="constant",
        strategy=strategy,
        precision=precision,
        global_batch_size=4,
    )
    plan = tfopt.plan(config)
    with plan.scope():
        model = attention_model()
        for weight in model.trainable_weights:
            weight.assign(keras.ops.ones(weight.shape))
    optimizer = plan.optimizer(steps_per_epoch=1)
    tfopt.compile(model, plan, optimizer=optimizer, loss=lambda y, logits: 0.0 * keras.ops.sum(logits, -1))
    assert (optimizer if precision == "float32" else model.optimizer.inner_optimizer) is optimizer
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")
    model.fit(plan.pipeline((x, np.zeros((4, 2), "float32"))), verbose=0)
    for weight in model.trainable_weights:
        expected = 0.9 if weight.name in ("kernel", "recurrent_kernel") else 1.0
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, err_msg=weight.path)
        assert is_decayed(weight) == (expected < 1)


def test_no_decay_is_the_default_of_the_optimizer():
    kinds = {"adamw": 0.004, "adam": None}
    assert {kind: make_optimizer(TrainingConfig(optimizer=kind), steps=1).weight_decay for kind in kinds} == kinds
    assert not make_optimizer(TrainingConfig(optimizer="adamw", weight_decay=0), steps=1).weight_decay


def test_averages_are_the_weights_at_the_end_of_fit():
    config = TrainingConfig(optimizer="sgd", learning_rate=0.1, ema_momentum=0.5, global_batch_size=2, epochs=1)
    plan = tfopt.plan(config)
    with plan.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        optimizer = make_optimizer(config, steps=1000)
    tfopt.compile(model, plan, optimizer=optimizer, loss="mse")
    ones = np.ones((6, 1), "float32")
    model.fit(plan.pipeline((ones, 0 * ones)), verbose=0)
    weight, average = 1.0, 0.0
    for step in range(3):
        weight -= 0.1 * (1 + math.cos(math.pi * step / 1000)) / 2 * 2 * weight
        average = weight if step == 0 else 0.5 * average + 0.5 * weight
    assert model.get_weights()[0].item() == pytest.approx(average, rel=1e-5)
    assert not make_optimizer(config, steps=1, averages=False).use_ema


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_arguments": {"momentum": 0.9}}, r"optimizer_arguments must fit the optimizer 'adam'"),
        ({"optimizer": "sgd", "optimizer_arguments": {"momentum": 9}}, r"optimizer_arguments must fit .* \[0, 1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(TrainingConfig(**settings), steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_arguments": {"learning_rate": 1}}, "optimizer_arguments must hold what has no setting of its own"),
        ({"optimizer": keras.optimizers.SGD(), "weight_decay": 0.1}, "weight_decay must be left out with an optimizer"),
        ({"optimizer": keras.optimizers.SGD(), "warmup_epochs": 1}, "warmup_epochs must be left out with an optimizer"),
        ({"warmup_epochs": -1}, "warmup_epochs must be a number of at least 0"),
        ({"label_smoothing": 10}, r"label_smoothing must be in \[0, 1\)"),
        ({"ema_momentum": 1}, r"ema_momentum must be in \(0, 1\)"),
    ],
)
def test_settings_that_do_not_fit_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings)
