"""What `pipeline` accepts as examples. What it does not accept is refused with the form to give instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of
from tfopt.errors import ConfigError, TfoptWarning

RULE = "The pipeline takes single examples: an array, a tuple (inputs, labels) of arrays, or a tf.data.Dataset."


def check_examples(data: Any) -> Any:
    """Returns examples as tf.data can slice them: a data set as it is, or a structure of arrays.

    Raises:
        ConfigError: They are in another form, are batches, or differ in length.
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
            f"{RULE} Received: a {type(data).__name__}, which makes batches itself. Give it to fit as it is, without "
            "a pipeline."
        )
    if isinstance(data, Iterator) or callable(data):
        raise ConfigError(
            f"{RULE} Received: a {type(data).__name__}. Make a data set of the function that yields single examples: "
            "tf.data.Dataset.from_generator(function, output_signature=...)."
        )
    arrays = _arrays(data)
    lengths = [array.shape[0] for array in tf.nest.flatten(arrays)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ConfigError(
            "Arrays must hold the same number of examples, at least one. "
            f"Received: {', '.join(map(str, lengths)) or 'no arrays'}."
        )
    return arrays


def _arrays(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _arrays(value) for name, value in data.items()}
    if isinstance(data, tuple):
        return tuple(map(_arrays, data))
    # tf.data would take a list of arrays for one array, and stack them.
    if isinstance(data, list) and not all(isinstance(item, int | float | str | bytes | np.generic) for item in data):
        raise ConfigError(f"{RULE} Received: a list. Write the arrays as a tuple: (inputs, labels).")
    if data is None:
        raise ConfigError(f"{RULE} Received: None. Leave it out.")
    if isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"{RULE} Received: a data set in a tuple or dict. Join them: tf.data.Dataset.zip((inputs, labels))."
        )
    if isinstance(data, tf.RaggedTensor | tf.SparseTensor):
        return data
    array = data if isinstance(data, tf.Tensor) else np.asarray(data)
    if not array.shape or array.dtype == object:
        raise ConfigError(
            f"{RULE} Received: a {type(data).__name__} of dtype {array.dtype} and shape {tuple(array.shape)}. "
            "Convert it to an array whose first axis counts the examples."
        )
    return array


def _check_single(dataset: tf.data.Dataset) -> None:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    sizes = {shape[0] if shape.rank else 0 for shape in shapes}
    if len(sizes) != 1 or sizes == {0}:
        return
    last = _last_batching(dataset)
    found = ", ".join(str(tuple(shape)) for shape in shapes)
    remedy = "Leave batching to the pipeline: remove it from the data set (batch_size=None of Keras' loaders)"
    if sizes == {None} and last is not None:
        raise ConfigError(f"{RULE} Received: a data set that is batched, with elements of shape {found}. {remedy}.")
    if len(shapes) > 1 and last == 0:
        warnings.warn(
            f"The data set's elements, of shape {found}, look like batches, and each is taken for one example. "
            f"{remedy}, unless they are examples.",
            TfoptWarning,
            stacklevel=4,
        )


def _last_batching(dataset: tf.data.Dataset) -> int | None:
    """Returns how many functions were mapped over batches since the data set was batched; None if it is not."""
    mapped = 0
    while True:
        kind = type(dataset).__name__
        if any(word in kind for word in ("Unbatch", "FlatMap", "Interleave")):
            return None  # these take batches apart
        if "Batch" in kind or "GroupByWindow" in kind:
            return mapped
        mapped += "Map" in kind or "Scan" in kind
        inputs = inputs_of(dataset)
        if len(inputs) != 1:
            return None
        (dataset,) = inputs
