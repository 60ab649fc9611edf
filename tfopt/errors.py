"""The exceptions and warnings that tfopt raises.

Every message has the same four parts: the argument, the rule, the value received and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def unknown_name(kind: str, received: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a name that is in no registry, with the closest known name as the remedy.

    Example:
        >>> str(unknown_name("criterion", "magnitud", ["magnitude", "random"]))
        "Unknown criterion 'magnitud'. Expected one of: 'magnitude', 'random'. Did you mean 'magnitude'?"
    """
    names = sorted(known)
    message = f"Unknown {kind} {received!r}. Expected one of: {', '.join(map(repr, names))}."
    close = difflib.get_close_matches(received, names, n=1)
    return ConfigError(f"{message} Did you mean {close[0]!r}?" if close else message)
