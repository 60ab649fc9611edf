"""MNIST and Fashion-MNIST: 70,000 grey images of handwritten digits, and of clothes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.sources.known_sets import Parts, download, image_examples, load_npz, parts_of, read_bytes, reading
from tfopt.errors import ConfigError

CLOTHES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTES = 8
ARCHIVE = "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and " + (
    "t10k-labels-idx1-ubyte.gz in one folder"
)


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
    from keras import datasets

    check_arguments(path=path, validation_fraction=validation_fraction, seed=seed)
    parts = download("mnist", datasets.mnist.load_data, ARCHIVE) if path is None else _read(path)
    names = tuple(map(str, range(10)))
    return image_examples("mnist", parts, names, validation_fraction=validation_fraction, seed=seed)


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
    from keras import datasets

    check_arguments(path=path, validation_fraction=validation_fraction, seed=seed)
    parts = download("fashion_mnist", datasets.fashion_mnist.load_data, ARCHIVE) if path is None else _read(path)
    return image_examples("fashion_mnist", parts, CLOTHES, validation_fraction=validation_fraction, seed=seed)


def _read(path: str | Path) -> Parts:
    place = Path(path).expanduser()
    if place.is_file():
        with reading(place, "Keras' mnist.npz"):
            return parts_of(load_npz(place))
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
        content = read_bytes(file)
        if content[:4] != bytes([0, 0, UNSIGNED_BYTES, rank]):
            raise ValueError(f"it begins with {content[:4].hex()}, and not with 0000{UNSIGNED_BYTES:02x}{rank:02x}")
        shape = np.frombuffer(content, ">i4", rank, offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
        if len(values) != np.prod(shape, dtype=np.int64):
            raise ValueError(f"it holds {len(values)} values, and its shape is {tuple(map(int, shape))}")
        return values.reshape(shape)
