"""The exceptions and warnings that tfopt raises.

Every message has the same four parts: the argument, the rule, the value received and the remedy.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints


class TfoptError(Exception):
    """The root of every error that tfopt raises on purpose."""


class ConfigError(TfoptError, ValueError):
    """A setting is wrong: a value out of range, an unknown name, settings that exclude each other."""


class UnsupportedModelError(TfoptError):
    """The model, as a whole, cannot go through the pass: it is not built, or not of a kind the pass takes."""


class UnsupportedLayerError(UnsupportedModelError):
    """One layer or graph node cannot go through the pass; the message names its path, shape and dtype."""


class ExportError(TfoptError):
    """An artifact could not be written. Nothing is left under its final name."""


class ArtifactError(TfoptError):
    """An artifact on disk is missing, incomplete or damaged."""


class TrainingError(TfoptError):
    """Training could not go on: the loss is not finite, memory ran out, a worker was lost."""


class UnsupportedVersionError(TfoptError):
    """The installed Keras or TensorFlow lacks something private that tfopt uses, or has changed it."""


class TfoptWarning(UserWarning):
    """Something the caller should know although the work was done, such as a pass that changed nothing."""


def check_type(name: str, value: object, expected: type) -> None:
    """Raises ConfigError unless a value is of the type that an argument takes.

    Example:
        >>> check_type("config", 0.5, dict)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: config must be a dict. Received: config=0.5.
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{name} must be a {expected.__name__}. Received: {name}={value!r}.")


def check_field_types(config: Any) -> None:
    """Raises ConfigError unless each plain field of a dataclass holds what it declares.

    Plain are fields of numbers, strings, bools and tuples of them. A float may be an int, a tuple a list, a string a
    path; a number is never a bool.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Settings:
        ...     share: float = 0.5
        >>> check_field_types(Settings("a half"))
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: share must be of type float. Received: share='a half'.
    """
    hints = get_type_hints(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if not _fits(value, hints[each.name]):
            declared = each.type if isinstance(each.type, str) else each.type.__name__
            raise ConfigError(f"{each.name} must be of type {declared}. Received: {each.name}={value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    if hint in (int, float):  # NumPy's numbers count as such, too
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, (str, os.PathLike))
    if hint in (bool, type(None)):
        return isinstance(value, hint)
    if get_origin(hint) is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(part, get_args(hint)[0]) for part in value)
    parts = get_args(hint)
    if parts and all(part in (int, float, str, bool, type(None)) for part in parts):
        return any(_fits(value, part) for part in parts)
    return True


def unknown_name(kind: str, received: object, known: Iterable[str]) -> ConfigError:
    """Returns the error for a name that is in no registry, with the closest known name as the remedy.

    Example:
        >>> str(unknown_name("criterion", "magnitud", ["magnitude", "random"]))
        "Unknown criterion 'magnitud'. Expected one of: 'magnitude', 'random'. Did you mean 'magnitude'?"
    """
    names = sorted(known)
    message = f"Unknown {kind} {received!r}. Expected one of: {', '.join(map(repr, names))}."
    close = difflib.get_close_matches(str(received), names, n=1)
    return ConfigError(f"{message} Did you mean {close[0]!r}?" if close else message)


def check_keras_backend() -> None:
    """Raises ConfigError unless Keras computes with TensorFlow, or will when it is imported.

    Keras 3 takes its backend from KERAS_BACKEND, else from the file keras.json. Keras need not be imported for the
    check, since it cannot be while its backend is not installed.

    Example:
        >>> check_keras_backend()
    """
    keras = sys.modules.get("keras")
    backend, source = _configured_backend()
    if hasattr(keras, "config"):
        backend, source = keras.config.backend(), "keras.config.backend()"  # type: ignore[union-attr]
    if backend != "tensorflow":
        raise ConfigError(
            f"Keras must compute with TensorFlow, which tfopt is made for. Received: {source}={backend!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment."
        )


def _configured_backend() -> tuple[str, str]:
    """Returns the backend that Keras will choose, and where that is written."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json").expanduser()
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras, too, takes its default then
        settings = {}
    return settings.get("backend", "tensorflow"), f"backend in {file}"
