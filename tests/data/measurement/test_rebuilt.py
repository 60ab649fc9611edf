"""A pipeline that is built again with one change gives the same elements, computed in another way."""

import numpy as np
import tensorflow as tf

from tfopt.data.measurement.stages import continued, in_float32, in_parallel, stages_of, up_to

TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(12), 10.0 * tf.range(12.0)), -1.0)


def looked_up(number):
    return {"x": TABLE.lookup(tf.cast(number, tf.int32)), "python": tf.numpy_function(np.negative, [number], tf.int64)}


def test_a_stage_is_replaced_by_its_own_elements():
    dataset = tf.data.Dataset.range(12).map(looked_up).shuffle(4, seed=1).batch(3)
    last = stages_of(dataset)
    (stage,) = (each for each in last.walk() if each.kind == "map")
    kept = up_to(stage).cache()
    changed = continued(stage, last, kept.repeat(2))
    found = [np.concatenate(each) for each in zip(*changed.as_numpy_iterator(), strict=True)]
    # the components of a dictionary are in the order of its keys
    assert sorted(found[0]) == sorted([-n for n in range(12)] * 2)
    assert sorted(found[1]) == sorted([10.0 * n for n in range(12)] * 2)
    assert continued(last, last, dataset) is dataset


def test_a_serial_map_runs_in_parallel():
    last = stages_of(tf.data.Dataset.range(100).map(lambda n: (n * n, looked_up(n)["x"])).batch(10))
    (serial,) = (each for each in last.walk() if each.kind == "map")
    changed = in_parallel(serial, last)
    (stage,) = (each for each in stages_of(changed).walk() if each.kind == "map")
    assert (serial.is_serial, stage.is_serial) == (True, False)
    squares = np.concatenate([batch for batch, _ in changed.as_numpy_iterator()])
    assert np.array_equal(squares, np.arange(100) ** 2)


def test_float64_becomes_float32_everywhere():
    halves = np.arange(8) / 2

    def computed(x):
        inner = tf.while_loop(lambda i, _: i < 3, lambda i, sum: (i + 1, sum + x), (0, tf.zeros((), tf.float64)))[1]
        return tf.cond(x > 1.0, lambda: inner, lambda: tf.constant(-1.0, tf.float64)), tf.cast(x, tf.int64)

    wide = tf.data.Dataset.from_tensor_slices(halves).map(computed).filter(lambda x, _: x < 9.0).batch(4)
    changed = in_float32(stages_of(wide))
    assert [each.dtype for each in changed.element_spec] == [tf.float32, tf.int64]
    for one, other in zip(wide.as_numpy_iterator(), changed.as_numpy_iterator(), strict=True):
        assert np.allclose(one[0], other[0])
        assert np.array_equal(one[1], other[1])
