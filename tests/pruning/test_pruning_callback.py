"""Pruning during Keras' own fit: one table of settings, in each of which the zeros hold after every step."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.pruning import PruningConfig, PruningSchedule, prune

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 96)
STEPS_PER_EPOCH = 12


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def build(dtype="float32"):
    hidden = keras.layers.Dense(16, activation="relu", dtype=dtype)
    head = keras.layers.Dense(4, kernel_constraint="max_norm", dtype=dtype)
    return keras.Sequential([keras.Input((8,)), hidden, head])


def compile_model(model, optimizer="adam", **settings):
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **settings)
    return model


def zeros(model):
    return [np.count_nonzero(layer.kernel.numpy() == 0) for layer in model.layers]


class WatchZeros(keras.callbacks.Callback):
    """After every execution, checks that the weights are zero exactly where the mask says so."""

    def __init__(self):
        super().__init__()
        self.shares = []

    def on_train_batch_end(self, batch, logs=None):
        for layer in self.model.layers:
            kept = layer.kernel.constraint.kept.numpy()
            assert not layer.kernel.numpy()[~kept].any()
        self.shares.append(float(np.mean(~kept)))


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


SETTINGS = {
    "plain": {},
    "adamw": {"optimizer": lambda: keras.optimizers.AdamW(weight_decay=0.01)},
    "moving averages": {"optimizer": lambda: keras.optimizers.Adam(use_ema=True)},
    "eager": {"run_eagerly": True},
    "xla and 4 steps per execution": {"jit_compile": True, "steps_per_execution": 4, "optimizer": sgd},
    "mixed_float16 and momentum": {"dtype": "mixed_float16", "optimizer": sgd},
    "own loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(sgd())},
    "mixed_bfloat16": {"dtype": "mixed_bfloat16"},
    "clipped gradients": {"optimizer": lambda: keras.optimizers.Adam(clipnorm=0.1)},
    "moving averages that overwrite": {
        "optimizer": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=4)
    },
    "gradient accumulation": {"optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)},
    "two replicas and momentum": {"replicas": 2, "optimizer": sgd},
    "two replicas and mixed_float16": {"replicas": 2, "dtype": "mixed_float16"},
}


def some_fast(names, fast):
    """Marks the names that are not in `fast`, each of which is like one that is."""
    assert set(fast) <= set(names)
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


FAST_SETTINGS = (
    "xla and 4 steps per execution",
    "mixed_float16 and momentum",
    "moving averages that overwrite",
    "two replicas and momentum",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", some_fast(SETTINGS, FAST_SETTINGS))
def test_zeros_hold_after_every_step(name, two_replicas):
    settings = dict(SETTINGS[name])
    strategy = two_replicas if settings.pop("replicas", 1) == 2 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(settings.pop("dtype", "float32"))
        compile_model(model, settings.pop("optimizer", lambda: "adam")(), **{"jit_compile": False, **settings})
    before = model.layers[0].kernel.numpy()
    watch = WatchZeros()
    pruning = PruningSchedule(model, PruningConfig(target_sparsity=0.75, frequency=3))
    history = model.fit(data(), epochs=3, callbacks=[watch, pruning], verbose=0)
    assert zeros(model) == [96, 48]
    assert watch.shares == sorted(watch.shares)
    assert len(set(watch.shares)) >= 4, "the sparsity rises gradually"
    assert watch.shares[-STEPS_PER_EPOCH // 4] == 0.75, "the target is reached before the end"
    assert history.history["sparsity"][-1] == 0.75
    assert pruning.report.metrics == {"sparsity": 0.75}
    after = model.layers[0].kernel.numpy()
    assert (after[after != 0] != before[after != 0]).all(), "the kept weights were trained"
    if strategy:
        replicas = [component.numpy() for component in model.layers[0].kernel.value.values]
        np.testing.assert_array_equal(*replicas)


def test_changing_masks_does_not_retrace_the_step():
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    model = Counting(build().layers)
    compile_model(model, jit_compile=False)
    model.fit(data(), epochs=2, verbose=0)
    without = len(traces)
    traces.clear()
    model.fit(data(), epochs=2, callbacks=[PruningSchedule(model, PruningConfig(frequency=1))], verbose=0)
    assert len(traces) <= without


def test_the_schedule_is_followed_at_its_frequency():
    model = compile_model(build())
    config = PruningConfig(target_sparsity=0.75, schedule=lambda step: min(0.75, step / 32), frequency=8)
    watch = WatchZeros()
    model.fit(data(), epochs=3, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert watch.shares == [0.25 * (step // 8) for step in range(24)] + [0.75] * 12


@pytest.mark.parametrize("name", ["polynomial", pytest.param("constant", marks=pytest.mark.slow)])
def test_named_schedules_reach_the_target_at_end_step(name):
    model = compile_model(build())
    config = PruningConfig(target_sparsity=0.5, schedule=name, begin_step=5, end_step=13, frequency=10)
    watch = WatchZeros()
    model.fit(data(), epochs=2, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert watch.shares[:5] == [0] * 5
    assert watch.shares[13:] == [0.5] * 11


def test_a_tfmot_schedule_is_accepted():
    import tensorflow_model_optimization as tfmot

    schedule = tfmot.sparsity.keras.PolynomialDecay(0.25, 0.5, begin_step=4, end_step=20)
    model = compile_model(build())
    watch = WatchZeros()
    config = PruningConfig(target_sparsity=0.5, schedule=schedule, frequency=4)
    model.fit(data(), epochs=2, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert watch.shares[:5] == [0, 0, 0, 0, 0.25]
    assert watch.shares[19:] == [pytest.approx(float(schedule(step // 4 * 4)[1]), abs=1 / 64) for step in range(19, 24)]
    assert zeros(model) == [64, 32]


def test_a_fit_that_stops_early_ends_at_the_target():
    model = compile_model(build())
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", True))
    model.fit(data(), epochs=2, callbacks=[stop, PruningSchedule(model, PruningConfig())], verbose=0)
    assert zeros(model) == [96, 48]


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), -1])
def test_weights_restored_at_the_end_are_pruned(order):
    """EarlyStopping puts back weights from before the last masks. Whatever the order, the masks have the last word."""
    model = compile_model(build())
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True, start_from_epoch=0)
    pruning = PruningSchedule(model, PruningConfig(keep_last=True))
    others = [best, pruning, PruningSchedule(model, PruningConfig(keep_first=True))][::order]
    given = keras.callbacks.CallbackList(others, add_history=True, model=model, epochs=2, steps=12)
    before = list(given.callbacks)
    model.fit(data(), epochs=2, callbacks=given, verbose=0)
    assert best.best_weights is not None
    assert zeros(model) == [96, 48]
    assert pruning.report.metrics == {"sparsity": 0.75}
    assert given.callbacks == before


def test_initial_epoch_continues_the_schedule():
    model = compile_model(build())
    watch = WatchZeros()
    config = PruningConfig(schedule=lambda step: 0.75 * step / 48, frequency=12)
    model.fit(data(), epochs=4, initial_epoch=2, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert watch.shares == [0.375] * 12 + [pytest.approx(0.5625, abs=1 / 64)] * 12


class Replaying(keras.Sequential):
    """Its first fit walks over the batches that an earlier process has trained on, without training."""

    done = 0

    def make_train_function(self, force=False):
        super().make_train_function(force)
        train = self.train_function

        def step(iterator):
            if self.done <= 0:
                return train(iterator)
            self.done -= self.steps_per_execution
            for _ in range(self.steps_per_execution):
                next(iterator)
            return {"loss": tf.zeros(())}

        self.train_function = step


def pruned_fit(config, steps_per_execution, *, save_at=0, step=0, state=None):
    """Fits for four epochs, or, from a state saved after so many steps, the rest of them; returns two states.

    They are that after `save_at` steps and that at the end.
    """
    model = Replaying([keras.Input((8,)), *build().layers])
    compile_model(model, steps_per_execution=steps_per_execution, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    pruning = PruningSchedule(model, config, data=data())
    masks = [layer.kernel.constraint for layer in model.layers]
    held = [each for mask in masks for each in (mask.kept, mask.counter, mask.movement) if each is not None]
    variables = [*model.variables, *model.optimizer.variables, *held]
    for variable, value in zip(variables, state or [], strict=bool(state)):
        variable.assign(value)
    initial_epoch, model.done = divmod(step, STEPS_PER_EPOCH)
    saved = []

    class Save(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch * STEPS_PER_EPOCH + batch + 1 >= save_at and not saved:
                saved.extend(variable.numpy() for variable in variables)

    model.fit(data(), epochs=4, initial_epoch=initial_epoch, callbacks=[pruning, Save()], verbose=0)
    return saved, [variable.numpy() for variable in variables]


BREAKS = {
    "epoch 2": (24, 1, {}),
    "epoch 3, at the target": (36, 1, {}),
    "on the grid": (24, 1, {"frequency": 8}),
    "executions that do not divide the epoch": (12, 5, {}),
    "a grid point in the last execution of an epoch": (24, 5, {"frequency": 23}),
    "executions of 4": (24, 4, {}),
    "global scope": (24, 1, {"scope": "global"}),
    "begin and end": (24, 1, {"begin_step": 9, "end_step": 33}),
    "a callable": (24, 1, {"schedule": lambda step: 0.75 * min(1, step / 40)}),
    "a callable that falls": (36, 1, {"schedule": lambda step: 0.6 if 10 < step < 20 else 0.01 * step}),
    "random": (24, 1, {"criterion": "random"}),
    "movement, within an epoch, after an update": (22, 1, {"criterion": "movement", "gradient_batches": 2}),
    "regrowth, within an epoch, executions of 4": (20, 4, {"regrowth": 0.3, "gradient_batches": 2}),
    "taylor and regrowth": (24, 1, {"criterion": "taylor", "regrowth": 0.3, "gradient_batches": 2}),
    "within an epoch, after an update": (22, 1, {}),
    "within an epoch, executions of 4": (20, 4, {}),
}


FAST_BREAKS = (
    "a grid point in the last execution of an epoch",
    "a callable that falls",
    "movement, within an epoch, after an update",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", some_fast(BREAKS, FAST_BREAKS))
def test_a_fit_continued_after_a_break_ends_as_one_without(name):
    step, steps_per_execution, settings = BREAKS[name]
    config = PruningConfig(**{"frequency": 7, **settings})
    saved, whole = pruned_fit(config, steps_per_execution, save_at=step)
    keras.utils.set_random_seed(2)
    _, continued = pruned_fit(config, steps_per_execution, step=step, state=saved)
    assert not np.array_equal(saved[0], whole[0]), "there was something left to train"
    for one, other in zip(whole, continued, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("frequency", "steps_per_execution", "updates"),
    [
        pytest.param(5, 1, [5, 10, 15, 20], marks=pytest.mark.slow),
        (8, 1, [8, 16]),
        (5, 4, [8, 12, 16, 20]),
        pytest.param(7, 4, [8, 16], marks=pytest.mark.slow),
        pytest.param(24, 1, [], marks=pytest.mark.slow),
    ],
)
def test_masks_change_at_multiples_of_the_frequency(frequency, steps_per_execution, updates):
    model = compile_model(build(), steps_per_execution=steps_per_execution)
    config = PruningConfig(target_sparsity=0.75, schedule=lambda step: 0.02 * step, frequency=frequency)
    watch = WatchZeros()
    pruning = PruningSchedule(model, config)
    model.fit(data(), epochs=2, callbacks=[watch, pruning], verbose=0)
    shares = [0.0, *watch.shares]
    changed = [place * steps_per_execution for place in range(len(watch.shares)) if shares[place + 1] != shares[place]]
    assert changed == updates


def test_no_mask_changes_before_begin_step():
    model = compile_model(build())
    watch = WatchZeros()
    config = PruningConfig(schedule=lambda step: 0.5, begin_step=9, frequency=4)
    model.fit(data(), epochs=2, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert watch.shares == [0] * 12 + [0.5] * 12


def test_sparsity_does_not_fall_in_a_second_fit():
    model = compile_model(build())
    pruning = PruningSchedule(model, PruningConfig(frequency=1))
    model.fit(data(), epochs=1, callbacks=[pruning], verbose=0)
    masks = [layer.kernel.constraint.kept.numpy() for layer in model.layers]
    watch = WatchZeros()
    model.fit(data(), epochs=1, callbacks=[watch, pruning], verbose=0)
    assert set(watch.shares) == {0.75}
    for layer, mask in zip(model.layers, masks, strict=True):
        np.testing.assert_array_equal(layer.kernel.constraint.kept.numpy(), mask)


def test_one_shot_pruning_and_a_schedule_share_the_mask():
    model = compile_model(build())
    prune(model, PruningConfig(target_sparsity=0.5))
    constraint = model.layers[1].kernel.constraint
    model.fit(data(), callbacks=[PruningSchedule(model, PruningConfig())], verbose=0)
    assert model.layers[1].kernel.constraint is constraint
    assert isinstance(constraint.inner, keras.constraints.MaxNorm)
    assert zeros(model) == [96, 48]


def unknown_size():
    return data().filter(lambda x, y: True)


def test_data_of_unknown_size():
    model = compile_model(build())
    with pytest.raises(ConfigError, match=r"end_step must be given when the number of steps is unknown"):
        model.fit(unknown_size(), callbacks=[PruningSchedule(model, PruningConfig())], verbose=0)
    watch = WatchZeros()
    config = PruningConfig(target_sparsity=0.5, end_step=18, frequency=4)
    model.fit(unknown_size(), epochs=2, callbacks=[watch, PruningSchedule(model, config)], verbose=0)
    assert 0 < watch.shares[12] < 0.5
    assert watch.shares[18:] == [0.5] * 6


def test_the_schedule_goes_on_where_it_was_over_data_of_unknown_size():
    config = PruningConfig(target_sparsity=0.5, end_step=30, frequency=5)

    def crash(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    def fit(model, initial_epoch=0, *others):
        watch = WatchZeros()
        callbacks = [watch, PruningSchedule(model, config), *others]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(unknown_size(), initial_epoch=initial_epoch, epochs=4, callbacks=callbacks, verbose=0)
        return watch.shares

    model, interrupted, other = (compile_model(build(), steps_per_execution=4, jit_compile=False) for _ in range(3))
    whole = fit(model)
    assert whole[-1] == 0.5
    shares = fit(interrupted, 0, keras.callbacks.LambdaCallback(on_epoch_begin=crash))
    assert 0 < shares[-1] < 0.5
    assert shares + fit(interrupted, 2) == whole
    with pytest.raises(ConfigError, match=r"The number of steps before epoch 2 must be known.* Give steps_per_epoch"):
        fit(other, 2)


def test_an_end_beyond_data_of_unknown_size_is_told_when_its_size_is_known():
    model = compile_model(build())
    config = PruningConfig(end_step=99)
    with pytest.warns(TfoptWarning, match=r"end_step=99 lies beyond the 24 steps of this fit"):
        model.fit(unknown_size(), epochs=2, callbacks=[PruningSchedule(model, config)], verbose=0)


def test_a_schedule_that_does_not_fit_the_fit():
    model = compile_model(build())
    with pytest.raises(ConfigError, match=r"begin_step must come before the end of pruning. Received: begin_step=10,"):
        model.fit(data(), callbacks=[PruningSchedule(model, PruningConfig(begin_step=10))], verbose=0)
    with pytest.warns(TfoptWarning, match=r"end_step=99 lies beyond the 12 steps of this fit"):
        model.fit(data(), callbacks=[PruningSchedule(model, PruningConfig(end_step=99))], verbose=0)
    assert zeros(model) == [96, 48]


def test_a_model_within_another_is_pruned_while_that_is_fitted():
    student = build()
    inputs = keras.Input((8,))
    outer = compile_model(keras.Model(inputs, student(inputs)))
    outer.fit(data(), epochs=2, callbacks=[PruningSchedule(student, PruningConfig(frequency=2))], verbose=0)
    assert zeros(student) == [96, 48]


def test_a_model_that_is_not_the_callbacks_is_refused():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    other = keras.models.clone_model(model)
    other.compile("sgd", "mse")
    before = [variable.numpy().copy() for variable in model.variables]
    with pytest.raises(ConfigError, match="was made for"):
        other.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0, callbacks=[PruningSchedule(model)])
    assert all(np.array_equal(old, new.numpy()) for old, new in zip(before, model.variables, strict=True))
