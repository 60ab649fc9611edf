"""Data in a form that cannot be read is refused with the form to give instead."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import measure
from tfopt.data.user_data import iterate_batches
from tfopt.errors import ConfigError


def objects(values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (objects([np.zeros(4), np.zeros(4)]), r"dtype object and shape \(2,\). Make it an array .* np.stack"),
        (np.zeros((3, 4), object), r"dtype object and shape \(3, 4\). Make it an array .* astype\('float32'\)"),
        (iter([np.zeros((3, 4), object)]), "dtype object"),
        ((np.zeros((2, 4)), objects([0, 1])), "dtype object"),
        (lambda: np.zeros((2, 4)), "Received: function. Call the function and pass its result"),
        ("x.npy", r"Received: str. Read the file first and pass the array: np.load"),
        (3, "Received: int. Put the examples in an array"),
    ],
    ids=["objects", "numbers_as_objects", "in_a_batch", "labels", "function", "name", "number"],
)
def test_the_error_names_the_form_to_give(data, message):
    with pytest.raises(ConfigError, match=message):
        list(iterate_batches(data))


def test_strings_may_be_objects():
    words = objects(["one", b"two"])
    (((found, labels),),) = [list(iterate_batches(words))]
    assert (found.tolist(), labels) == (["one", b"two"], None)
    assert [len(batch) for batch, _ in iterate_batches(tf.constant(["a", "b", "c"]))] == [3]


def test_a_list_of_arrays_is_not_taken_for_the_inputs_of_a_model():
    a, b = np.zeros((3, 4)), np.zeros((3, 2))
    with pytest.raises(ConfigError, match=r"2 inputs .* a list of 2 arrays.*Pass a tuple \(a, b\).* or a dict"):
        list(iterate_batches([a, b], inputs=2))
    for data in ((a, b), {"a": a, "b": b}, ([a, b], np.zeros(3)), [(a, b)]):
        ((inputs, _),) = iterate_batches(data, inputs=2)
        assert [part.shape for part in tf.nest.flatten(inputs)] == [(3, 4), (3, 2)]
    assert len(list(iterate_batches([a, a], inputs=1))) == 2  # two batches


def test_a_data_set_that_cannot_be_read_is_told():
    def broken(number):
        with tf.control_dependencies([tf.debugging.Assert(number < 3, ["part-7 is damaged", number])]):
            return tf.cast(tf.fill([2], number), tf.float32)

    batches = tf.data.Dataset.range(5).map(broken).batch(1)
    for read in (lambda: list(iterate_batches(batches)), lambda: measure(batches, seconds=0.1)):
        with pytest.raises(ConfigError, match=r"Examples must be readable. Received: .*part-7 is damaged"):
            read()
