"""In the losses of the outputs every example has the same weight, and losses added in half precision are included."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.training import TrainingConfig, compile, plan

BATCH = 8
RNG = np.random.default_rng(0)


def examples(count):
    x = RNG.normal(size=(count, 3)).astype("float32")
    y = {"a": x[:, :1] ** 2, "b": 3 * x[:, 1:]}
    return x, y, RNG.uniform(0.2, 2.0, size=count).astype("float32")


EVEN, UNEVEN, VALIDATION = examples(4 * BATCH), examples(2 * BATCH + 1), examples(BATCH + 1)
COMPILED = {
    "loss": {"a": "mse", "b": "mae"},  # none for the third output
    "loss_weights": {"a": 1.0, "b": 2.0},
    "metrics": {"a": ["mae"]},
}


def build():
    keras.utils.set_random_seed(0)
    inner_in = keras.Input((3,))
    inner = keras.Model(inner_in, keras.layers.Dense(4, "tanh", name="hidden")(inner_in), name="inner")
    inputs = keras.Input((3,))
    hidden = inner(inputs)
    outputs = {name: keras.layers.Dense(units, name=name)(hidden) for name, units in (("a", 1), ("b", 2), ("free", 3))}
    return keras.Model(inputs, outputs)


def batches(data, *, drop_remainder=False):
    x, y, weights = data
    return tf.data.Dataset.from_tensor_slices((x, {**y, "free": y["a"]}, weights)).batch(BATCH, drop_remainder)


@pytest.fixture(scope="module")
def expected():
    """Plain Keras on one device: all losses for batches of one size, then the whole loss for a smaller batch."""
    model = build()
    model.compile(keras.optimizers.SGD(0.1), **COMPILED)
    options = {"shuffle": False, "verbose": 0}
    history = model.fit(batches(EVEN), validation_data=batches(EVEN), epochs=2, **options).history
    return history, model.fit(batches(UNEVEN), **options).history["loss"]


def check(expected, *, drop_remainder=False, run_eagerly=False, **settings):
    expected, expected_loss = expected
    decided = plan(TrainingConfig(precision="float32", global_batch_size=BATCH, **settings))
    with decided.scope():
        model = build()
    compile(model, decided, optimizer=keras.optimizers.SGD(0.1), run_eagerly=run_eagerly, **COMPILED)
    data = batches(EVEN, drop_remainder=drop_remainder)
    found = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    assert found.keys() == expected.keys() > {"a_loss", "b_loss", "val_a_loss"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)

    found = model.fit(batches(UNEVEN), verbose=0).history
    assert found["loss"] == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(found["loss"][0], found["a_loss"][0] + 2 * found["b_loss"][0], rtol=1e-5)

    x, y, weights = VALIDATION
    outputs = {name: value.numpy() for name, value in model(x).items()}
    a, b = (np.mean(distance, 1) for distance in ((outputs["a"] - y["a"]) ** 2, np.abs(outputs["b"] - y["b"])))
    truth = {"a_loss": np.mean(weights * a), "b_loss": np.mean(weights * b)}
    evaluated = model.evaluate(batches(VALIDATION), verbose=0, return_dict=True)
    for name, value in truth.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-5)
    if decided.strategy is None:
        batch = (x, {**y, "free": y["a"]}, weights)
        for figures in (model.test_on_batch(*batch, return_dict=True), model.train_on_batch(*batch, return_dict=True)):
            assert {name: figures[name] for name in truth} == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"accumulate": 3, "steps_per_execution": 1}, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param(
            {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "micro_batches": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_losses_of_single_outputs_on_one_device_and_in_stages(settings, expected):
    check(expected, **settings)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3},  # of the last batch, a replica gets one example or none
        {"run_eagerly": True},
        {"drop_remainder": True},
        {"accumulate": 3, "jit_compile": True},
    ],
    ids=str,
)
def test_losses_of_single_outputs_on_replicas(settings, expected, two_replicas):
    check(expected, strategy=two_replicas, **settings)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def penalized(precision, **settings):
    decided = plan(TrainingConfig(precision=precision, global_batch_size=BATCH, **settings))
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activity_regularizer="l2"),
                Penalty(),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
    compile(model, decided, optimizer=keras.optimizers.SGD(0.05), loss="mse")
    x, y, _ = EVEN
    return model.fit(x, y["a"], batch_size=BATCH, shuffle=False, epochs=2, verbose=0).history["loss"]


@pytest.mark.parametrize("precision", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_losses_added_in_half_precision_train_as_in_float32(precision):
    # Keras cannot sum losses of two dtypes: TypeError.
    wanted = penalized("float32")
    np.testing.assert_allclose(penalized(precision), wanted, rtol=2e-2)
    if precision == "mixed_float16":
        stages = {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "micro_batches": 2}
        np.testing.assert_allclose(penalized(precision, **stages), wanted, rtol=2e-2)
