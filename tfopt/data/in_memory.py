"""Arrays in memory as examples."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples, Split
from tfopt.data.finite import check_all_finite
from tfopt.data.splits import split
from tfopt.errors import ConfigError


def arrays(
    x: Any,
    y: Any,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    outputs: int | None = None,
    class_names: tuple[str, ...] = (),
    check_finite: bool = True,
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
        check_finite: Whether values that are NaN or infinite, also once they are float32, are an error.
        seed: Seed of the split.
        name: Name of the data.
    Raises:
        ConfigError: The arrays differ in length, the targets are no numbers or are class numbers below 0 or from
            `outputs` on, a value is not finite, a share is out of range, or a class has too few examples for every
            part.
    Example:
        >>> arrays(np.zeros((10, 4)), np.arange(10) % 2).x_test.shape
        (2, 4)
    """
    check_arguments(locals())
    import tensorflow as tf

    for each, value in _named(x, y).items():
        if np.ma.is_masked(value):
            raise ConfigError(
                f"{each} must hold a value in every cell. Received: a masked array with "
                f"{int(np.sum(np.ma.getmaskarray(value)))} masked cells. Fill them with array.filled(0), or "
                "leave out their rows."
            )
    x = {key: np.asarray(value) for key, value in x.items()} if isinstance(x, dict) else np.asarray(x)
    y = np.asarray(y)
    _check(x, y, test_fraction)
    if check_finite:
        check_all_finite(_named(x, y))
    if outputs is not None or class_names:
        check_classes("y", y, outputs or len(class_names))
    parts = split(len(y), y if holds_classes(y) else None, test_fraction, validation_fraction, seed)

    found = int(y.shape[-1]) if y.ndim > 1 else 1
    if y.dtype.kind in "iu" and y.size:
        found = int(y.max()) + 1

    def part(name: Split) -> Any:
        chosen = parts[name]
        inputs = {key: value[chosen] for key, value in x.items()} if isinstance(x, dict) else x[chosen]
        return tf.data.Dataset.from_tensor_slices((inputs, y[chosen]))

    return Examples(
        name=name,
        train=part("train"),
        test=part("test"),
        validation=part("validation") if validation_fraction else None,
        outputs=outputs or found,
        class_names=class_names,
        check_finite=False,  # it is done
    )


def _named(x: Any, y: Any) -> dict[str, Any]:
    inputs = {f"x[{key!r}]": value for key, value in x.items()} if isinstance(x, dict) else {"x": x}
    return {**inputs, "y": y}


def check_classes(name: str, y: np.ndarray, outputs: int) -> None:
    """Raises ConfigError if class numbers [n] are not below the number of outputs.

    Example:
        >>> check_classes("y", np.array([0, 3, 7]), outputs=3)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: y must hold class numbers from 0 to 2. Received: 2 of 3 that are not: 3 in row 1. ...
    """
    if not holds_classes(y) or outputs == 1:
        return
    wrong = np.flatnonzero((y < 0) | (y >= outputs))
    if len(wrong):
        raise ConfigError(
            f"{name} must hold class numbers from 0 to {outputs - 1}. Received: {len(wrong)} of {len(y)} that are not: "
            f"{y[wrong[0]]} in row {wrong[0]}. Correct them, or the number of outputs or class names."
        )


def _check(x: Any, y: np.ndarray, test_fraction: float) -> None:
    lengths = {len(value) if value.ndim else 0 for value in (x.values() if isinstance(x, dict) else (x,))}
    if lengths != {len(y) if y.ndim else -1}:
        found = " and ".join(map(str, sorted(lengths)))
        raise ConfigError(
            f"x and y must be equally long. Received: {found} inputs and {len(y) if y.ndim else 'a single'} labels. "
            "Give one label per input."
        )
    if y.dtype.kind not in "biuf" or (holds_classes(y) and len(y) and y.min() < 0):
        raise ConfigError(
            "y must hold class numbers from 0, one per example, or numbers in any shape. "
            f"Received: shape {y.shape}, dtype {y.dtype}{', with negative numbers' if y.dtype.kind in 'iu' else ''}. "
            "Number the classes from 0."
        )
    for name, value in x.items() if isinstance(x, dict) else (("x", x),):
        texts = all(isinstance(cell, (str, bytes)) for cell in value.flat) if value.dtype == object else True
        if not texts or not is_known(value.dtype):
            raise ConfigError(
                f"{name} must hold numbers or strings. Received: dtype {value.dtype}, shape {value.shape}. Make it an "
                "array of numbers with np.stack(rows) or astype('float32')."
            )
    if test_fraction == 0:
        raise ConfigError("test_fraction must be in (0, 1). Received: test_fraction=0. 0.2 is usual.")


def is_known(dtype: np.dtype[Any]) -> bool:
    """Returns whether TensorFlow has a type: it has no longdouble."""
    import tensorflow as tf

    try:
        return bool(tf.as_dtype(dtype))
    except TypeError:
        return False


def holds_classes(y: np.ndarray) -> bool:
    return y.ndim == 1 and y.dtype.kind in "iu"
