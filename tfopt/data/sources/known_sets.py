"""What the known data sets share: their download, the safe reading of their archives, and images as examples."""

from __future__ import annotations

import io
import pickle
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfopt.data.examples import Examples
from tfopt.data.splits import split
from tfopt.data.stored import Scaled, Stored
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_stored

Parts = tuple[tuple[Any, Any], tuple[Any, Any]]
"""((x_train, y_train), (x_test, y_test))."""
CONNECTION_TIMEOUT_S = 20.0
DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, KeyError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError),
)
# The names in pickles of NumPy arrays, as NumPy 1 and 2 and Python 2 and 3 write them.
ARRAY_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


def download(name: str, load: Callable[[], Parts], archive: str) -> Parts:
    """Returns a data set that a function of `keras.datasets` downloads, or finds in its cache.

    Raises:
        ConfigError: The data cannot be downloaded. It names the archive that the user may fetch instead.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECTION_TIMEOUT_S)  # Keras sets none, and would wait as long as the system does
    try:
        return load()
    except Exception as error:
        raise ConfigError(
            f"{name} needs its data: it could not be downloaded ({' '.join(str(error).split())[:200]}). Fetch "
            f"{archive} on a machine with a network, and pass its place: path=..."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turns the errors of a damaged archive into a ConfigError that names it."""
    check_stored(what, path)
    try:
        yield
    except DAMAGED as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"path must be {what}, whole and unchanged. Received: {str(path)!r} "
            f"({' '.join(str(error).split()) or type(error).__name__}). Fetch it again."
        ) from error


def load_arrays(file: BinaryIO) -> Any:
    """Returns what a pickle holds, if that is plain values and NumPy arrays. Other pickles could run code.

    Raises:
        pickle.UnpicklingError: The pickle holds something else.
    Example:
        >>> load_arrays(io.BytesIO(pickle.dumps({"data": np.arange(2)})))
        {'data': array([0, 1])}
        >>> load_arrays(io.BytesIO(pickle.dumps(print)))
        Traceback (most recent call last):
        ...
        _pickle.UnpicklingError: it holds builtins.print, and only NumPy arrays are read
    """
    return _ArrayUnpickler(file, encoding="bytes").load()


def load_npz(path: Path) -> Parts:
    """Returns the parts of a .npz file of Keras, also of lists of numbers. Raises KeyError if an array is missing."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                content = io.BytesIO(file.read())
            version = np.lib.format.read_magic(content)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            _, _, dtype = read_header(content)
            if dtype.hasobject:
                found[member.removesuffix(".npy")] = load_arrays(content)
            else:
                content.seek(0)
                found[member.removesuffix(".npy")] = np.load(content, allow_pickle=False)
    return (found["x_train"], found["y_train"]), (found["x_test"], found["y_test"])


def members(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Returns the content of files in a tar archive, or in its unpacked folder. Nothing is written to disk."""
    if path.is_dir():
        names = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
        return {name: file.read_bytes() for name, file in names.items() if wanted(name) and file.is_file()}
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and wanted(member.name):
                file = archive.extractfile(member)
                found[member.name] = b"" if file is None else file.read()
    return found


def image_examples(
    name: str, parts: Parts, class_names: tuple[str, ...], validation_fraction: float, seed: int
) -> Examples:
    """Returns images uint8 [n, height, width(, channels)] as examples. They stay uint8 until they are decoded.

    Raises:
        ConfigError: Images and labels differ in number, or a label is no class.
    """
    import tensorflow as tf

    (x_train, y_train), (x_test, y_test) = (checked(name, x, y, len(class_names)) for x, y in parts)
    chosen = split(len(y_train), y_train, 0, validation_fraction, seed)

    def part(x: np.ndarray, y: np.ndarray, numbers: np.ndarray) -> Any:
        images = x[numbers]
        return tf.data.Dataset.from_tensor_slices((images if images.ndim == 4 else images[..., None], y[numbers]))

    def decode(image: Any, label: Any) -> Any:
        return tf.cast(image, tf.float32) / 255, label

    def stored(image: Any, label: Any) -> Any:
        return "", image, label

    return Examples(
        name=name,
        train=part(x_train, y_train, chosen["train"]),
        validation=part(x_train, y_train, chosen["validation"]) if validation_fraction else None,
        test=part(x_test, y_test, np.random.default_rng(seed).permutation(len(y_test))),
        outputs=len(class_names),
        class_names=class_names,
        decode=decode,
        stored=Stored(read=stored, inputs=Scaled()),
        check_finite=False,
    )


def checked(name: str, x: Any, y: Any, classes: int) -> tuple[Any, np.ndarray]:
    """Returns inputs, and labels as int32 [n]. Raises ConfigError unless they fit each other and the classes."""
    labels = np.asarray(y).reshape(-1).astype(np.int32)
    if len(x) != len(labels) or not len(labels):
        raise ConfigError(
            f"{name} must have one label per example. Received: {len(x)} examples and {len(labels)} labels. Fetch its "
            "data again."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise ConfigError(
            f"{name} must have class numbers from 0 to {classes - 1}. Received: {labels.min()} to {labels.max()}. "
            "Fetch its data again."
        )
    return x, labels


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, and only NumPy arrays are read")
        return super().find_class(module, name)
