"""The exceptions and warnings that tfopt raises.

Every message has four parts: the argument, the rule, the value received and the remedy.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

# A warning does not point into what runs between the user's line and tfopt.
PASSED_THROUGH = ("tfopt", "keras", "tf_keras", "tensorflow", "contextlib", "functools", "threading", "concurrent")

LONGEST_NAME = 120  # of a name that is wrong, in a message


class TfoptError(Exception):
    """The base class of all errors that tfopt raises on purpose."""


class ConfigError(TfoptError, ValueError):
    """A setting is wrong: a value is out of range, a name is unknown, or two settings exclude each other."""


class UnsupportedModelError(TfoptError):
    """A pass cannot process the model: it is not built, or the pass does not support its kind."""


class UnsupportedLayerError(UnsupportedModelError):
    """A pass cannot process one layer or graph node. The message gives its path, shape and dtype."""


class ExportError(TfoptError):
    """An artifact could not be written. No partial artifact is left under its final name."""


class ArtifactError(TfoptError):
    """An artifact on disk is missing, incomplete or damaged."""


class TrainingError(TfoptError):
    """Training could not continue: the loss is not finite, the memory is full, or a worker was lost."""


class UnsupportedVersionError(TfoptError):
    """The installed Keras or TensorFlow lacks something private that tfopt uses, or has changed it."""


class TfoptWarning(UserWarning):
    """The work was done, but the caller should know a fact about it, for example that a pass changed nothing."""


def warn(message: str) -> None:
    """Warns by a TfoptWarning that points at the user's line: the last one outside tfopt, Keras and TensorFlow.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("The model has no zeros.")
        >>> caught[0].category.__name__, str(caught[0].message)
        ('TfoptWarning', 'The model has no zeros.')
    """
    caller = inspect.currentframe()
    frame = caller = caller.f_back if caller is not None else None
    while frame is not None and _is_passed_through(frame):
        frame = frame.f_back
    place = frame or caller  # a command, or a thread of tfopt, has no line of a user
    if place is None:
        warnings.warn(message, TfoptWarning, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        TfoptWarning,
        place.f_code.co_filename,
        place.f_lineno,
        module=place.f_globals.get("__name__"),
        registry=place.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_passed_through(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__", "").split(".")[0] in PASSED_THROUGH:
        return True
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent)  # tfopt itself as __main__


def unknown_name(kind: str, received: object, known: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name. The closest known name is the remedy.

    Example:
        >>> str(unknown_name("criterion", "magnitud", ["magnitude", "random"]))
        "Unknown criterion 'magnitud'. Expected one of: 'magnitude', 'random'. Did you mean 'magnitude'?"
    """
    names = sorted(known)
    shown = repr(received)
    if len(shown) > LONGEST_NAME:
        shown = f"{shown[:LONGEST_NAME]}…"
    message = f"Unknown {kind} {shown}. Expected one of: {', '.join(map(repr, names))}."
    close = difflib.get_close_matches(str(received), names, n=1)
    return ConfigError(f"{message} Did you mean {close[0]!r}?" if close else message)


def check_keras_backend() -> None:
    """Raises ConfigError unless the backend of Keras is TensorFlow, or will be when Keras is imported.

    Keras 3 takes its backend from KERAS_BACKEND, otherwise from the file keras.json. The check does not import Keras,
    because that import fails if the backend is not installed.

    Example:
        >>> check_keras_backend()
    """
    keras = sys.modules.get("keras")
    backend, source = _configured_backend()
    if hasattr(keras, "config"):
        backend, source = keras.config.backend(), "keras.config.backend()"  # type: ignore[union-attr]
    if backend != "tensorflow":
        raise ConfigError(
            f"The backend of Keras must be TensorFlow, the only one tfopt supports. Received: {source}={backend!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment."
        )


def _configured_backend() -> tuple[str, str]:
    """Returns the backend that Keras will choose, and the place of this setting."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json").expanduser()
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # Keras also uses its default then
        settings = {}
    return settings.get("backend", "tensorflow"), f"backend in {file}"
