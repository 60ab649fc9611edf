"""Small images of known sets: MNIST and Fashion-MNIST in grey, CIFAR-10 and CIFAR-100 in colour."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.sources.known_sets import Parts, download, image_examples, load_arrays, load_npz, members, reading
from tfopt.errors import ConfigError

CLOTHES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTES = 8
ARCHIVE = "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and " + (
    "t10k-labels-idx1-ubyte.gz in one folder"
)
PIXELS = 32 * 32 * 3


def mnist(*, path: str | Path | None = None, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads MNIST: 60,000 images of handwritten digits to train on, and 10,000 to test on.

    Args:
        path: Folder of the four original files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz,
            t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz, packed or not; or Keras' mnist.npz. None downloads
            the data through `keras.datasets`.
        validation_fraction: Share of the training part that becomes the validation part. With 0 there is none.
        seed: Seed of the split and of the order.
    Returns: Images [n, 28, 28, 1], float32 in [0, 1].
    Raises:
        ConfigError: The data cannot be downloaded, or the files are missing, damaged or of another kind.
    Example:
        >>> mnist(path="/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must be a folder of ... Received: path='/missing'. ...

    Reference:
        LeCun et al., "Gradient-based learning applied to document recognition", Proceedings of the IEEE, 1998.
    """
    check_arguments(locals())
    from keras import datasets

    parts = download("mnist", datasets.mnist.load_data, ARCHIVE) if path is None else _read(path)
    return image_examples("mnist", parts, tuple(map(str, range(10))), validation_fraction, seed)


def fashion_mnist(*, path: str | Path | None = None, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads Fashion-MNIST: 60,000 images of clothes to train on, and 10,000 to test on.

    Args:
        path: Folder of the four original files, which have the names of MNIST's. None downloads the data through
            `keras.datasets`.
        validation_fraction: Share of the training part that becomes the validation part. With 0 there is none.
        seed: Seed of the split and of the order.
    Returns: Images [n, 28, 28, 1], float32 in [0, 1].
    Raises:
        ConfigError: The data cannot be downloaded, or the files are missing, damaged or of another kind.
    Example:
        >>> fashion_mnist(path="/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must be a folder of ... Received: path='/missing'. ...

    Reference:
        Xiao et al., "Fashion-MNIST", 2017, arXiv:1708.07747.
    """
    check_arguments(locals())
    from keras import datasets

    parts = download("fashion_mnist", datasets.fashion_mnist.load_data, ARCHIVE) if path is None else _read(path)
    return image_examples("fashion_mnist", parts, CLOTHES, validation_fraction, seed)


def _read(path: str | Path) -> Parts:
    place = Path(path).expanduser()
    if place.is_file():
        with reading(place, "Keras' mnist.npz"):
            return load_npz(place)
    found = [next((file for file in (place / f"{name}.gz", place / name) if file.is_file()), None) for name in FILES]
    if None in found:
        raise ConfigError(
            f"path must be a folder of {', '.join(f'{name}.gz' for name in FILES)}, or Keras' mnist.npz. "
            f"Received: path={str(path)!r}. Fetch the files, and put them into one folder."
        )
    x_train, y_train, x_test, y_test = (_read_idx(file, 3 if "images" in file.name else 1) for file in found if file)
    return (x_train, y_train), (x_test, y_test)


def _read_idx(file: Path, rank: int) -> Any:
    """Reads an IDX file: two zero bytes, the type, the rank, the shape in big-endian numbers, then the values."""
    with reading(file, "an IDX file"):
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if content[:4] != bytes([0, 0, UNSIGNED_BYTES, rank]):
            raise ValueError(f"it begins with {content[:4].hex()}, and not with 0000{UNSIGNED_BYTES:02x}{rank:02x}")
        shape = np.frombuffer(content, ">i4", rank, offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
        if len(values) != np.prod(shape, dtype=np.int64):
            raise ValueError(f"it holds {len(values)} values, and its shape is {tuple(map(int, shape))}")
        return values.reshape(shape)


class _CifarKind(NamedTuple):
    """The names of the archive of one of the data sets, and inside it."""

    archive: str
    train: tuple[str, ...]
    test: str
    labels: bytes
    label_bytes: int


TRAIN_10 = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_10 = _CifarKind("cifar-10-python.tar.gz", TRAIN_10, "test_batch", b"labels", 1)
CIFAR_100 = _CifarKind("cifar-100-python.tar.gz", ("train",), "test", b"fine_labels", 2)
NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(*, path: str | Path | None = None, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads CIFAR-10: 50,000 photographs of ten classes to train on, and 10,000 to test on.

    Args:
        path: The original archive, cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or its unpacked folder. None
            downloads the data through `keras.datasets`.
        validation_fraction: Share of the training part that becomes the validation part. With 0 there is none.
        seed: Seed of the split and of the order.
    Returns: Images [n, 32, 32, 3], float32 in [0, 1].
    Raises:
        ConfigError: The data cannot be downloaded, or the archive is missing, damaged or of another kind.
    Example:
        >>> cifar10(path="/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must be cifar-10-python.tar.gz, ... Received: '/missing' ... Fetch it again.

    Reference:
        Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    check_arguments(locals())
    from keras import datasets

    parts = (
        download("cifar10", datasets.cifar10.load_data, CIFAR_10.archive) if path is None else _cifar(path, CIFAR_10)
    )
    return image_examples("cifar10", parts, NAMES_10, validation_fraction, seed)


def cifar100(*, path: str | Path | None = None, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads CIFAR-100: 50,000 photographs of a hundred classes to train on, and 10,000 to test on.

    Args:
        path: The original archive, cifar-100-python.tar.gz or cifar-100-binary.tar.gz, or its unpacked folder. None
            downloads the data through `keras.datasets`.
        validation_fraction: Share of the training part that becomes the validation part. With 0 there is none.
        seed: Seed of the split and of the order.
    Returns: Images [n, 32, 32, 3], float32 in [0, 1]. The classes have no names, only numbers.
    Raises:
        ConfigError: The data cannot be downloaded, or the archive is missing, damaged or of another kind.
    Example:
        >>> cifar100(path="/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must be cifar-100-python.tar.gz, ... Received: '/missing' ... Fetch it again.

    Reference:
        Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    check_arguments(locals())
    from keras import datasets

    load = datasets.cifar100.load_data
    parts = download("cifar100", load, CIFAR_100.archive) if path is None else _cifar(path, CIFAR_100)
    return image_examples("cifar100", parts, tuple(map(str, range(100))), validation_fraction, seed)


def _cifar(path: str | Path, kind: _CifarKind) -> Parts:
    place = Path(path).expanduser()
    binary = kind.archive.replace("python", "binary")
    with reading(place, f"{kind.archive}, {binary} or the unpacked folder"):
        wanted = {*kind.train, kind.test, *(f"{name}.bin" for name in (*kind.train, kind.test))}
        found = members(place, lambda name: name.rsplit("/", 1)[-1] in wanted)
        content = {name.rsplit("/", 1)[-1]: value for name, value in found.items()}
        is_binary = any(name.endswith(".bin") for name in content)
        batches = []
        for name in (*kind.train, kind.test):
            member = f"{name}.bin" if is_binary else name
            if member not in content:
                raise ValueError(f"it holds no {member}")
            batches.append((_binary if is_binary else _pickled)(member, content[member], kind))
    *train, test = batches
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test


def _pickled(name: str, content: bytes, kind: _CifarKind) -> tuple[np.ndarray, np.ndarray]:
    found = load_arrays(io.BytesIO(content))
    if not isinstance(found, dict) or not {b"data", kind.labels} <= found.keys():
        raise ValueError(f"{name} holds no data and {kind.labels.decode()}")
    return _images(name, np.asarray(found[b"data"], np.uint8)), np.asarray(found[kind.labels], np.int32)


def _binary(name: str, content: bytes, kind: _CifarKind) -> tuple[np.ndarray, np.ndarray]:
    row = kind.label_bytes + PIXELS
    if not content or len(content) % row:
        raise ValueError(f"{name} has {len(content)} bytes, no multiple of {row}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return _images(name, rows[:, kind.label_bytes :]), rows[:, kind.label_bytes - 1].astype(np.int32)


def _images(name: str, rows: np.ndarray) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[1] != PIXELS:
        raise ValueError(f"{name} holds an array of shape {rows.shape}, and not of rows of {PIXELS} pixels")
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
