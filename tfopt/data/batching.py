"""Makes batches: of equal examples, of examples padded to one length, or of examples sorted by length into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfopt.errors import ConfigError

Padding = tuple[Any, Any]


def check_buckets(spec: Any, boundaries: Sequence[int], padding: Padding | None) -> None:
    """Raises ConfigError unless examples can be sorted by length into buckets.

    Example:
        >>> check_buckets(tf.TensorSpec((None,), tf.int32), (8, 16), (0, 0))
    """
    if not boundaries:
        return
    received = f"Received: bucket_boundaries={tuple(boundaries)}"
    if list(boundaries) != sorted(set(boundaries)) or boundaries[0] < 1:
        raise ConfigError(f"bucket_boundaries must be lengths from 1, each larger than the one before. {received}.")
    if _length_axis(spec) is None:
        shapes = ", ".join(str(each.shape) for each in tf.nest.flatten(spec))
        raise ConfigError(
            f"bucket_boundaries needs examples that differ in length. {received} and examples of shape {shapes}. "
            "Leave bucket_boundaries out."
        )
    if padding is None:
        raise ConfigError(
            f"bucket_boundaries needs the values that fill a batch. {received} and no padding. Set Examples.padding, "
            "for example padding=(0, -1)."
        )


def batched(
    examples: tf.data.Dataset,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    padding: Padding | None = None,
    boundaries: Sequence[int] = (),
    seeded: bool = False,
) -> tf.data.Dataset:
    """Returns batches of examples (inputs, targets[, weight]).

    Args:
        padding: Values that fill inputs and targets up to the longest of a batch. None if all have one shape.
        boundaries: Lengths between which the examples of a batch lie. If empty, all lengths come together.
        seeded: Whether the elements are pairs (example, seed).
    Example:
        >>> rows = tf.data.Dataset.range(1, 5).map(lambda n: (tf.ones([n % 2 + 1]), n))
        >>> [x.shape.as_list() for x, y in batched(rows, 2, padding=(0, 0), boundaries=(1,))]
        [[2, 2], [2, 1]]
    """
    spec = examples.element_spec
    tensors = [each for each in tf.nest.flatten(spec) if isinstance(each, tf.TensorSpec)]
    if padding is None or all(each.shape.is_fully_defined() for each in tensors):
        return examples.batch(batch_size, drop_remainder=drop_remainder)
    shapes = tf.nest.map_structure(lambda each: each.shape, spec)
    values = (_fill_values(spec[0], padding), _filled(spec[1], 0)) if seeded else _fill_values(spec, padding)
    if not boundaries:
        return examples.padded_batch(batch_size, shapes, values, drop_remainder)
    place = _length_axis(spec)
    assert place is not None  # check_buckets has found one
    number, axis = place

    def length(*example: Any) -> tf.Tensor:
        return tf.shape(tf.nest.flatten(example)[number])[axis]

    return examples.bucket_by_sequence_length(
        length,
        # TensorFlow's buckets end below their boundary. Here a boundary is the largest length of its bucket.
        [boundary + 1 for boundary in boundaries],
        [batch_size] * (len(boundaries) + 1),
        padded_shapes=shapes,
        padding_values=values,
        drop_remainder=drop_remainder,
    )


def _length_axis(spec: Any) -> tuple[int, int] | None:
    """Returns the first open axis: the number of its tensor, and of the axis; None if all lengths are fixed."""
    for number, each in enumerate(tf.nest.flatten(spec)):
        if isinstance(each, tf.TensorSpec) and each.shape.rank:
            for axis, size in enumerate(each.shape):
                if size is None:
                    return number, axis
    return None


def _fill_values(spec: Any, padding: Padding) -> Any:
    """Returns the fill value of each tensor of an example: of inputs and targets, and zero for a weight."""
    if not isinstance(spec, tuple):
        return _filled(spec, padding[0])
    return tuple(_filled(part, value) for part, value in zip(spec, (*padding, 0), strict=False))


def _filled(part: Any, value: Any) -> Any:
    if isinstance(part, dict):
        return {key: _filled(each, value[key] if isinstance(value, dict) else value) for key, each in part.items()}
    if isinstance(part, tuple):
        return tuple(_filled(each, value) for each in part)
    if part.dtype == tf.string and not isinstance(value, str | bytes):
        value = ""
    return tf.constant(value, part.dtype)
