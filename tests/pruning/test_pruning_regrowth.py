"""Regrowth and movement on the schedule: which weights return, and that the number of zeros stays exact."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.pruning import PruningConfig, PruningSchedule, prune
from tfopt.pruning.callback import exchange

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 96)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCHES = [(X[:48], Y[:48]), (X[48:], Y[48:])]


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def build():
    head = keras.layers.Dense(4, dtype="float32")
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), head])


class Watch(keras.callbacks.Callback):
    """Keeps masks and weights before each update, which is made at the begin of a step, and after it."""

    def __init__(self, model):
        super().__init__()
        self.kernels = [layer.kernel for layer in model.layers]
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append([(k.constraint.kept.numpy(), k.numpy()) for k in self.kernels])

    def on_train_batch_end(self, batch, logs=None):
        for kernel in self.kernels:
            assert not kernel.numpy()[~kernel.constraint.kept.numpy()].any()


def mean_gradient(model, kernel):
    total = np.zeros(kernel.shape)
    for x, y in BATCHES:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        total += tape.gradient(loss, kernel.value).numpy()
    return total / len(BATCHES)


@pytest.mark.parametrize("seed", range(5))
def test_an_exchange_keeps_the_number_of_zeros(seed):
    rng = np.random.default_rng(seed)
    before = rng.random((12, 9)) < 0.6
    kept = before & (rng.random((12, 9)) < 0.7)
    weights, gradients = np.where(kept, rng.normal(size=(12, 9)), 0), rng.normal(size=(12, 9))
    after = exchange(kept, before, weights, gradients, 0.25)
    count = round(0.25 * kept.sum())
    assert after.sum() == kept.sum()
    dropped, grown = kept & ~after, after & ~kept
    assert dropped.sum() == grown.sum() == count
    assert set(np.abs(weights[dropped])) == set(np.sort(np.abs(weights[kept]))[:count])
    assert set(np.abs(gradients[grown])) == set(np.sort(np.abs(gradients[~before]))[-count:])


def test_an_exchange_is_limited_by_what_is_pruned():
    before = np.array([True] * 9 + [False])
    after = exchange(before, before, np.arange(10.0), np.ones(10), 0.9)
    assert list(np.flatnonzero(~after)) == [0]
    everything = np.ones(4, bool)
    assert exchange(everything, everything, np.ones(4), np.ones(4), 0.5).all()


@pytest.mark.slow
def test_updates_exchange_the_smallest_weights_for_the_largest_gradients():
    model = build()
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    config = PruningConfig(target_sparsity=0.5, schedule="constant", regrowth=0.5, end_step=24, frequency=6)
    before, after = Watch(model), Watch(model)
    gradients = {}

    class Gradients(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            gradients[len(before.seen) - 1] = [mean_gradient(model, kernel) for kernel in before.kernels]

    pruning = PruningSchedule(model, config, data=BATCHES)
    model.fit(data(), epochs=3, callbacks=[before, Gradients(), pruning, after], verbose=0)
    sizes = [128, 64]
    assert all(kept.sum() == size // 2 for step in after.seen for (kept, _), size in zip(step, sizes, strict=True))
    exchanged = []
    for step in (6, 12, 18):
        for place, size in enumerate(sizes):
            (old, weights), (new, values) = before.seen[step][place], after.seen[step][place]
            share = 0.5 * (1 + np.cos(np.pi * step / 24)) / 2
            count = round(share * size / 2)
            grown, dropped = new & ~old, old & ~new
            assert grown.sum() == dropped.sum() == count
            assert not values[grown].any(), "a regrown weight starts at zero"
            assert np.abs(weights[dropped]).max() <= np.abs(weights[new & old]).min()
            gradient = np.abs(gradients[step][place])
            assert gradient[grown].min() >= gradient[~new & ~old].max()
            exchanged.append(count)
    assert exchanged[0] > exchanged[2] > exchanged[4] > 0, "a half cosine"
    for step in range(24, 36):
        for place in range(2):
            np.testing.assert_array_equal(after.seen[step][place][0], after.seen[18][place][0])


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"scope": "global"}, {"criterion": "taylor"}]
)
def test_sparsity_follows_the_schedule_exactly(settings):
    model = build()
    model.compile("adam", LOSS)
    config = PruningConfig(target_sparsity=0.75, regrowth=0.4, frequency=4, gradient_batches=2, **settings)
    watch, plain = Watch(model), []
    pruning = PruningSchedule(model, config, data=BATCHES)
    history = model.fit(data(), epochs=3, callbacks=[pruning, watch], verbose=0)
    schedule = tfopt.pruning.SCHEDULES["polynomial"](0.0, 0.75, 0, 24)
    for step, masks in enumerate(watch.seen):
        expected = schedule(min(step // 4 * 4, 24))
        groups = [[mask for mask, _ in masks]] if config.scope == "global" else [[mask] for mask, _ in masks]
        for group in groups:
            size = sum(mask.size for mask in group)
            assert sum(np.count_nonzero(~mask) for mask in group) == round(expected * size)
        plain.append(masks)
    assert any((new & ~old).any() for (old, _), (new, _) in zip(watch.seen[11], watch.seen[12], strict=True))
    assert history.history["sparsity"][-1] == 0.75
    assert pruning.report.metrics == {"sparsity": 0.75}


def test_a_regrown_weight_is_not_taken_for_a_pruned_one():
    model = build()
    model.compile("sgd", LOSS)
    prune(model, PruningConfig(target_sparsity=0.5))
    mask = model.layers[0].kernel.constraint
    kept = mask.kept.numpy()
    returned = np.flatnonzero(~kept)[0]
    kept.ravel()[returned] = True
    mask.assign(kept)  # it is zero, and kept
    prune(model, PruningConfig(target_sparsity=0.5, criterion=lambda weights: (weights == 0).astype(float)))
    assert mask.kept.numpy().ravel()[returned]
    assert np.count_nonzero(~mask.kept.numpy()) == 64


def test_movement_is_summed_over_the_updates():
    model = build()
    model.compile(keras.optimizers.SGD(0.2), LOSS)
    config = PruningConfig(target_sparsity=0.5, criterion="movement", end_step=24, frequency=5)
    short = PruningConfig(target_sparsity=0.5, criterion="movement", frequency=5)
    expected = [np.zeros((8, 16)), np.zeros((16, 4))]  # of the second fit

    class Sum(keras.callbacks.Callback):
        step = -1

        def on_train_batch_begin(self, batch, logs=None):
            self.step += 1
            if self.step in (0, 5, 10, 15, 20):
                for place, layer in enumerate(model.layers):
                    expected[place] -= layer.kernel.numpy() * mean_gradient(model, layer.kernel)

    pruning = PruningSchedule(model, config, data=BATCHES)
    before = [variable.numpy() for variable in model.variables]
    model.fit(data(), epochs=1, callbacks=[PruningSchedule(model, short, data=BATCHES)], verbose=0)
    model.set_weights(before)
    for layer in model.layers:  # a new fit forgets the movements of an earlier one, but not its masks
        layer.kernel.constraint.kept.assign(np.ones(layer.kernel.shape, bool))
    model.fit(data(), epochs=3, callbacks=[Sum(), pruning], verbose=0)
    for layer, total in zip(model.layers, expected, strict=True):
        mask = layer.kernel.constraint
        np.testing.assert_allclose(mask.movement.numpy(), total, rtol=1e-4, atol=1e-6)
        assert np.count_nonzero(~mask.kept.numpy()) == mask.kept.numpy().size // 2


CELLS = {
    "one device": {},
    "xla and 4 steps per execution": {"jit_compile": True, "steps_per_execution": 4},
    "moving averages": {"ema_momentum": 0.9},
    "mixed_bfloat16 and micro-batches": {"precision": "mixed_bfloat16", "accumulate": 2},
    "two replicas, 4 steps per execution, mixed_float16": {
        "strategy": "mirrored",
        "steps_per_execution": 4,
        "precision": "mixed_float16",
    },
    "pipeline of two stages": {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "micro_batches": 2},
}


IN_DEPTH = (
    "xla and 4 steps per execution",
    "mixed_bfloat16 and micro-batches",
    "two replicas, 4 steps per execution, mixed_float16",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in IN_DEPTH else name for name in CELLS]
)
def test_zeros_hold_after_every_step_of_tfopts_own(name, two_replicas):
    plain = {"precision": "float32", "strategy": "none", "jit_compile": False, "steps_per_execution": 1}
    settings = {**plain, **CELLS[name]}
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=8, **settings))
    mirrored = settings["strategy"] == "mirrored"
    with two_replicas.scope() if mirrored else contextlib.nullcontext(), plan.scope():
        model = build()
        averages = {"optimizer": plan.optimizer(steps_per_epoch=len(X) // 8)} if "ema_momentum" in settings else {}
        tfopt.compile(model, plan, loss=LOSS, **averages)
    watch = Watch(model)
    config = PruningConfig(target_sparsity=0.75, criterion="taylor", regrowth=0.3, frequency=3, gradient_batches=2)
    pruning = PruningSchedule(model, config, data=BATCHES)
    model.fit(plan.pipeline((X, Y)), epochs=3, callbacks=[watch, pruning], verbose=0)
    assert [np.count_nonzero(layer.kernel.numpy() == 0) for layer in model.layers] == [96, 48]
    middle = len(watch.seen) // 3
    pairs = zip(watch.seen[middle], watch.seen[middle + 2], strict=True)
    assert any((new & ~old).any() for (old, _), (new, _) in pairs), "weights were regrown"
    if mirrored:
        for layer in model.layers:
            np.testing.assert_array_equal(*[each.numpy() for each in layer.kernel.constraint.kept.value.values])
