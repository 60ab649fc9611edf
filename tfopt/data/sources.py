"""Data sources: functions that return labelled examples for training and for testing. SOURCES lists them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfopt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled examples in memory.

    Attributes:
        name: Name of the source.
        x_train, y_train: Inputs [n, ...] and class numbers [n] of the training part.
        x_test, y_test: Inputs and class numbers of the test part.
        num_classes: Number of classes.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x_train.shape[1:])

    def limit(self, examples: int) -> Examples:
        """Returns the first `examples` examples of the training part, and of the test part."""
        return Examples(
            name=self.name,
            x_train=self.x_train[:examples],
            y_train=self.y_train[:examples],
            x_test=self.x_test[:examples],
            y_test=self.y_test[:examples],
            num_classes=self.num_classes,
        )


def digits(*, image_size: int = 32, test_fraction: float = 0.2, seed: int = 0) -> Examples:
    """Loads the 1,797 real handwritten digits of scikit-learn, 8x8 pixels each, and enlarges them bilinearly.

    Args:
        image_size: Side of the images, in pixels.
        test_fraction: Share of the test part, the same for every class.
        seed: Seed of the split.
    Returns: Images [n, image_size, image_size, 1], float32 in [0, 1].
    Example:
        >>> digits().x_train.shape
        (1437, 32, 32, 1)

    Reference:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    import tensorflow as tf  # this import and sklearn's take seconds, and a list of the sources needs neither
    from sklearn.datasets import load_digits

    _check_at_least_one(image_size=image_size)
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    enlarged = tf.image.resize(pixels, (image_size, image_size)).numpy()
    return arrays(enlarged, labels.astype(np.int32), test_fraction=test_fraction, seed=seed, name="digits")


def arrays(
    x: np.ndarray, y: np.ndarray, *, test_fraction: float = 0.2, seed: int = 0, name: str = "arrays"
) -> Examples:
    """Splits arrays of examples into a training part and a test part. Every class has the same share in the test part.

    Args:
        x: Inputs, [n, ...].
        y: Class numbers from 0, [n].
        test_fraction: Share of the test part.
        seed: Seed of the split.
        name: Name of the data.
    Raises:
        ConfigError: The arrays differ in length, the labels are not class numbers, or the share is not in (0, 1).
    Example:
        >>> arrays(np.zeros((10, 4)), np.arange(10) % 2).x_test.shape
        (2, 4)
    """
    from sklearn.model_selection import train_test_split

    x, y = np.asarray(x), np.asarray(y)
    if len(x) != len(y):
        raise ConfigError(
            f"x and y must be equally long. Received: {len(x)} inputs and {len(y)} labels. Give one label per input."
        )
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or (len(y) and y.min() < 0):
        raise ConfigError(
            f"y must hold class numbers from 0, one per example. Received: shape {y.shape}, dtype {y.dtype}. "
            "Convert one-hot labels with y.argmax(axis=-1)."
        )
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction must be in (0, 1). Received: test_fraction={test_fraction}. 0.2 is usual.")
    try:
        parts = train_test_split(x, y, test_size=test_fraction, random_state=seed, stratify=y)
    except ValueError as error:
        raise ConfigError(
            "Every class must have at least two examples, and each part at least one of every class. "
            f"Received: {len(x)} examples and test_fraction={test_fraction} ({error}). "
            "Add examples of the rare classes, or change test_fraction."
        ) from error
    x_train, x_test, y_train, y_test = parts
    return Examples(
        name=name, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, num_classes=int(y.max()) + 1
    )


def synthetic(
    *,
    examples: int = 1024,
    input_shape: Sequence[int] = (32, 32, 3),
    num_classes: int = 10,
    noise: float = 0.3,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Examples:
    """Makes examples that a model can learn: one random pattern per class, plus noise.

    They serve to time a model at any input shape, and for tests. Their accuracy says nothing about real data.

    Args:
        examples: Number of examples, training and test part together.
        input_shape: Shape of one example.
        num_classes: Number of classes, all equally frequent.
        noise: Standard deviation of the noise. The patterns lie in [0, 1].
        test_fraction: Share of the test part.
        seed: Seed of patterns, noise and split.
    Example:
        >>> synthetic(examples=100, input_shape=(8,)).x_train.shape
        (80, 8)
    """
    _check_at_least_one(examples=examples, num_classes=num_classes)
    generator = np.random.default_rng(seed)
    patterns = generator.random((num_classes, *input_shape), dtype=np.float32)
    labels = np.arange(examples, dtype=np.int32) % num_classes
    x = patterns[labels] + noise * generator.standard_normal((examples, *input_shape), dtype=np.float32)
    return arrays(x, labels, test_fraction=test_fraction, seed=seed, name="synthetic")


def _check_at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1. Received: {name}={value}.")


SOURCES: dict[str, Callable[..., Examples]] = {"digits": digits, "synthetic": synthetic}
