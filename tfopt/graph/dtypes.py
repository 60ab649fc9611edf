"""Converts example data to the dtype of a model's input, with a warning or an error where that loses something."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfopt.errors import ConfigError, warn


def convert(name: str, values: Any, dtype: Any, *, warn: bool = True) -> Any:
    """Returns the values of one input in the dtype that the model takes.

    A conversion that changes no meaning is silent: float64 to float32, as Keras does it with NumPy's usual arrays, or
    whole numbers to integers that can hold them. One that may change the meaning (uint8 pixels to float32), or that
    loses digits of a smaller type (float32 to float16), gives a warning. A conversion that loses more is an error: an
    imaginary part, a fraction, a number too large for an integer.

    Args:
        name: The input's name.
        values: A tensor.
        dtype: The model's dtype.
        warn: Whether to warn.
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
        # The values are converted back to compare them: a number that is too large for its type wraps around.
        if not bool(tf.reduce_all(tf.cast(converted, given) == values)):
            raise ConfigError(
                f"Input {name!r} must be given as {dtype.name}. Received: {given.name} values that {dtype.name} cannot "
                "hold. Pass whole numbers within its range."
            )
    elif warn and not given.is_floating:
        _warn(name, given, dtype, "unscaled; if the model was trained on scaled values, scale these too")
    elif warn and given.size > dtype.size and dtype != tf.float32:
        _warn(name, given, dtype, f"rounded to the digits that {dtype.name} has")
    return converted


def _warn(name: str, given: Any, dtype: Any, how: str) -> None:
    warn(
        f"The examples for input {name!r} were converted from {given.name} to {dtype.name}, {how}. "
        f"Pass {dtype.name} values to avoid this warning."
    )
