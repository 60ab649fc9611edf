"""A cache stands only for examples that are the same in every epoch, and in every process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.data import Examples, pipeline
from tfopt.data.caching import choose_cache
from tfopt.data.repeatable import changes_every_epoch

RANGE = tf.data.Dataset.range(32)
FLIP = keras.layers.RandomFlip()
GENERATOR = np.random.default_rng(0)
STATE = tf.random.Generator.from_seed(0)


def noise(number):
    return STATE.uniform(()), number


def noise_of_a_layer(number):
    return FLIP(tf.reshape(tf.range(64.0), (8, 8, 1)), training=True), number


def noise_of_numpy(number):
    return tf.ensure_shape(tf.numpy_function(lambda n: GENERATOR.random(), [number], tf.float64), ()), number


def squares(number):
    return tf.ensure_shape(tf.numpy_function(np.square, [number], tf.int64), ()), number


def epochs(batches):
    """The inputs of two epochs, by the number of their example."""
    read = lambda: {int(n): x.numpy().tobytes() for xs, ns in batches for x, n in zip(xs, ns, strict=True)}  # noqa: E731
    return read(), read()


@pytest.mark.parametrize("change", [noise, noise_of_a_layer, noise_of_numpy])
def test_random_changes_of_a_data_set_of_ones_own_are_new_in_every_epoch(change):
    with pytest.warns(tfopt.TfoptWarning, match="draw random numbers, which a cache would repeat"):
        first, second = epochs(pipeline(RANGE.map(change), batch_size=8))
    assert first.keys() == second.keys() == {*range(32)}
    assert first != second


@pytest.mark.parametrize("change", [noise, noise_of_numpy])
def test_random_changes_of_a_source_are_new_in_every_epoch(change, tmp_path):
    examples = Examples(name="noise", train=RANGE, test=RANGE, outputs=1, decode=change)
    first, second = epochs(pipeline(examples, batch_size=8, cache_dir=str(tmp_path)))
    assert first != second
    assert "random numbers" in choose_cache(RANGE, change).reason


@pytest.mark.parametrize("draw", [lambda n: tf.random.normal(()), tf.random.shuffle, tf.image.random_flip_left_right])
def test_every_random_op_is_seen(draw):
    assert changes_every_epoch(tf.data.Dataset.from_tensors(tf.zeros((8, 8, 3))).map(draw))


def test_examples_that_stay_the_same_are_kept():
    by_seed = RANGE.map(lambda n: tf.random.stateless_uniform((), tf.stack([n, n])))
    for same in (RANGE.map(tf.square), RANGE.map(squares), by_seed, RANGE.map(noise).cache(), RANGE.shuffle(9)):
        assert choose_cache(same).place in ("memory", "off")
        assert "random" not in choose_cache(same).reason


@pytest.mark.slow
def test_a_cache_on_disk_is_not_that_of_another_python_function_in_another_process(tmp_path, fresh_python):
    code = f"""
import sys
import numpy as np
import tensorflow as tf
from tfopt.data.disk_cache import cached_on_disk
last = int(sys.argv[1])
number = lambda n: np.int64(n if n < 90 else last)
decode = lambda n: tf.ensure_shape(tf.numpy_function(number, [n], tf.int64), ())
print(sum(int(n) for n in cached_on_disk(tf.data.Dataset.range(100), decode, {str(tmp_path)!r}, "numbers")))
"""
    found = [
        int(fresh_python("-c", code, last, imported="nothing", check=True).stdout)  # hashes differ too
        for last in (1, 2)
    ]
    assert found == [sum(range(90)) + 10 * last for last in (1, 2)]
    assert len([*tmp_path.iterdir()]) == 1
