"""A run that is stopped and resumed in a new process ends with the same bits as a run without interruption."""

import json
import random
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import ArtifactError, UnsupportedModelError
from tfopt.pruning.masks import attach_mask
from tfopt.training.checkpointing.record import read_random, write_random
from tfopt.training.checkpointing.state import gather_state, hold_state, read_state, write_state
from tfopt.training.checkpointing.store import CheckpointStore

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = X[:, :1] * 2 + 1

# Trains 5 steps, writes the state, 5 more, writes it again; or begins from a state and trains the last 5 only.
CONTINUES = """
    import sys
    import numpy as np, tensorflow as tf, keras
    from pathlib import Path
    from tfopt.training.checkpointing.store import CheckpointStore
    from tfopt.training.checkpointing.record import read_random, write_random
    from tfopt.training.checkpointing.state import build_state, read_state, write_state

    mode, directory, *kinds = sys.argv[1:]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    replicas = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype("float32")
    data = lambda part: tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(8).skip(5 * part).take(5)
    optimizers = {
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.01, use_ema=True, weight_decay=0.01),
        "float16": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3
        ),
    }

    class Noise(keras.layers.Layer):  # draws from Keras' global generator
        def call(self, x, training=False):
            return x + keras.random.normal(tf.shape(x), dtype=x.dtype) if training else x

    class Restore(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if self.done is False:
                checkpoint = store.load_newest()
                build_state(self.model, data(1).element_spec)
                write_state(self.model, checkpoint.arrays)
                write_random(checkpoint.meta)
                self.done = True
        done = False

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                store.save(5, read_state(self.model), read_random())

    for kind in kinds:
        strategy = replicas if kind.endswith("replicas") else tf.distribute.get_strategy()
        store = CheckpointStore(Path(directory) / kind)
        # A fresh process differs: its seeds, and the counters in Keras' layer names.
        keras.utils.set_random_seed(1 if mode == "whole" else 2)
        if mode == "rest":
            keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.metrics.Mean()
        keras.random.uniform(())  # makes the global generator, which a compiled step cannot
        with strategy.scope():
            model = keras.Sequential([
                keras.Input((4,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Identity() if strategy is replicas else Noise(),
                keras.layers.Dense(1, dtype="float32"),
            ], name="model")
            if kind.startswith("float16"):
                policy = keras.DTypePolicy("mixed_float16")
                for layer in model.layers[:-1]:
                    layer.dtype_policy = policy
            model.compile(optimizers[kind.split("-")[0]](), "mse", metrics=["mae"])
        if mode == "whole":
            history = model.fit(data(0).concatenate(data(1)), verbose=0, callbacks=[Save()])
        else:
            history = model.fit(data(1), verbose=0, callbacks=[Restore()])
        CheckpointStore(store.directory / mode).save(10, read_state(model), {"logs": history.history, **read_random()})
"""


@pytest.mark.slow
def test_a_fresh_process_goes_on_bit_by_bit(tmp_path, fresh_python):
    kinds = ["momentum", "adam", "float16", "adam-replicas", "float16-replicas"]
    for mode in ("whole", "rest"):
        fresh_python("-c", textwrap.dedent(CONTINUES), mode, tmp_path, *kinds, check=True)
    for kind in kinds:
        start = CheckpointStore(tmp_path / kind).load_newest()
        whole, rest = (CheckpointStore(tmp_path / kind / mode).load_newest() for mode in ("whole", "rest"))
        assert_equal(rest.arrays, whole.arrays)
        assert rest.meta == whole.meta  # the logs and the generators
        # All has moved, but for learning rates: weights, statistics, metrics, seeds, slots, the loss scale.
        still = [key for key, value in whole.arrays.items() if value.tobytes() == start.arrays[key].tobytes()]
        assert all(key.startswith("optimizer/") for key in still)
        assert len(still) <= 3
        assert any(key.endswith("/1-of-2") for key in whole.arrays) == kind.endswith("replicas")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        assert found[key].tobytes() == value.tobytes(), key


def small(optimizer="adam", width=3, strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():  # eager without a strategy: nothing to trace is quicker
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(width),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=strategy is None)
    return model


def train(model):
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return read_state(model)


def logged(model):
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def optimizers():
    names = ["Adafactor", "AdamW", "Ftrl", "Muon", "Nadam", "ScheduleFreeAdamW"]  # others have the slots of AdamW
    yield from ((name, lambda name=name: getattr(keras.optimizers, name)()) for name in names)
    yield "accumulation", lambda: keras.optimizers.Adam(gradient_accumulation_steps=4, use_ema=True)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    yield "schedule", lambda: keras.optimizers.SGD(schedule)
    yield "scaled", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(), dynamic_growth_steps=2)


FAST_OPTIMIZERS = ("accumulation", "scaled")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, id=name, marks=() if name in FAST_OPTIMIZERS else pytest.mark.slow)
        for name, make in optimizers()
    ],
)
def test_every_optimizer_is_carried_whole(name, make):
    model, other = small(make()), small(make())
    state = train(model)
    train(other)
    write_state(other, state)
    assert_equal(train(other), train(model))


@pytest.mark.slow
def test_an_optimizer_is_built_where_its_model_lives(two_replicas):
    for strategy in (None, two_replicas):
        model = small("adam", strategy=strategy)
        assert not model.optimizer.built
        state = read_state(model)
        assert sum(key.startswith("optimizer/") for key in state) == len(model.optimizer.variables) == 14
        train(model)


def test_without_compile_there_are_weights_only():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert list(read_state(model)) == ["model/0000", "model/0001"]


def test_shared_layers_are_kept_once():
    shared = keras.layers.Dropout(0.5)
    inputs = keras.Input((4,))
    branch = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(4)])
    model = keras.Model(inputs, branch(shared(inputs)) + branch(inputs))
    assert len(read_state(model)) == 3


def test_masks_are_carried_and_missed():
    def masked():
        model = small()
        model.layers[0].kernel.constraint = keras.constraints.MaxNorm(1.0)
        attach_mask(model.layers[0].kernel)
        return model

    model = masked()
    model.layers[0].kernel.constraint.assign(RNG.random((4, 3)) > 0.5)
    state = train(model)
    assert state["constraint/0000/kept"].dtype == bool
    assert not state["constraint/0000/kept"].all()

    other, plain = masked(), small()
    plain_state = train(plain)
    train(other)
    write_state(other, state)
    assert_equal(train(other), train(model))
    with pytest.raises(ArtifactError, match=r"constraint/0000/kept.*PruningSchedule, or prune first"):
        write_state(plain, state)
    with pytest.raises(ArtifactError, match=r"constraint/0000/kept.*is missing.*PruningSchedule"):
        write_state(masked(), plain_state)


def test_what_differs_is_named_and_nothing_is_assigned():
    model = small()
    state = train(model)
    cases = {
        r"model/0000 \(sequential\w*/dense\w*/kernel\).*\(4, 3\).*\(4, 5\).*Build the model": small(width=5),
        r"optimizer/.*Compile with the optimizer": small("sgd"),
        r"metrics/0000 of shape \(\) is not in the model": keras.Sequential([keras.Input((4,)), *small().layers]),
    }
    for words, other in cases.items():
        if other.compiled and other.optimizer.name == "adam":
            train(other)
        before = read_state(other)
        with pytest.raises(ArtifactError, match=words):
            write_state(other, state)
        assert_equal(read_state(other), before)


def test_damage_to_one_entry_is_refused_before_the_first_assignment():
    model = small()
    state = train(model)
    last = list(state)[-1]
    without = {key: value for key, value in state.items() if key != last}
    damaged = {
        "missing": without,
        "extra": {**state, "optimizer/9999": np.zeros(1)},
        "shape": {**state, last: np.zeros((2, 2), np.float32)},
        "dtype": {**state, last: state[last].astype(np.float64)},
        "replica": {**without, f"{last}/1-of-2": state[last]},
    }
    before = train(model)
    for bad in damaged.values():
        with pytest.raises(ArtifactError, match=r"optimizer/"):
            write_state(model, bad)
        assert_equal(read_state(model), before)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(UnsupportedModelError, match="must be built"):
        read_state(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.slow
def test_replicas_keep_their_own_values(two_replicas):
    model, other = small(strategy=two_replicas), small(strategy=two_replicas)
    state = train(model)
    mean, loss = "model/0004", "metrics/0000"
    for key in (mean, loss):
        assert not np.array_equal(state[f"{key}/0-of-2"], state[f"{key}/1-of-2"])
    assert "model/0000" in state  # one copy of what is the same everywhere
    train(other)
    write_state(other, state)
    assert logged(other) == logged(model)
    assert_equal(train(other), train(model))
    assert_equal(gather_state(state, two_replicas), state)


@pytest.mark.slow
def test_two_replicas_to_one_and_back(two_replicas):
    model, one = small(strategy=two_replicas), small()
    state = train(model)
    train(one)
    write_state(one, state)
    assert logged(one) == pytest.approx(logged(model), rel=1e-6)
    replicas = [state[f"model/0004/{number}-of-2"] for number in (0, 1)]
    np.testing.assert_allclose(one.layers[1].moving_mean.numpy(), np.mean(replicas, axis=0), rtol=1e-6)
    assert_equal({"kernel": one.layers[0].kernel.numpy()}, {"kernel": state["model/0000"]})

    expected = logged(one)
    write_state(model, read_state(one))
    assert logged(model) == expected
    for replica in two_replicas.experimental_local_results(model.layers[1].moving_mean.value):
        assert np.array_equal(replica.numpy(), one.layers[1].moving_mean.numpy())
    train(model)

    with pytest.raises(ArtifactError, match=r"all 2 replicas.*gather_state"):
        write_state(one, {key: value for key, value in state.items() if "/1-of-2" not in key})


def test_global_random_generators_go_on():
    def draw():
        generator = tf.random.get_global_generator()
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.normal()),
            keras.random.uniform((2,)).numpy().tolist(),
            tf.random.uniform((2,)).numpy().tolist(),
            generator.uniform((2,)).numpy().tolist(),
        ]

    draw()
    state = json.loads(json.dumps(read_random()))
    expected = [draw(), draw()]
    draw()
    write_random(state)
    assert [draw(), draw()] == expected


class Counting(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.calls.assign_add(1.0)
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


def test_a_held_state_has_optimizers_of_the_model_and_variables_of_losses():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", loss := Counting(), jit_compile=False)
    model.second = keras.optimizers.Adam()
    model.second.build(model.trainable_variables)
    model.fit(X, Y, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.second.variables, loss.calls]
    before = [each.numpy() for each in variables]
    give_back = hold_state(model)
    model.fit(X, Y, verbose=0)
    model.second.apply([keras.ops.ones_like(each) for each in model.trainable_variables])
    assert not np.array_equal(before[-1], loss.calls.numpy())
    give_back()
    assert all(np.array_equal(one, other.numpy()) for one, other in zip(before, variables, strict=True))
