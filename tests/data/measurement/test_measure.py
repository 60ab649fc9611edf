"""`measure` names the stage that limits a pipeline, and how long a step waits, as a loop of steps shows it."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import EpochCounter, measure, pipeline
from tfopt.errors import ConfigError

SLOW_MS = 8.0  # long, so that other processes of the machine matter little
BATCH = 4


def sleep(number):
    time.sleep(SLOW_MS / 1e3)
    return number


def slow_python(number):
    return tf.ensure_shape(tf.numpy_function(sleep, [number], tf.int64), number.shape)


def slow_tensorflow(number):
    """Keeps a processor core busy."""
    seed = tf.stack([number, number])
    total = tf.reduce_sum(tf.linalg.matmul(*2 * [tf.random.stateless_uniform([160, 160], seed)]))
    return number + tf.cast(total * 0, tf.int64)


def generate():
    for number in range(4000):
        yield sleep(number)


def numbers(count=4000):
    return tf.data.Dataset.range(count)


def slow_map():
    return numbers().shuffle(50).map(slow_tensorflow).batch(BATCH).prefetch(2)


def slow_generator():
    made = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))
    return made.map(lambda number: number + 1, num_parallel_calls=2).batch(BATCH).prefetch(2)


def slow_files():
    def read(number):
        return numbers(40).map(slow_python)

    return numbers(100).interleave(read, cycle_length=2).map(lambda number: number + 1).batch(BATCH).prefetch(2)


def slow_decode():
    return numbers().shuffle(50).map(slow_python, num_parallel_calls=2).batch(BATCH).prefetch(2)


def slow_filter():
    return numbers().filter(lambda number: slow_python(number) % 4 > 0).batch(BATCH).prefetch(2)


def large_shuffle():
    return numbers(200).map(slow_python, num_parallel_calls=2).shuffle(200).batch(BATCH).prefetch(2)


def slow_batch():
    wide = numbers(400).map(lambda number: tf.zeros([1_000_000], tf.float32))
    return wide.take(8).cache().repeat(50).padded_batch(16, [None]).prefetch(2)


def slow_augmentation():
    def augment(batch, seeds):
        return slow_python(batch)

    zipped = tf.data.Dataset.zip(numbers(), tf.data.Dataset.random(seed=0))
    return zipped.batch(2).map(augment).prefetch(2)


PIPELINES = {
    slow_map: "map slow_tensorflow",
    slow_generator: "generator",
    slow_files: "interleave read",
    slow_decode: "map slow_python",
    slow_filter: "filter lambda",
    large_shuffle: "shuffle 200",
    slow_batch: "padded batch 16",
    slow_augmentation: "map augment",
}


def waited_ms(dataset, step_ms, batches=30):
    """The reference: the mean wait of a loop with steps, after the batches that were prepared in advance."""
    waits = []
    iterator = iter(dataset)
    for _ in range(batches):
        start = time.perf_counter()
        next(iterator)
        waits.append(time.perf_counter() - start)
        time.sleep(step_ms / 1e3)
    return 1e3 * float(np.mean(waits[batches // 3 :]))


@pytest.mark.timed
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
def test_the_slowed_stage_is_named(make):
    report = measure(make(), seconds=1, step_time_ms=1)
    assert report.slowest == PIPELINES[make], report
    assert report.advice[0].startswith(PIPELINES[make])
    assert f"{report.slowest} " in str(report)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "step_ms"), [(slow_generator, 9), (slow_decode, 2), (slow_filter, 9)])
def test_the_wait_is_that_of_a_loop_with_steps(make, step_ms):
    """A loop before and one after show how busy the machine is with something else; to a tenth if it is idle."""
    pairs = []
    for _ in range(3):
        before = waited_ms(make(), step_ms)
        report = measure(make(), seconds=1.5, step_time_ms=step_ms)
        after = waited_ms(make(), step_ms)
        pairs.append((report.wait_ms, (before + after) / 2))
        if report.wait_ms == pytest.approx(pairs[-1][1], rel=0.1):
            return
    assert any(measured / 2 < foretold < 2 * measured for foretold, measured in pairs), pairs


@pytest.mark.timed
def test_a_slow_stage_and_the_wait_for_it_are_found():
    dataset = numbers(400).shuffle(20).map(slow_python).batch(4).prefetch(2)
    report = measure(dataset, seconds=0.7, step_time_ms=4)
    assert report.slowest == "map slow_python"
    assert [stage.name for stage in report.stages] == ["Range", "shuffle 20", "map slow_python", "batch 4"]
    assert report.batches_per_epoch == 100
    assert report.batch_ms > 4 * SLOW_MS
    assert 0 < report.wait_ms < 3 * report.batch_ms  # a busy machine lengthens either
    assert "runs Python" in report.advice[0]
    assert "convert" in report.advice[0]
    assert report.to_dict()["stages"][2]["outputs_per_batch"] == 4


@pytest.mark.timed
@pytest.mark.slow
def test_a_fast_pipeline_needs_no_change():
    x = np.zeros((256, 8), "float32")
    counter = EpochCounter()
    report = measure(pipeline((x, x), batch_size=32, epoch=counter), seconds=0.4, step_time_ms=60)
    assert report.wait_share < 0.05
    assert report.advice[0].startswith("none: a step waits")
    assert [stage.name for stage in report.stages] == ["arrays in memory", "shuffle 256", "batch 32"]


@pytest.mark.slow
def test_stages_before_a_cache_count_in_the_first_epoch_only():
    dataset = numbers(40).map(slow_python).cache().map(lambda number: (number, number)).batch(4)
    report = measure(dataset, seconds=0.3)
    assert [stage.only_first_epoch for stage in report.stages] == [True, True, False, False]
    assert report.slowest not in ("map slow_python", "Range")
    assert report.wait_ms is None
    assert "wait of a step: unavailable (step_time_ms was not given)" in str(report)


def test_the_steps_can_be_the_users_own():
    seen = []
    measure(numbers(200).batch(4), seconds=0.1, step=seen.append)
    assert len(seen) > 10


def test_what_is_no_data_set_of_batches_is_refused():
    with pytest.raises(ConfigError, match=r"dataset must be a tf\.data\.Dataset of batches\. Received: a ndarray"):
        measure(np.zeros(3))
    with pytest.raises(ConfigError, match="must hold at least one batch"):
        measure(numbers(3).filter(lambda number: number > 5).batch(2), seconds=0.1)


@pytest.mark.slow
def test_a_data_set_that_cannot_be_taken_apart_is_measured_as_a_whole():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    dataset = numbers(100).map(lambda number: tf.cast([number], tf.float32)).batch(4)
    report = measure(dataset, seconds=0.1, step=lambda batch: model(batch))
    assert report.examples_per_second > 0


@pytest.mark.slow
def test_a_pipeline_that_nobody_else_holds():
    """The functions of a data set must live as long as its stages are measured."""
    images = np.zeros((64, 8, 8, 1), "float32")
    report = measure(pipeline((images, np.arange(64)), batch_size=8, random_shift=1, epoch=EpochCounter()), seconds=0.3)
    assert any(stage.name.startswith("map") for stage in report.stages)
