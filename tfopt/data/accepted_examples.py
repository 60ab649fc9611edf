"""The forms of examples that `pipeline` accepts. The error for another form names the form to give instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of
from tfopt.data.batches import OBJECT_REMEDY
from tfopt.errors import ConfigError, warn

RULE = "The pipeline takes single examples: an array, a tuple (inputs, labels) of arrays, or a tf.data.Dataset."


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
        raise ConfigError(
            f"{RULE} Received: a {type(data).__name__}, which makes batches itself. Pass it to fit without a pipeline."
        )
    if isinstance(data, Iterator) or callable(data):
        raise ConfigError(
            f"{RULE} Received: a {type(data).__name__}. Make a data set from a function that yields single examples: "
            "tf.data.Dataset.from_generator(function, output_signature=...)."
        )
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
        raise ConfigError(f"{RULE} Received: a list. Write the arrays as a tuple: (inputs, labels).")
    if data is None:
        raise ConfigError(f"{RULE} Received: None. Leave None out of the tuple or dict.")
    if isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"{RULE} Received: a data set in a tuple or dict. Join them: tf.data.Dataset.zip((inputs, labels))."
        )
    if isinstance(data, tf.RaggedTensor | tf.SparseTensor):
        return data
    array = data if isinstance(data, tf.Tensor) else np.asarray(data)
    if not array.shape or array.dtype == object:
        remedy = OBJECT_REMEDY if array.shape else "Convert it to an array whose first axis counts the examples."
        raise ConfigError(
            f"{RULE} Received: a {type(data).__name__} of dtype {array.dtype} and shape {tuple(array.shape)}. {remedy}"
        )
    return array


def _check_single(dataset: tf.data.Dataset) -> None:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    sizes = {shape[0] if shape.rank else 0 for shape in shapes}
    if len(sizes) != 1 or sizes == {0}:
        return
    last = _last_batching(dataset)
    found = ", ".join(str(tuple(shape)) for shape in shapes)
    remedy = "The pipeline makes the batches: remove batching from the data set (batch_size=None in Keras' loaders)"
    if sizes == {None} and last is not None:
        raise ConfigError(f"{RULE} Received: a batched data set, with elements of shape {found}. {remedy}.")
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
