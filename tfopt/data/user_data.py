"""Examples in the forms that users have: single ones for the pipeline, or batches of arrays, data sets and iterables.

The error for another form names the form to give instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of, words_of
from tfopt.errors import ConfigError, warn

CHUNK = 32
OBJECT_REMEDY = "Make it an array of numbers with np.stack or astype('float32'), or of strings with astype(str)."
RULE = "The pipeline takes single examples: an array, a tuple (inputs, labels) of arrays, or a tf.data.Dataset."


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
    def read() -> Iterator[Any]:
        with readable():
            yield from data

    if isinstance(data, tf.data.Dataset):
        return read()
    if isinstance(data, (np.ndarray, tf.Tensor, dict)) or _is_tuple_of_arrays(data, inputs):
        arrays = tf.nest.map_structure(_array, data)
        lengths = {len(part) for part in tf.nest.flatten(_split(arrays, inputs)[0]) if part.ndim}
        if len(lengths) > 1:
            raise ConfigError(
                f"data must have as many examples of each input. Received: arrays of {sorted(lengths)} examples. "
                "Give arrays of one length."
            )
        return (_slice(arrays, slice(start, start + CHUNK)) for start in range(0, _length(arrays), CHUNK))
    is_list = isinstance(data, list) and all(isinstance(part, (np.ndarray, tf.Tensor)) for part in data)
    if inputs > 1 and is_list and data:
        raise ConfigError(
            f"data must hold the {inputs} inputs of the model together. Received: a list of {len(data)} arrays, which "
            "are read as batches. Pass a tuple (a, b) of arrays, or a dict by input name."
        )
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return data
    remedy = "Put the examples in an array whose first axis counts them."
    if isinstance(data, (str, bytes)):
        remedy = "Read the file first and pass the array: np.load(file)."
    elif callable(data):
        remedy = "Call the function and pass its result: an array, or a generator of batches."
    raise ConfigError(
        "data must be an array, a tuple (inputs, labels), a tf.data.Dataset or an iterable of batches. "
        f"Received: {type(data).__name__}. {remedy}"
    )


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


def check_examples(data: Any) -> Any:
    """Returns examples in a form that tf.data can slice: a data set unchanged, or a structure of arrays.

    Raises:
        ConfigError: The examples are in another form, are batches, or differ in number.
    Warns:
        TfoptWarning: The elements of a data set may be batches.
    Example:
        >>> check_examples([np.zeros((3, 2)), np.zeros(3)])
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: The pipeline takes single examples: ...
        Received: a list. Write the arrays as a tuple: (inputs, labels).
    """
    if isinstance(data, tf.data.Dataset):
        _check_single(data)
        return data
    if isinstance(data, keras.utils.PyDataset):
        raise _refused(f"a {type(data).__name__}, which makes batches itself. Pass it to fit without a pipeline.")
    if isinstance(data, Iterator) or callable(data):
        remedy = "tf.data.Dataset.from_generator(function, output_signature=...)"
        received = f"a {type(data).__name__}. Make a data set from a function that yields single examples"
        raise _refused(f"{received}: {remedy}.")
    arrays = _arrays(data)
    lengths = [array.shape[0] for array in tf.nest.flatten(arrays)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ConfigError(
            "Arrays must hold the same number of examples, at least one. "
            f"Received: {', '.join(map(str, lengths)) or 'no arrays'}. Give arrays of one length."
        )
    return arrays


def _arrays(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _arrays(value) for name, value in data.items()}
    if isinstance(data, tuple):
        return tuple(map(_arrays, data))
    # tf.data would read a list of arrays as one array, and stack them.
    if isinstance(data, list) and not all(isinstance(item, int | float | str | bytes | np.generic) for item in data):
        raise _refused("a list. Write the arrays as a tuple: (inputs, labels).")
    if data is None:
        raise _refused("None. Leave None out of the tuple or dict.")
    if isinstance(data, tf.data.Dataset):
        raise _refused("a data set in a tuple or dict. Join them: tf.data.Dataset.zip((inputs, labels)).")
    if isinstance(data, tf.RaggedTensor | tf.SparseTensor):
        return data
    array = data if isinstance(data, tf.Tensor) else np.asarray(data)
    if not array.shape or array.dtype == object:
        remedy = OBJECT_REMEDY if array.shape else "Convert it to an array whose first axis counts the examples."
        raise _refused(f"a {type(data).__name__} of dtype {array.dtype} and shape {tuple(array.shape)}. {remedy}")
    return array


def _refused(received: str) -> ConfigError:
    return ConfigError(f"{RULE} Received: {received}")


def _check_single(dataset: tf.data.Dataset) -> None:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    sizes = {shape[0] if shape.rank else 0 for shape in shapes}
    if len(sizes) != 1 or sizes == {0}:
        return
    last = _last_batching(dataset)
    found = ", ".join(str(tuple(shape)) for shape in shapes)
    remedy = "The pipeline makes the batches: remove batching from the data set (batch_size=None in Keras' loaders)"
    if sizes == {None} and last is not None:
        raise _refused(f"a batched data set, with elements of shape {found}. {remedy}.")
    if len(shapes) > 1 and last == 0:
        warn(
            f"The data set's elements, of shape {found}, look like batches, and each is used as one example. "
            f"{remedy}, unless the elements are examples."
        )


def _last_batching(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of functions mapped over the batches of a data set; None if the data set is not batched."""
    mapped = 0
    while True:
        kind = type(dataset).__name__
        if any(word in kind for word in ("Unbatch", "FlatMap", "Interleave")):
            return None  # these divide batches into examples
        if "Batch" in kind or "GroupByWindow" in kind:
            return mapped
        mapped += "Map" in kind or "Scan" in kind
        inputs = inputs_of(dataset)
        if len(inputs) != 1:
            return None
        (dataset,) = inputs
