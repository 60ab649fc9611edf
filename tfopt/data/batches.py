"""Reads the forms in which users hold example data: arrays, tf.data datasets, or any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError

CHUNK = 32


def iterate_batches(data: Any, limit: int | None = None, inputs: int = 1) -> Iterator[tuple[Any, np.ndarray | None]]:
    """Yields (inputs, labels) batch by batch, labels being None where the data has none.

    Args:
        data: An array of examples; a tuple (inputs, labels) of arrays; a batched tf.data.Dataset, or another iterable
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
        size = len(tf.nest.flatten(values)[0])
        if size == 0:
            continue
        if size > remaining:
            kept = slice(int(remaining))
            values = tf.nest.map_structure(lambda array: array[kept], values)  # noqa: B023 - called at once
            labels = None if labels is None else labels[kept]
        yield values, None if labels is None else np.asarray(labels)
        remaining -= size
        if remaining <= 0:
            return


def _batches(data: Any, inputs: int) -> Iterable[Any]:
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, (np.ndarray, tf.Tensor, dict)) or _is_pair_of_arrays(data):
        arrays = tf.nest.map_structure(np.asarray, data)
        length = len(tf.nest.flatten(arrays)[0])
        return (
            tf.nest.map_structure(lambda array: array[start : start + CHUNK], arrays)  # noqa: B023 - called at once
            for start in range(0, length, CHUNK)
        )
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return data
    raise ConfigError(
        "data must be an array, a tuple (inputs, labels), a tf.data.Dataset or an iterable of batches. "
        f"Received: {type(data).__name__}."
    )


def _is_pair_of_arrays(data: Any) -> bool:
    return isinstance(data, tuple) and all(isinstance(part, (np.ndarray, tf.Tensor, dict)) for part in data)


def _split(batch: Any, inputs: int) -> tuple[Any, Any]:
    if isinstance(batch, tuple):
        if len(batch) == inputs > 1 and not isinstance(batch[0], (tuple, dict)):
            return batch, None
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None
