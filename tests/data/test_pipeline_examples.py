"""The pipeline takes the examples of a source through every stage: cache, shuffle, decode, augment, batch."""

import types

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from tfopt.data import DataConfig, EpochCounter, Examples, decide, epoch_steps, pipeline
from tfopt.errors import ConfigError

COUNT = 53


def numbers(count=COUNT, **more):
    """Examples with two inputs and a weight, made of numbers."""

    def decode(number):
        value = tf.cast(number, tf.float32)
        return {"a": tf.fill([4], value), "b": value}, number, value

    records = tf.data.Dataset.range(count).map(lambda number: number)  # not in memory
    return Examples(name="numbers", train=records, test=records.take(5), outputs=2, decode=decode, **more)


def rows(count=60, **more):
    """Examples whose length is 1 to 9."""

    def decode(number):
        return tf.fill([1 + number % 9], number), tf.fill([1 + number % 9], number)

    records = tf.data.Dataset.range(count)
    return Examples(name="rows", train=records, test=records, outputs=2, decode=decode, **{"padding": (0, -1), **more})


def targets(batches):
    return [int(y) for _, labels, *_ in batches for y in labels]


def at(counter, epoch, batches):
    counter.assign(epoch)
    return list(batches)


def equal(some, others):
    pairs = zip(tf.nest.flatten(list(some)), tf.nest.flatten(list(others)), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("cache", ["memory", "off", "disk"])
def test_every_part_comes_decoded_in_an_order_that_the_cache_does_not_change(cache, tmp_path):
    counter = EpochCounter()
    settings = {"cache": cache, "cache_dir": str(tmp_path), "epoch": counter, "seed": 1}
    batches = pipeline(numbers(), batch_size=8, **settings)
    first, second = at(counter, 0, batches), at(counter, 1, batches)
    assert sorted(targets(first)) == list(range(COUNT)) == sorted(targets(second))
    assert targets(first) != targets(second)
    for inputs, labels, weights in first:
        np.testing.assert_array_equal(inputs["a"], np.repeat(labels[:, None], 4, axis=1))
        np.testing.assert_array_equal(inputs["b"], weights)
    plain = pipeline(numbers(), batch_size=8, epoch=counter, seed=1, cache="off", deterministic=True)
    assert equal(at(counter, 1, plain), second)


def test_without_training_the_examples_of_a_part_are_in_order():
    assert targets(pipeline(numbers(), batch_size=8, training=False)) == list(range(5))
    assert targets(pipeline(numbers(), batch_size=8, training=False, split="train")) == list(range(COUNT))


def add_noise(example, seed):
    """An augmentation of batches or of single examples."""
    inputs, *others = example
    noise = tf.random.stateless_uniform((), seed)
    return {**inputs, "a": inputs["a"] + noise}, *others


def on_batches(example, seed):
    assert example[0]["a"].shape.rank == 2
    return add_noise(example, seed)


def on_examples(example, seed):
    raise AssertionError  # per_example is called instead


def single(example, seed):
    assert example[0]["a"].shape == (4,)
    return add_noise(example, seed)


on_examples.per_example = single


@pytest.mark.parametrize("augment", [on_batches, on_examples])
def test_augmentation_depends_on_the_seed_and_the_epoch_alone(augment):
    def noises(batches):
        return [float(noise) for inputs, *_ in batches for noise in inputs["a"][:, 0] - inputs["b"]]

    counter = EpochCounter()
    batches = pipeline(numbers(), batch_size=8, augment=augment, epoch=counter)
    epochs = [at(counter, number, batches) for number in range(2)]
    assert sorted(targets(epochs[0])) == list(range(COUNT))
    drawn = {round(noise, 3) for noise in noises(epochs[0])}
    assert len(drawn) >= 40 if augment is on_examples else len(drawn) == 7
    assert drawn != {round(noise, 3) for noise in noises(epochs[1])}
    keras.utils.set_random_seed(99)
    again = pipeline(numbers(), batch_size=8, augment=augment, epoch=counter, cache="off")
    assert equal(at(counter, 1, again), epochs[1])
    assert equal(list(again.skip(3)), epochs[1][3:])
    assert set(noises(pipeline(numbers(), batch_size=8, training=False, augment=augment))) == {0.0}


def test_an_epoch_of_buckets_holds_each_example_once_with_little_padding():
    counter = EpochCounter()
    batches = pipeline(rows(), batch_size=4, bucket_boundaries=(3, 6), epoch=counter)
    epoch = at(counter, 2, batches)
    seen = []
    for x, y in epoch:
        lengths = [int(length) for length in tf.reduce_sum(tf.cast(y >= 0, tf.int32), axis=1)]
        assert len({(length > 3) + (length > 6) for length in lengths}) == 1
        assert x.shape[1] == max(lengths)
        seen += [int(value) for value in y[:, 0]]
    assert sorted(seen) == list(range(60))
    assert equal(list(batches.skip(4)), epoch[4:])
    assert all(len(x) == 4 for x, _ in pipeline(rows(), batch_size=4, bucket_boundaries=(3, 6), drop_remainder=True))


def test_examples_of_different_length_are_filled_up():
    for x, y in pipeline(rows(), batch_size=16, augment=lambda example, seed: example):
        assert x.shape == y.shape
        assert int(tf.reduce_min(y)) == -1
        np.testing.assert_array_equal(x == 0, (y == -1) | (y == 0))


@pytest.mark.parametrize(
    ("examples", "boundaries", "words"),
    [
        (numbers(), (4,), "needs examples that differ in length"),
        (rows(padding=None), (4,), "needs the values that fill a batch"),
        (rows(), (4, 4), "each larger than the one before"),
    ],
)
def test_wrong_buckets_are_refused(examples, boundaries, words):
    with pytest.raises(ConfigError, match=words):
        pipeline(examples, batch_size=4, bucket_boundaries=boundaries)


def test_repeated_data_goes_on_in_a_new_order_and_depends_on_the_seed_alone():
    counter = EpochCounter()
    batches = pipeline(numbers(), batch_size=8, repeat=True, epoch=counter)
    assert int(batches.cardinality()) == tf.data.INFINITE_CARDINALITY
    stream = targets(at(counter, 0, batches.take(20)))
    assert sorted(stream[:COUNT]) == sorted(stream[COUNT : 2 * COUNT]) == list(range(COUNT))
    assert stream[:COUNT] != stream[COUNT : 2 * COUNT]
    assert targets(at(counter, 5, batches.skip(12).take(8))) == stream[96:]
    endless = pipeline(tf.data.Dataset.counter().map(lambda n: (n, n)), batch_size=8, cache=False, epoch=counter)
    assert targets(at(counter, 0, endless.take(3))) == targets(at(counter, 4, endless.take(3)))


def test_a_smaller_buffer_shuffles_within_a_window():
    order = targets(pipeline(numbers(), batch_size=8, shuffle_buffer=4))
    assert order != sorted(order)
    assert max(number - place for place, number in enumerate(order)) < 4


def test_the_decisions_name_each_setting_and_its_reason(monkeypatch):
    settings = DataConfig(bucket_boundaries=(8, 16), deterministic=False, service="grpc://host:1")
    decisions = {each.setting: each for each in decide(numbers(), settings)}
    assert list(decisions) == ["cache", "shuffle_buffer", "deterministic", "bucket_boundaries", "service"]
    assert decisions["cache"].value == "off"
    assert "each worker reads other records" in decisions["cache"].reason
    assert decisions["shuffle_buffer"].value == str(COUNT)
    (cache,) = decide(numbers(), settings, split="validation")[:1]
    assert cache.value == "memory"
    assert "may be used (80% of the free memory)" in cache.reason
    assert [each.setting for each in decide(numbers(), split="validation")] == ["cache"]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    (cache, _) = decide(numbers())
    assert cache.value == "off"
    assert "the decoded examples take" in cache.reason
    assert "cache_dir names no directory" in cache.reason


def test_the_steps_of_an_epoch_are_known_or_asked_for():
    assert epoch_steps(numbers(), 8) == 7
    assert epoch_steps(numbers(), 8, drop_remainder=True) == 6
    assert epoch_steps(tf.data.Dataset.counter(), 8, steps_per_epoch=3) == 3
    with pytest.raises(ConfigError, match=r"examples without end\. Set steps_per_epoch"):
        epoch_steps(tf.data.Dataset.counter(), 8)
    with pytest.raises(ConfigError, match=r"examples of unknown number\. Set steps_per_epoch"):
        epoch_steps(tf.data.Dataset.range(9).filter(lambda n: n > 3), 8)
    with pytest.raises(ConfigError, match=r"53 examples, with 64 in each step"):
        epoch_steps(numbers(), 64, drop_remainder=True)


@pytest.mark.parametrize("at_once", [True, False])
def test_batches_are_copied_to_a_device_in_advance(at_once):
    counter = EpochCounter()
    counter.assign(1, at_once=at_once)
    here = list(pipeline(numbers(), batch_size=8, epoch=counter))
    there = list(pipeline(numbers(), batch_size=8, epoch=counter, device="CPU:1"))
    assert {each.device[-5:] for each in tf.nest.flatten(there)} == {"CPU:1"}
    assert equal(here, there)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"device='GPU:7'\. TensorFlow sees CPU:0, CPU:1"):
        pipeline(numbers(), batch_size=8, device="GPU:7")
