"""What every command does before its work: it reads its words, and starts TensorFlow without notices."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tfopt.errors import check_keras_backend


def parse_words(cls: type, words: Sequence[str], command: str, default: Any = None) -> Any:
    """Makes the options of a command from its words."""
    from tfopt.settings.flags import parse

    try:
        return parse(cls, words, command, default)
    except SystemExit:
        sys.stdout.flush()  # the help is printed; see main
        raise


def arguments_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a function, with their defaults."""
    parameters = inspect.signature(builder).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def start_tensorflow() -> None:
    """Imports TensorFlow and lets it look for GPUs, without the notices that it writes at every log level.

    The notices also say why there is no GPU; `tfopt devices` shows that reason.
    """
    check_keras_backend()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow obeys it from its first operation on
    with tempfile.TemporaryFile() as notices:
        stderr = os.dup(2)
        os.dup2(notices.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        except BaseException:
            notices.seek(0)
            os.write(stderr, notices.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
