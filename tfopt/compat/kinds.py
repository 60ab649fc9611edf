"""Kinds of Keras objects, told without importing their package."""

from __future__ import annotations

from typing import Any

from tfopt.errors import UnsupportedModelError


def is_tf_keras(model: Any) -> bool:
    """Whether an object is of a class of `tf_keras`, told without importing it.

    Example:
        >>> is_tf_keras(object())
        False
    """
    return any(base.__module__.partition(".")[0] == "tf_keras" for base in type(model).__mro__)


def check_keras_3(model: Any) -> None:
    """Raises UnsupportedModelError for a model of `tf_keras`."""
    if is_tf_keras(model):
        raise UnsupportedModelError(
            f"model must be a Keras 3 model. Received: the tf_keras model {getattr(model, 'name', model)!r}. Make a "
            "Keras 3 model of it with tfopt.from_tf_keras(model)."
        )
