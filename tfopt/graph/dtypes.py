"""Example data in the dtype that a model takes: converted and said so, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfopt.errors import ConfigError, TfoptWarning


def convert(name: str, values: Any, dtype: Any, *, say: bool = True) -> Any:
    """Returns the values of one input in the dtype that the model takes.

    What loses nothing is converted silently: float16 to float32, or whole numbers to integers that can hold them.
    What loses digits (float64 to float32), or may have another meaning (uint8 pixels to float32), is converted with a
    warning. What loses more is refused: an imaginary part, a fraction, a number too large for an integer type.

    Args:
        name: The input's name.
        values: A tensor.
        dtype: The model's dtype.
        say: Whether to warn.
    Raises:
        ConfigError: The values do not fit the dtype.
    Example:
        >>> convert("tokens", tf.constant([1, 2], tf.int64), tf.int32).dtype
        tf.int32
    """
    given = values.dtype
    if given == dtype:
        return values
    if given == tf.string or dtype == tf.string or (given.is_complex and not dtype.is_complex):
        raise ConfigError(
            f"Input {name!r} must be given as {dtype.name}. Received: values of dtype {given.name}. "
            f"Convert them to {dtype.name} in the way that the model was trained on."
        )
    converted = tf.cast(values, dtype)
    if not dtype.is_floating and not dtype.is_complex:
        # Compared in both directions: a number too large for its type wraps round.
        if not bool(tf.reduce_all(tf.cast(converted, given) == values)):
            raise ConfigError(
                f"Input {name!r} must be given as {dtype.name}. Received: {given.name} values that {dtype.name} cannot "
                "hold. Pass whole numbers within its range."
            )
    elif say and not given.is_floating:
        _warn(name, given, dtype, "unscaled; if the model was trained on scaled values, scale these too")
    elif say and given.size > dtype.size:
        _warn(name, given, dtype, f"rounded to the digits that {dtype.name} has")
    return converted


def _warn(name: str, given: Any, dtype: Any, how: str) -> None:
    warnings.warn(
        f"The examples for input {name!r} were converted from {given.name} to {dtype.name}, {how}. "
        f"Pass {dtype.name} to have no warning.",
        TfoptWarning,
        stacklevel=2,
    )
