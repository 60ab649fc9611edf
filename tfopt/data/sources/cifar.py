"""CIFAR-10 and CIFAR-100: 60,000 small colour photographs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.sources.known_sets import Parts, download, image_examples, load_arrays, reading, tar_members

PIXELS = 32 * 32 * 3


class _Kind(NamedTuple):
    """The names inside the archives of one of the data sets."""

    train: tuple[str, ...]
    test: str
    labels: bytes
    label_bytes: int


CIFAR_10 = _Kind(tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch", b"labels", 1)
CIFAR_100 = _Kind(("train",), "test", b"fine_labels", 2)
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
    from keras import datasets

    check_arguments(path=path, validation_fraction=validation_fraction, seed=seed)
    archive = "cifar-10-python.tar.gz"
    parts = download("cifar10", datasets.cifar10.load_data, archive) if path is None else _read(path, CIFAR_10, archive)
    return image_examples("cifar10", parts, NAMES_10, validation_fraction=validation_fraction, seed=seed)


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
    from keras import datasets

    check_arguments(path=path, validation_fraction=validation_fraction, seed=seed)
    archive = "cifar-100-python.tar.gz"
    parts = (
        download("cifar100", datasets.cifar100.load_data, archive) if path is None else _read(path, CIFAR_100, archive)
    )
    names = tuple(map(str, range(100)))
    return image_examples("cifar100", parts, names, validation_fraction=validation_fraction, seed=seed)


def _read(path: str | Path, kind: _Kind, archive: str) -> Parts:
    place = Path(path).expanduser()
    binary = archive.replace("python", "binary")
    with reading(place, f"{archive}, {binary} or the unpacked folder"):
        wanted = {*kind.train, kind.test, *(f"{name}.bin" for name in (*kind.train, kind.test))}
        if place.is_dir():
            content = {file.name: file.read_bytes() for file in place.rglob("*") if file.name in wanted}
        else:
            members = tar_members(place, lambda name: name.rsplit("/", 1)[-1] in wanted)
            content = {name.rsplit("/", 1)[-1]: value for name, value in members.items()}
        is_binary = any(name.endswith(".bin") for name in content)
        batches = []
        for name in (*kind.train, kind.test):
            member = f"{name}.bin" if is_binary else name
            if member not in content:
                raise ValueError(f"it holds no {member}")
            batches.append((_binary if is_binary else _pickled)(member, content[member], kind))
    *train, test = batches
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test


def _pickled(name: str, content: bytes, kind: _Kind) -> tuple[np.ndarray, np.ndarray]:
    found = load_arrays(io.BytesIO(content))
    if not isinstance(found, dict) or not {b"data", kind.labels} <= found.keys():
        raise ValueError(f"{name} holds no data and {kind.labels.decode()}")
    return _images(name, np.asarray(found[b"data"], np.uint8)), np.asarray(found[kind.labels], np.int32)


def _binary(name: str, content: bytes, kind: _Kind) -> tuple[np.ndarray, np.ndarray]:
    row = kind.label_bytes + PIXELS
    if not content or len(content) % row:
        raise ValueError(f"{name} has {len(content)} bytes, no multiple of {row}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return _images(name, rows[:, kind.label_bytes :]), rows[:, kind.label_bytes - 1].astype(np.int32)


def _images(name: str, rows: np.ndarray) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[1] != PIXELS:
        raise ValueError(f"{name} holds an array of shape {rows.shape}, and not of rows of {PIXELS} pixels")
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
