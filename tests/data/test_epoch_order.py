"""With an epoch counter the order and the shifts of an epoch depend on the seed and its number, on nothing else."""

import gc
import json
import os
import socket
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

from tfopt.data import pipeline
from tfopt.data.epoch_order import EpochCounter
from tfopt.errors import ConfigError

COUNT = 53
NUMBERS = (np.arange(COUNT, dtype="float32"), np.arange(COUNT))
IMAGES = (np.random.default_rng(0).random((12, 5, 6, 2), dtype="float32"), np.arange(12))


def unknown(arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).filter(lambda *parts: True)


FORMS = {
    "arrays": lambda: NUMBERS,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(NUMBERS),
    "unknown cardinality": lambda: unknown(NUMBERS),
}


def order(dataset):
    return [int(label) for _, labels in dataset for label in labels]


def at(counter, epoch, dataset):
    counter.assign(epoch)
    return order(dataset)


def equal(one, other):
    pairs = zip(tf.nest.flatten(list(one)), tf.nest.flatten(list(other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_the_epoch_and_the_seed_alone_decide_the_order(form):
    counter = EpochCounter()
    dataset = pipeline(FORMS[form](), batch_size=8, epoch=counter, seed=1)
    orders = [at(counter, epoch, dataset) for epoch in range(4)]
    assert all(sorted(one) == list(range(COUNT)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4
    assert list(range(COUNT)) not in orders
    # In another place of the sequence, twice, and after another global seed:
    assert at(counter, 2, dataset) == order(dataset) == orders[2]
    keras.utils.set_random_seed(99)
    other = EpochCounter()
    again = pipeline(FORMS[form](), batch_size=8, epoch=other, seed=1)
    assert at(other, 3, again) == orders[3]
    assert at(other, 3, pipeline(FORMS[form](), batch_size=8, epoch=other, seed=2)) != orders[3]
    # Another size of batches changes none of it.
    assert at(other, 3, pipeline(FORMS[form](), batch_size=5, epoch=other, seed=1)) == orders[3]


@pytest.mark.slow
def test_another_process_has_the_same_order(fresh_python):
    code = """
import numpy as np
from tfopt.data import pipeline
from tfopt.data.epoch_order import EpochCounter
counter = EpochCounter()
dataset = pipeline((np.arange(53.0), np.arange(53)), batch_size=8, epoch=counter)
counter.assign(7)
print([int(label) for _, labels in dataset for label in labels])
"""
    done = fresh_python("-c", code, check=True)
    counter = EpochCounter()
    assert json.loads(done.stdout) == at(counter, 7, pipeline(NUMBERS, batch_size=8, epoch=counter))


@pytest.mark.parametrize("form", FORMS)
def test_while_nobody_counts_each_iterator_is_new_and_each_run_the_same(form):
    def two():
        keras.utils.set_random_seed(3)
        dataset = pipeline(FORMS[form](), batch_size=8, epoch=EpochCounter())
        return order(dataset), order(dataset)

    first, second = two()
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert two() == (first, second)


def test_a_counter_can_be_let_go():
    counter = EpochCounter()
    dataset = pipeline(NUMBERS, batch_size=8, epoch=counter)
    assert at(counter, 5, dataset) == order(dataset)
    assert at(counter, -1, dataset) != order(dataset)


@pytest.mark.parametrize("form", [lambda arrays: arrays, pytest.param(unknown, marks=pytest.mark.slow)])
def test_the_shifts_are_those_of_the_epoch(form):
    counter, other = EpochCounter(), EpochCounter()
    dataset = pipeline(form(IMAGES), batch_size=5, random_shift=2, epoch=counter)
    epochs = []
    for epoch in range(2):
        counter.assign(epoch)
        epochs.append(list(dataset))
    assert not equal(epochs[0], epochs[1])
    keras.utils.set_random_seed(99)
    again = pipeline(form(IMAGES), batch_size=5, random_shift=2, epoch=other)
    for epoch in (1, 0):
        other.assign(epoch)
        assert equal(again, epochs[epoch])
    shifted = {int(label): image for images, labels in epochs[0] for image, label in zip(images, labels, strict=True)}
    assert len(shifted) == 12
    assert sum(not np.array_equal(image, IMAGES[0][label]) for label, image in shifted.items()) >= 8


def test_an_epoch_can_be_continued_in_its_middle():
    counter = EpochCounter()
    counter.assign(6)
    whole = order(pipeline(NUMBERS, batch_size=8, epoch=counter))
    rest = order(pipeline(NUMBERS, batch_size=8, epoch=counter).skip(3))
    assert rest == whole[24:]


def test_the_epoch_is_read_when_the_first_batch_is_asked_for():
    """Keras makes the iterator of a next epoch, if steps_per_epoch is given, at the end of the one before."""
    counter = EpochCounter()
    dataset = pipeline(NUMBERS, batch_size=8, epoch=counter)
    expected = at(counter, 2, dataset)
    counter.assign(1)
    iterator = iter(dataset)
    counter.assign(2)
    first = next(iterator)
    counter.assign(3)
    assert order([first, *iterator]) == expected


def test_an_epoch_known_at_once_gives_the_same_elements_by_the_shorter_way():
    counter = EpochCounter()
    images = np.random.default_rng(0).random((60, 8, 8, 1), dtype=np.float32)
    dataset = pipeline((images, np.arange(60)), batch_size=8, epoch=counter, random_shift=2)
    orders = []
    for epoch in range(2):
        counter.assign(epoch)
        through_function = list(dataset)
        tf.random.set_seed(epoch + 5)  # which must not matter
        counter.assign(epoch, at_once=True)
        for (x, y), (other_x, other_y) in zip(through_function, dataset, strict=True):
            np.testing.assert_array_equal(x, other_x)
            np.testing.assert_array_equal(y, other_y)
        orders.append(order(through_function))
    assert orders[0] != orders[1]


def test_keras_fit_sees_the_epoch_that_was_assigned():
    counter = EpochCounter()
    seen = []

    def spy(x, y):
        return tf.numpy_function(lambda x: seen.append(x.astype(int).tolist()) or x, [x], tf.float32), y

    dataset = pipeline(NUMBERS, batch_size=8, epoch=counter)
    expected = [at(counter, epoch, dataset) for epoch in range(3)]
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: counter.assign(epoch))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    spied = dataset.map(spy).map(lambda x, y: (tf.reshape(x, (-1, 1)), tf.cast(y, tf.float32)))
    model.fit(spied, epochs=3, initial_epoch=1, callbacks=[count], shuffle=False, verbose=0)
    assert [number for batch in seen for number in batch] == expected[1] + expected[2]


def test_a_cached_source_is_read_once():
    reads = []

    def read():
        for number in range(10):
            reads.append(number)
            yield np.float32(number), number

    signature = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
    counter = EpochCounter()
    dataset = pipeline(tf.data.Dataset.from_generator(read, output_signature=signature), batch_size=4, epoch=counter)
    assert at(counter, 0, dataset) != at(counter, 1, dataset)
    assert len(reads) == 10


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_can_be_counted_and_have_a_static_size(drop_remainder):
    counter = EpochCounter()
    options = {"batch_size": 8, "epoch": counter, "drop_remainder": drop_remainder}
    batches = 6 if drop_remainder else 7
    dataset = pipeline(NUMBERS, **options)
    assert len(dataset) == len(list(dataset)) == batches
    assert compute_batch_size(dataset) == 8
    assert pipeline(unknown(NUMBERS), **options).cardinality() == tf.data.UNKNOWN_CARDINALITY
    endless = tf.data.Dataset.from_tensor_slices(NUMBERS).repeat()
    assert pipeline(endless, cache=False, **options).cardinality() == tf.data.INFINITE_CARDINALITY
    assert len(list(pipeline(endless, cache=False, **options).take(20))) == 20


def test_a_data_set_keeps_its_counter():
    counter = EpochCounter()
    dataset = pipeline(NUMBERS, batch_size=8, epoch=counter)
    expected = at(counter, 4, dataset)
    del counter
    gc.collect()
    assert order(dataset) == expected


def test_evaluation_is_in_order_whatever_the_epoch():
    counter = EpochCounter()
    assert at(counter, 3, pipeline(NUMBERS, batch_size=8, training=False, epoch=counter)) == list(range(COUNT))


def test_an_epoch_below_minus_one_is_refused():
    counter = EpochCounter()
    counter.assign(2)
    with pytest.raises(ConfigError, match=r"at least 0, or -1 .* Received: epoch=-2\."):
        counter.assign(-2)
    assert counter.value == 2


@pytest.mark.parametrize("form", ["arrays", pytest.param("dataset", marks=pytest.mark.slow), "unknown cardinality"])
def test_two_replicas_share_each_batch_of_the_epoch(form, two_replicas):
    with two_replicas.scope():
        counter = EpochCounter()
        counter.assign(0)  # made within the scope, and yet one variable
    dataset = pipeline(FORMS[form](), batch_size=8, epoch=counter)
    distributed = two_replicas.experimental_distribute_dataset(dataset)
    for epoch in (2, 0):
        expected = [int(label) for label in at(counter, epoch, dataset)]
        seen = []
        for _, labels in distributed:
            parts = two_replicas.experimental_local_results(labels)
            assert len(parts[0]) - len(parts[1]) in (0, 1)
            seen += [int(label) for part in parts for label in part]
        assert seen == expected


WORKER = """
import json, sys
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
from tfopt.data.pipeline import pipeline
from tfopt.data.epoch_order import EpochCounter
with strategy.scope():
    counter = EpochCounter()
    if int(sys.argv[1]) == 0:
        counter.assign(0)  # on one worker only: a mirrored variable would wait for the other
numbers = (np.arange(53.0), np.arange(53))
forms = {
    "data": lambda: numbers,
    "auto": lambda: tf.data.Dataset.from_tensor_slices(numbers),
}
seen = {}
for policy, form in forms.items():
    dataset = pipeline(form(), batch_size=8, epoch=counter, auto_shard=policy)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for epoch in (1, 0, 1):
        counter.assign(epoch)
        batches = [strategy.experimental_local_results(labels)[0].numpy().tolist() for _, labels in distributed]
        seen.setdefault(policy, []).append(batches)
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_workers_see_each_example_once_in_every_epoch(fresh_python):
    with socket.socket() as one, socket.socket() as other:
        one.bind(("localhost", 0))
        other.bind(("localhost", 0))
        cluster = {"worker": [f"localhost:{place.getsockname()[1]}" for place in (one, other)]}
    workers = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": ""}
        command = [fresh_python.interpreters["tfopt"], "-c", WORKER, str(index)]
        workers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ended = [worker.communicate(timeout=600) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    seen = [json.loads(output) for output, _ in ended]
    counter = EpochCounter()
    dataset = pipeline(NUMBERS, batch_size=8, epoch=counter)
    for policy in ("data", "auto"):
        for place, epoch in enumerate((1, 0, 1)):
            counter.assign(epoch)
            expected = [labels.numpy().tolist() for _, labels in dataset]
            ours = [first + second for first, second in zip(*(worker[policy][place] for worker in seen), strict=True)]
            assert ours == expected, "both halves of each batch of one process"
