"""Arrays in memory as examples: their split into parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfopt.data.examples import Examples
from tfopt.errors import ConfigError


def arrays(
    x: Any,
    y: Any,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    outputs: int | None = None,
    class_names: tuple[str, ...] = (),
    seed: int = 0,
    name: str = "arrays",
) -> Examples:
    """Splits arrays of examples into parts. If y holds class numbers, every class has the same share in each part.

    Args:
        x: Inputs, [n, ...]; for a model of several inputs a dict of arrays.
        y: Targets: class numbers from 0 [n], or any array [n, ...].
        test_fraction: Share of the test part.
        validation_fraction: Share of the validation part. With 0 there is none.
        outputs: Number of outputs of a model. None means the number of classes if y holds integers, otherwise the
            length of the last axis of y.
        class_names: Names of the classes.
        seed: Seed of the split.
        name: Name of the data.
    Raises:
        ConfigError: The arrays differ in length, the targets are no numbers or are negative class numbers, a share is
            out of range, or a class has too few examples for every part.
    Example:
        >>> arrays(np.zeros((10, 4)), np.arange(10) % 2).x_test.shape
        (2, 4)
    """
    import tensorflow as tf

    x = {key: np.asarray(value) for key, value in x.items()} if isinstance(x, dict) else np.asarray(x)
    y = np.asarray(y)
    _check(x, y, test_fraction, validation_fraction)
    try:
        train, test = _split(np.arange(len(y)), y, test_fraction, seed)
        validation = None
        if validation_fraction:
            train, validation = _split(train, y, validation_fraction / (1 - test_fraction), seed)
    except ValueError as error:
        raise ConfigError(
            "Every class must have at least two examples, and each part at least one of every class. "
            f"Received: {len(y)} examples and test_fraction={test_fraction} ({error}). "
            "Add examples of the rare classes, or change test_fraction."
        ) from error

    def part(chosen: np.ndarray) -> Any:
        inputs = {key: value[chosen] for key, value in x.items()} if isinstance(x, dict) else x[chosen]
        return tf.data.Dataset.from_tensor_slices((inputs, y[chosen]))

    return Examples(
        name=name,
        train=part(train),
        test=part(test),
        validation=None if validation is None else part(validation),
        outputs=_outputs(y) if outputs is None else outputs,
        class_names=class_names,
    )


def check_at_least_one(**sizes: int) -> None:
    """Raises ConfigError unless every argument is at least 1.

    Example:
        >>> check_at_least_one(image_size=32)
    """
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1. Received: {name}={value}.")


def _check(x: Any, y: np.ndarray, test_fraction: float, validation_fraction: float) -> None:
    lengths = {len(value) if value.ndim else 0 for value in (x.values() if isinstance(x, dict) else (x,))}
    if lengths != {len(y) if y.ndim else -1}:
        found = " and ".join(map(str, sorted(lengths)))
        raise ConfigError(
            f"x and y must be equally long. Received: {found} inputs and {len(y) if y.ndim else 'a single'} labels. "
            "Give one label per input."
        )
    if y.dtype.kind not in "biuf" or (_holds_classes(y) and len(y) and y.min() < 0):
        raise ConfigError(
            "y must hold class numbers from 0, one per example, or numbers in any shape. "
            f"Received: shape {y.shape}, dtype {y.dtype}{', with negative numbers' if y.dtype.kind in 'iu' else ''}. "
            "Number the classes from 0."
        )
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction must be in (0, 1). Received: test_fraction={test_fraction}. 0.2 is usual.")
    if not 0 <= validation_fraction < 1 - test_fraction:
        raise ConfigError(
            "validation_fraction must be in [0, 1 - test_fraction). Received: "
            f"validation_fraction={validation_fraction}, test_fraction={test_fraction}. 0.1 is usual."
        )


def _holds_classes(y: np.ndarray) -> bool:
    return y.ndim == 1 and y.dtype.kind in "iu"


def _split(chosen: np.ndarray, y: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.model_selection import train_test_split

    classes = y[chosen] if _holds_classes(y) else None
    first, second = train_test_split(chosen, test_size=fraction, random_state=seed, stratify=classes)
    return first, second


def _outputs(y: np.ndarray) -> int:
    if y.dtype.kind in "iu" and y.size:
        return int(y.max()) + 1
    return int(y.shape[-1]) if y.ndim > 1 else 1
