"""Reads the forms in which users hold example data: arrays, tf.data datasets, or any iterable of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError

CHUNK = 32


def iterate_batches(data: Any, limit: int | None = None, inputs: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yields (inputs, labels) batch by batch as arrays, labels being None where the data has none.

    Args:
        data: An array of examples; a tuple (inputs, labels) of arrays, where inputs may be a dict, or a list or tuple
            of as many arrays as the model has inputs; a batched tf.data.Dataset, or another iterable
            of batches, each an array, a dict of arrays, or a tuple (inputs, labels[, weights]).
        limit: Stop after this many examples.
        inputs: How many inputs the model has; with several, a batch that is a tuple of so many arrays is the inputs.

    Example:
        >>> [x.shape for x, labels in iterate_batches(np.zeros((70, 3)), limit=40)]
        [(32, 3), (8, 3)]
    """
    remaining = np.inf if limit is None else limit
    for batch in _batches(data, inputs):
        values, labels = _split(batch, inputs)
        values = tf.nest.map_structure(np.asarray, values)
        labels = None if labels is None else tf.nest.map_structure(np.asarray, labels)
        size = _length(values)
        if size == 0:
            continue
        given = {len(part) for part in tf.nest.flatten(labels) if part is not None and part.ndim}
        if given - {size}:
            raise ConfigError(
                f"data must have one label per example. Received: a batch of {size} examples and {min(given)} labels."
            )
        if size > remaining:
            values, labels = _slice((values, labels), slice(int(remaining)))
            size = int(remaining)
        yield values, labels
        remaining -= size
        if remaining <= 0:
            return


def peek(data: Any) -> tuple[Any, Any]:
    """Returns data to look at, and the data with nothing missing: an iterator gives each of its batches only once.

    Example:
        >>> sample, data = peek(iter([np.zeros((2, 3)), np.ones((2, 3))]))
        >>> len(sample), len(list(data))
        (1, 2)
    """
    if not isinstance(data, Iterator):
        return data, data
    sample = list(itertools.islice(data, 1))
    return sample, itertools.chain(sample, data)


def _batches(data: Any, inputs: int) -> Iterable[Any]:
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, (np.ndarray, tf.Tensor, dict)) or _is_tuple_of_arrays(data, inputs):
        arrays = tf.nest.map_structure(np.asarray, data)
        lengths = {len(part) for part in tf.nest.flatten(_split(arrays, inputs)[0]) if part.ndim}
        if len(lengths) > 1:
            raise ConfigError(
                f"data must have as many examples of each input. Received: arrays of {sorted(lengths)} examples."
            )
        return (_slice(arrays, slice(start, start + CHUNK)) for start in range(0, _length(arrays), CHUNK))
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return data
    raise ConfigError(
        "data must be an array, a tuple (inputs, labels), a tf.data.Dataset or an iterable of batches. "
        f"Received: {type(data).__name__}."
    )


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
            "data must come as whole batches, their first axis being the examples. "
            f"Received: a single value of dtype {first.dtype}."
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
