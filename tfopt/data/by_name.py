"""Example data that a command line names: a NumPy file, or a registered source."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError
from tfopt.settings.calls import call_named

BATCH = 32


def load_examples(name: str, *, training: bool) -> Any:
    """Returns inputs, or (inputs, labels) if there are labels: arrays of a file, batches of a source.

    Args:
        name: A .npy file of inputs; a .npz file with an array x and, for labels, y; or the name of a source.
        training: Whether to return the training part of a source; otherwise its test part.
    Raises:
        ConfigError: The file or source does not exist, or the file has other content.
    Example:
        >>> for x, y in load_examples("digits", training=False).take(1):
        ...     print(x.shape)
        (32, 32, 32, 1)
    """
    if name in SOURCES:
        examples = call_named("source", name, SOURCES, {})
        return examples.decoded("train" if training else "test").batch(BATCH)
    if Path(name).suffix not in (".npy", ".npz"):
        raise ConfigError(
            f"Example data must be a .npy file, a .npz file or a source ({', '.join(sorted(SOURCES))}). "
            f"Received: {name!r}. Save arrays with numpy.save or numpy.savez."
        )
    try:
        loaded = np.load(name)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return (loaded["x"], loaded["y"]) if "y" in loaded.files else loaded["x"]
    except KeyError as error:
        raise ConfigError(
            f"A .npz file must hold an array x, and y for labels. Received: {name} with {loaded.files}. "
            "Write it again with numpy.savez(file, x=inputs, y=labels)."
        ) from error
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:  # the last three: an incomplete file
        raise ConfigError(
            f"Example data must be a readable NumPy file. Received: {name!r} ({error}). Write it again with numpy.save "
            "or numpy.savez."
        ) from error
