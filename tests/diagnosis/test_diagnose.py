"""Known waits are found where they are; a cause is named; the model and the program are as they were."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.diagnosis import experiments, input_time
from tfopt.diagnosis.diagnose import DoctorHook, report
from tfopt.diagnosis.measured import Measured
from tfopt.diagnosis.rules import host
from tfopt.errors import ConfigError, TrainingError
from tfopt.hardware import detect
from tfopt.scripts.hook import hooked

X = np.random.default_rng(0).random((640, 16), dtype=np.float32)
Y = np.arange(640) % 4
# Six epochs: one start of an epoch may take a hundred milliseconds longer, so the usual one of three counts.
STEPS = 120


@pytest.fixture(autouse=True)
def short_experiments(monkeypatch):
    """The tests look for large effects, so short experiments are enough."""
    for name, value in {"SECONDS": 0.1, "SETTLES": 0.02, "TURNS": 4}.items():
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(input_time, "SECONDS", 0.1)


def network(**options):
    keras.utils.set_random_seed(0)
    body = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *body])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **{"jit_compile": False, "metrics": ["accuracy"], **options})
    return model


def batches(wait_s=0.0):
    def slowly(x, y):
        def pause(value):
            time.sleep(wait_s)
            return value

        return tf.ensure_shape(tf.numpy_function(pause, [x], tf.float32), (None, 16)), y

    made = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)
    return made.map(slowly) if wait_s else made.prefetch(2)


class Sleep(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


class Work(keras.layers.Layer):
    """Takes a known time inside the step."""

    def call(self, inputs):
        def work(value):
            time.sleep(0.02)
            return value

        return inputs + tf.stop_gradient(tf.ensure_shape(tf.numpy_function(work, [inputs], tf.float32), (None, 16)) * 0)


def slow_step():
    model = keras.Sequential([keras.Input((16,)), Work(), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


@pytest.mark.timed
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "run"),
    [
        ("input", lambda: tfopt.diagnose(network(), batches(0.02), steps=STEPS, epochs=2)),
        ("host", lambda: tfopt.diagnose(network(), batches(), steps=STEPS, epochs=2, callbacks=[Sleep(0.02)])),
        ("compute", lambda: tfopt.diagnose(slow_step(), batches(), steps=STEPS, epochs=2)),
    ],
)
def test_a_known_time_is_found_where_it_is(part, run):
    found = run()
    parts = found.breakdown
    assert parts.parts[part] > 0.7 * sum(parts.parts.values())
    assert parts.parts[part] > 17  # the machine may be busy; it cannot be faster
    assert parts.batch_size == 32
    first = found.diagnoses[0]
    if part == "input":
        assert (first.cause, found.absent.get("no_cache", "")[-12:]) == ("slow_map", "see slow_map")
        assert first.gain > 0.7
    elif part == "host":
        assert (first.cause, "Sleep" in first.title) == ("blocking_callback", True)
        assert first.gain == pytest.approx(parts.callbacks_ms / parts.step_ms)
    else:
        assert "python_in_step" in {each.cause for each in found.diagnoses}


def trained(path):
    model = network()
    model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    return model


def loaded(path):
    """It has an optimizer, but no metrics yet."""
    trained(path).save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


def never_built(path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class TwoNetworks(keras.Model):
    """Trains two networks with an optimizer each, and cannot be called."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.one = keras.Sequential([keras.Input((16,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        self.other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4)])
        self.compile(jit_compile=False)
        self.one_step, self.other_step = keras.optimizers.Adam(), keras.optimizers.Adam()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            logits = self.other(self.one(x, training=True))
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        for network, optimizer in ((self.one, self.one_step), (self.other, self.other_step)):
            weights = network.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(trained, marks=pytest.mark.slow),
        pytest.param(loaded, marks=pytest.mark.slow),
        never_built,
        pytest.param(lambda path: TwoNetworks(), marks=pytest.mark.slow),
    ],
)
def test_the_model_is_as_it_was(make, tmp_path):
    model, twin = make(tmp_path), make(tmp_path)
    before, history = [each.copy() for each in model.get_weights()], vars(model).get("history")
    state = np.random.get_state()[1].copy()
    callback = Sleep(0)
    tfopt.diagnose(model, X, Y, batch_size=32, shuffle=False, steps=20, callbacks=[callback])
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=bool(before)))
    assert np.array_equal(state, np.random.get_state()[1])
    assert vars(model).get("history") is history
    assert "on_train_batch_end" not in vars(callback)
    for each in (model, twin):  # optimizer, metrics and the seeds of Dropout are the same too
        each.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    assert set(vars(model)) == set(vars(twin))
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), twin.get_weights(), strict=True))


def arrays(model):
    return model.fit(X[:600], Y[:600], batch_size=32, epochs=2, validation_split=0.1, verbose=0)


def without_end(model):
    """Each epoch goes on where the one before has stopped, so no batch may be lost between them."""
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32, drop_remainder=True).repeat()
    return model.fit(endless, epochs=5, steps_per_epoch=7, verbose=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "train"),
    [
        ({"steps_per_execution": 4}, arrays),
        ({}, without_end),
        pytest.param({"steps_per_execution": 2}, without_end, marks=pytest.mark.slow),
        pytest.param({"run_eagerly": True}, arrays, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_watched_fit_computes_the_same(options, train):

    model = network(**options)
    doctor = DoctorHook(steps=30)
    with hooked(doctor):
        keras.utils.set_random_seed(0)
        watched = train(model)
    keras.utils.set_random_seed(0)
    twin = network(**options)
    keras.utils.set_random_seed(0)
    plain = train(twin)
    assert watched.history == plain.history
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), twin.get_weights(), strict=True))
    assert doctor.observation.steps >= 30


@pytest.mark.timed
def test_compiling_again_is_found_over_several_fits():
    doctor = DoctorHook(steps=80)
    with hooked(doctor):
        model = network()
        for _ in range(4):
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
            model.fit(X, Y, batch_size=32, verbose=0)
    found = host.recompilation(Measured(doctor.observation, detect()))
    assert found.cause == "recompilation"
    assert found.gain > 0.2
    assert "3 times more" in found.title


@pytest.mark.slow
def test_of_several_models_the_one_that_trains_longest_is_watched():
    doctor = DoctorHook(steps=1000)
    models = [network() for _ in range(3)]
    with hooked(doctor):
        for model, epochs in zip(models, (1, 2, 1), strict=True):
            model.compile("sgd", "sparse_categorical_crossentropy")
            model.fit(X, Y, batch_size=64, epochs=epochs, verbose=0)
    seen = doctor.observation
    assert (seen.model is models[1], seen.steps, seen.fits, seen.compilations) == (True, 20, 1, 0)


@pytest.mark.slow
def test_a_model_of_tfopt_is_measured_with_several_steps_in_a_call():
    plan = tfopt.plan(tfopt.TrainingConfig(steps_per_execution=4, global_batch_size=32))
    model = network()
    tfopt.compile(model, plan, optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = tfopt.diagnose(model, plan.pipeline((X, Y)), steps=40)
    assert found.breakdown.steps >= 40
    assert "tfopt.compile has set the step" in found.unchecked["xla"]
    assert "small_batch" in found.absent


def test_an_optional_input_may_be_missing():
    class Either(keras.layers.Layer):
        def call(self, pair):
            return pair["a"] if pair.get("b") is None else pair["a"] + pair["b"]

    given = {"a": keras.Input((16,), name="a"), "b": keras.Input((16,), name="b", optional=True)}
    model = keras.Model(given, keras.layers.Dense(4)(Either()(given)))
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    found = tfopt.diagnose(model, {"a": X, "b": None}, Y, steps=8, batch_size=32)
    assert (found.breakdown.batch_size, found.diagnoses[0].cause) == (32, "eager")


@pytest.mark.timed
@pytest.mark.slow
def test_a_cache_is_advised_where_a_serial_map_uses_every_core():
    def product(x, y):
        square = tf.fill((400, 400), x[0])  # a batch takes far longer than a busy machine lets a step wait
        return x + 0 * tf.reduce_sum(square @ square), y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(product).batch(32)
    found = tfopt.diagnose(network(), data, steps=16, epochs=2)
    first = found.diagnoses[0]
    assert (first.cause, first.gain > 0.5) == ("no_cache", True)


@pytest.mark.timed
@pytest.mark.slow
def test_under_a_strategy_the_gain_of_a_change_of_the_input_is_measured(two_replicas):
    with two_replicas.scope():
        model = network()
    found = tfopt.diagnose(model, batches(0.05), steps=40, epochs=2)
    serial = next(each for each in found.diagnoses if each.cause == "slow_map")
    assert "could not be measured" not in serial.evidence
    assert serial.gain > 0.5


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: tfopt.diagnose(network(), X, Y, steps=2), ConfigError, "steps must be a whole number of at least 4"),
        (lambda: tfopt.diagnose(keras.Sequential([keras.layers.Dense(1)]), X, Y), ConfigError, "must be compiled"),
        (lambda: tfopt.diagnose("model", X, Y), ConfigError, "model must be"),
        (lambda: report(DoctorHook().observation), TrainingError, "fit must run at least 2 steps. Received: 0 steps"),
    ],
)
def test_errors(run, error, message):
    with pytest.raises(error, match=message):
        run()
