"""Kinds of Keras objects, told without importing their package."""

from __future__ import annotations

from typing import Any


def is_tf_keras(model: Any) -> bool:
    """Whether an object is of a class of `tf_keras`, told without importing it.

    Example:
        >>> is_tf_keras(object())
        False
    """
    return any(base.__module__.partition(".")[0] == "tf_keras" for base in type(model).__mro__)
