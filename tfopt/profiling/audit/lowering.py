"""Asks XLA whether it lowers a function for a GPU. That needs no GPU; to compile the result would need one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def why_not_lowered(function: Any, *specs: Any) -> Exception | None:
    """Returns the error by which XLA refuses a function for a GPU; None if it lowers it to its own operations (HLO).

    Args:
        function: A tf.function with jit_compile=True.
        specs: The specs of its arguments, with all sizes known.
    Example:
        >>> twice = tf.function(lambda x: 2 * x, jit_compile=True)
        >>> why_not_lowered(twice, tf.TensorSpec((3,))) is None
        True
        >>> words = tf.function(lambda x: tf.strings.length(x), jit_compile=True)
        >>> "StringLength" in str(why_not_lowered(words, tf.TensorSpec((3,), tf.string)))
        True
    """
    try:
        function.experimental_get_compiler_ir(*specs)(stage="hlo_serialized", platform_name="GPU")
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return error
    return None
