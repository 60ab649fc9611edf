"""Reads example data in the forms that users have: arrays, tf.data datasets, or any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import words_of
from tfopt.errors import ConfigError

CHUNK = 32
OBJECT_REMEDY = "Make it an array of numbers with np.stack or astype('float32'), or of strings with astype(str)."


def iterate_batches(data: Any, limit: int | None = None, inputs: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yields (inputs, labels) as arrays, batch by batch. The labels are None if the data has none.

    Args:
        data: An array of examples; a tuple (inputs, labels) of arrays; a batched tf.data.Dataset; or another iterable
            of batches, where a batch is an array, a dict of arrays, or a tuple (inputs, labels[, weights]). For a model
            with several inputs, inputs is a dict, or a list or tuple with one array for each input.
        limit: Number of examples after which to stop.
        inputs: Number of inputs of the model. If it is above 1, a tuple with this number of arrays holds the inputs.
    Raises:
        ConfigError: The data has another form, or its arrays differ in length or hold Python objects.
    Example:
        >>> [x.shape for x, labels in iterate_batches(np.zeros((70, 3)), limit=40)]
        [(32, 3), (8, 3)]
    """
    remaining = np.inf if limit is None else limit
    for batch in _batches(data, inputs):
        values, labels = _split(batch, inputs)
        values = tf.nest.map_structure(_array, values)
        labels = None if labels is None else tf.nest.map_structure(_array, labels)
        size = _length(values)
        if size == 0:
            continue
        given = {len(part) for part in tf.nest.flatten(labels) if part is not None and part.ndim}
        if given - {size}:
            raise ConfigError(
                f"data must have one label per example. Received: a batch of {size} examples and {min(given)} labels. "
                "Give labels whose first axis is as long as that of the inputs."
            )
        if size > remaining:
            values, labels = _slice((values, labels), slice(int(remaining)))
            size = int(remaining)
        yield values, labels
        remaining -= size
        if remaining <= 0:
            return


def _batches(data: Any, inputs: int) -> Iterable[Any]:
    if isinstance(data, tf.data.Dataset):
        return _read(data)
    if isinstance(data, (np.ndarray, tf.Tensor, dict)) or _is_tuple_of_arrays(data, inputs):
        arrays = tf.nest.map_structure(_array, data)
        lengths = {len(part) for part in tf.nest.flatten(_split(arrays, inputs)[0]) if part.ndim}
        if len(lengths) > 1:
            raise ConfigError(
                f"data must have as many examples of each input. Received: arrays of {sorted(lengths)} examples. "
                "Give arrays of one length."
            )
        return (_slice(arrays, slice(start, start + CHUNK)) for start in range(0, _length(arrays), CHUNK))
    if inputs > 1 and _is_list_of_arrays(data):
        raise ConfigError(
            f"data must hold the {inputs} inputs of the model together. Received: a list of {len(data)} arrays, which "
            "are read as batches. Pass a tuple (a, b) of arrays, or a dict by input name."
        )
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return data
    raise ConfigError(
        "data must be an array, a tuple (inputs, labels), a tf.data.Dataset or an iterable of batches. "
        f"Received: {type(data).__name__}. {_remedy(data)}"
    )


def _read(dataset: tf.data.Dataset) -> Iterator[Any]:
    with readable():
        yield from dataset


@contextmanager
def readable() -> Iterator[None]:
    """Turns the error of a data set that cannot be read into one that says what is wrong with the examples.

    Raises:
        ConfigError: The examples cannot be read.
    Example:
        >>> with readable():
        ...     for example in tf.data.TFRecordDataset("missing.tfrecord"):
        ...         pass
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: Examples must be readable. Received: missing.tfrecord; No such file or directory. ...
    """
    try:
        yield
    except tf.errors.OpError as error:
        if "Iterator::" not in str(error) and "IteratorGetNext" not in str(error):
            raise
        raise ConfigError(
            f"Examples must be readable. Received: {words_of(error)}. Repair or leave out what the message names."
        ) from error


def _remedy(data: Any) -> str:
    if isinstance(data, (str, bytes)):
        return "Read the file first and pass the array: np.load(file)."
    if callable(data):
        return "Call the function and pass its result: an array, or a generator of batches."
    return "Put the examples in an array whose first axis counts them."


def _array(values: Any) -> np.ndarray:
    array = np.asarray(values)
    # TensorFlow's strings are objects in NumPy. None stands for the labels of an output that has none.
    if array.dtype == object and not all(value is None or isinstance(value, (str, bytes)) for value in array.flat):
        raise ConfigError(
            "data must be arrays of numbers or strings. "
            f"Received: an array of dtype object and shape {array.shape}. {OBJECT_REMEDY}"
        )
    return array


def _is_tuple_of_arrays(data: Any, inputs: int) -> bool:
    if not isinstance(data, tuple):
        return False
    head = data[0] if data and isinstance(data[0], (tuple, list)) and len(data[0]) == inputs > 1 else ()
    parts = (*head, *data[1:]) if head else data
    return all(isinstance(part, (np.ndarray, tf.Tensor, dict)) for part in parts)


def _is_list_of_arrays(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(part, (np.ndarray, tf.Tensor)) for part in data)


def _length(arrays: Any) -> int:
    first = tf.nest.flatten(arrays)[0]
    if first.ndim == 0:
        raise ConfigError(
            "data must be batches, and the first axis of a batch counts its examples. "
            f"Received: a single value of dtype {first.dtype}. Put the examples in one array."
        )
    return len(first)


def _slice(arrays: Any, part: slice) -> Any:
    return tf.nest.map_structure(lambda array: None if array is None else array[part], arrays)


def _split(batch: Any, inputs: int) -> tuple[Any, Any]:
    if isinstance(batch, tuple):
        if len(batch) == inputs > 1 and not isinstance(batch[0], (tuple, list, dict)):
            return batch, None
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None
