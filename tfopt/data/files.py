"""Example data named on a command line: a NumPy file, or a registered source."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError


def load_examples(name: str, *, training: bool) -> Any:
    """Returns inputs, or (inputs, labels) where there are labels.

    Args:
        name: A .npy file of inputs, a .npz file with the arrays x and, if labelled, y, or the name of a source.
        training: Of a source, whether to return the training part; else the test part.
    Raises:
        ConfigError: There is no such file or source, or it holds something else.
    Example:
        >>> x, y = load_examples("digits", training=False)
        >>> x.shape
        (360, 32, 32, 1)
    """
    if name in SOURCES:
        examples = SOURCES[name]()
        return (examples.x_train, examples.y_train) if training else (examples.x_test, examples.y_test)
    if Path(name).suffix not in (".npy", ".npz"):
        raise ConfigError(
            f"Example data must be a .npy file, a .npz file or a source ({', '.join(sorted(SOURCES))}). "
            f"Received: {name!r}."
        )
    try:
        loaded = np.load(name)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return (loaded["x"], loaded["y"]) if "y" in loaded.files else loaded["x"]
    except KeyError as error:
        raise ConfigError(
            f"A .npz file must hold an array x, and y for labels. Received: {name} with {loaded.files}."
        ) from error
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:  # the last three: an incomplete one
        raise ConfigError(
            f"Example data must be a readable NumPy file. Received: {name!r} ({error}). Write it again with numpy.save "
            "or numpy.savez."
        ) from error
