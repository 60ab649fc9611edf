"""Values that are not finite: NaN, infinite, or infinite once they are float32, which is what models compute in.

One NaN among the inputs makes all weights NaN, and a relu can hide that from the loss. Arrays are looked at when a
source is made. The batches of other examples are looked at as they pass: their sum is not finite if one value is not,
so the sum alone tells, and only a sum that is not finite makes the pipeline look at each example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfopt.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf

CHUNK_BYTES = 2**24
CHECK_OFF = "set check_finite=False for a model that takes such values"


def in_float32(values: np.ndarray) -> np.ndarray:
    """Returns values as float32. Larger ones become infinite, without a warning."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def narrowed(values: tf.Tensor) -> tf.Tensor:
    """Returns float64 as float32, and other values as they are."""
    import tensorflow as tf

    return tf.cast(values, tf.float32) if values.dtype == tf.float64 else values


def chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the rows of an array in parts of a few MB, each with the number of its first row."""
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def not_finite(parts: Iterator[tuple[int, np.ndarray]], rows: int) -> str | None:
    """Returns words about the rows of an array, given in `chunks`, that are not finite; None if there are none.

    Example:
        >>> not_finite(chunks(np.array([[0, 1], [2, np.nan], [np.inf, 5]])), 3)
        '2 of 3 rows that are not: the first is row 1 (counted from 0), with nan at [1]'
    """
    count, first = 0, ""
    for start, part in parts:
        if part.dtype.kind not in "fc":
            return None
        found = ~np.isfinite(in_float32(part) if part.dtype == np.float64 else part)
        if not found.any():
            continue
        wrong = np.flatnonzero(found.reshape(len(part), -1).any(axis=1))
        if not count:
            place = tuple(np.argwhere(found[wrong[0]])[0].tolist())
            at = f" at {list(place)}" if place else ""
            first = f"row {start + wrong[0]} (counted from 0), with {part[wrong[0]][place]}{at}"
        count += len(wrong)
    return f"{count} of {rows} rows that are not: the first is {first}" if count else None


def check_all_finite(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ConfigError if an array, by its name, holds values that are not finite.

    Example:
        >>> check_all_finite({"x": np.zeros((3, 2)), "y": np.array([0.0, np.inf, 1e39])})
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: y must hold finite float32 numbers. Received: 2 of 3 rows that are not: ...
    """
    for name, array in arrays.items():
        problem = not_finite(chunks(array), len(array))
        if problem:
            raise ConfigError(
                f"{name} must hold finite float32 numbers. Received: {problem}. Correct or leave out these rows, or "
                f"{CHECK_OFF}."
            )


def finite_batch(name: str) -> Any:
    """Returns a function in TensorFlow that gives a batch back, and fails, with a name, if a value is not finite.

    Example:
        >>> import tensorflow as tf
        >>> inputs, targets = finite_batch("mine")(tf.ones((2, 3)), tf.ones(2))
    """
    import tensorflow as tf

    def check(*batch: Any) -> Any:
        parts = zip(("inputs", "targets", "sample weights"), batch, strict=False)
        checks = [
            _finite(name, part, tensor)
            for part, values in parts
            for tensor in tf.nest.flatten(values, expand_composites=True)
            if tensor.dtype.is_floating
        ]
        with tf.control_dependencies(checks):
            same = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
        return same if len(batch) > 1 else same[0]

    return check


def _finite(name: str, part: str, values: tf.Tensor) -> tf.Operation | tf.Tensor:
    import tensorflow as tf

    values = tf.cast(values, tf.float32)

    def look() -> tf.Tensor:  # the sum of finite values may also be too large
        wrong = ~tf.math.is_finite(tf.reshape(values, (tf.shape(values)[0], -1)))
        rows = tf.math.count_nonzero(tf.reduce_any(wrong, axis=1))
        words = [
            f"The {part} of {name!r} must be finite. Received values that are not in",
            rows,
            f"examples of a batch. Correct or leave out these examples, or {CHECK_OFF}.",
        ]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=rows == 0, data=words)]):
            return tf.constant(True)

    return tf.cond(tf.math.is_finite(tf.reduce_sum(values)), lambda: tf.constant(True), look)
