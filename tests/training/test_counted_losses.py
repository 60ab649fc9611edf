"""A loss that counts some items only gives the weights and figures of the whole batch, however it is divided."""

import functools

import keras
import numpy as np
import pytest

from tfopt.training import TrainingConfig, compile, plan

BATCH, LENGTH, WORDS = 8, 6, 9
RNG = np.random.default_rng(0)


def sentences(count):
    """Returns word and class numbers of sentences of very different length, with a weight for each word."""
    x = RNG.integers(1, WORDS, (count, LENGTH)).astype("int32")
    y = RNG.integers(0, WORDS, (count, LENGTH)).astype("int32")
    weights = RNG.uniform(0.1, 3.0, (count, LENGTH)).astype("float32")
    for place in range(count):
        x[place, 1 + place % BATCH :], y[place, 1 + place % BATCH :] = 0, -1
    return x, y, weights


X, Y, WEIGHTS = sentences(2 * BATCH + 3)  # the last batch is smaller: on two replicas, of two and one
INDEPENDENT = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def labelled():
    """Ignores a class; has a regularizer, which counts once."""
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Dense(WORDS, kernel_regularizer="l2")]
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1), (X, Y)


def masked():
    """Has a mask of its input, weights, and losses that a layer adds."""
    layers = [
        keras.layers.Embedding(WORDS, 4, mask_zero=True),
        keras.layers.Dense(WORDS, activity_regularizer="l2"),
    ]
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
    return model, INDEPENDENT, (X, np.maximum(Y, 0), WEIGHTS)


def weighted():
    """Divides by the sum of the weights."""
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
    data = X, Y[:, :1].astype("float32"), WEIGHTS[:, 0]
    return model, keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), data


def two_losses():
    """One output counts the words under a mask, another all."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(WORDS, 4, name="hidden")(inputs)
    outputs = {
        "a": keras.layers.Dense(WORDS, name="a")(hidden),
        "b": keras.layers.Dense(WORDS, name="b")(hidden),
    }
    loss = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1), "b": INDEPENDENT}
    return keras.Model(inputs, outputs), loss, (X, {"a": Y, "b": np.maximum(Y, 0)})


@functools.cache
def plain(make):
    keras.utils.set_random_seed(1)
    model, loss, data = make()
    model.compile(keras.optimizers.SGD(1.0), loss, weighted_metrics=[], jit_compile=False)
    weight = data[2] if len(data) > 2 else None
    history = model.fit(*data[:2], sample_weight=weight, batch_size=BATCH, shuffle=False, verbose=0).history
    evaluated = model.evaluate(*data[:2], sample_weight=weight, batch_size=BATCH, verbose=0, return_dict=True)
    return model.get_weights(), history["loss"][0], evaluated["loss"]


def ours(make, **settings):
    keras.utils.set_random_seed(1)
    decided = plan(
        TrainingConfig(**{"precision": "float32", "global_batch_size": BATCH, "jit_compile": False, **settings})
    )
    with decided.scope():
        model, loss, data = make()
    report = compile(model, decided, optimizer=keras.optimizers.SGD(1.0), loss=loss, weighted_metrics=[])
    assert not report.skipped
    batches = decided.pipeline(data, training=False)
    loss = model.fit(batches, verbose=0).history["loss"][0]
    return model.get_weights(), loss, model.evaluate(batches, verbose=0, return_dict=True)["loss"]


def check(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())
    assert found[1:] == pytest.approx(expected[1:], rel=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [masked, weighted, pytest.param(two_losses, marks=pytest.mark.slow)])
def test_micro_batches_give_what_the_whole_batch_gives(make):
    check(ours(make, accumulate=4), plain(make))


@pytest.mark.parametrize(("make", "accumulate"), [(labelled, 1), pytest.param(masked, 3, marks=pytest.mark.slow)])
def test_replicas_give_what_one_device_gives(two_replicas, make, accumulate):
    check(ours(make, strategy=two_replicas, accumulate=accumulate), plain(make))


@pytest.mark.slow
def test_stages_of_a_pipeline_give_what_one_device_gives():
    settings = {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "micro_batches": 3}
    check(ours(masked, **settings), plain(masked))
