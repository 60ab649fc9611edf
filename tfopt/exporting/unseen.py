"""The examples that the error of an artifact is measured on, none of which it was calibrated on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tfopt.exporting.manifest import RECOMBINED
from tfopt.quantization.calibration.calibrate import HELD_OUT, HeldOut
from tfopt.quantization.calibration.range_use import usual_limit


def unseen(sample: Mapping[str, np.ndarray] | None, held_out: HeldOut | None) -> HeldOut | None:
    """Returns the examples held out, or else new ones with the values of the sample, if there is one.

    Example:
        >>> unseen({"x": np.ones((4, 2), np.float32)}, None).inputs["x"].shape[1:]
        (2,)
    """
    return held_out if held_out or sample is None else HeldOut(inputs=_recombined(sample), origin=RECOMBINED)


def around(value: float) -> tuple[float, float]:
    """Returns a range around a value, of an input that has no other.

    Example:
        >>> around(2.0)
        (-4.0, 8.0)
    """
    return value - 3 * max(abs(value), 1.0), value + 3 * max(abs(value), 1.0)


def _recombined(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns random inputs that are as the examples of a batch in each cell, and are none of these examples.

    Each cell has its values from examples in random order. If all examples are equal, the cells change places. An input
    of one value gives evenly drawn numbers around it, and single values far beyond the others are clipped.
    """
    generator = np.random.default_rng(1)
    inputs = {}
    for name, value in batch.items():
        if value.dtype.kind not in "fiu" or not value.size:
            inputs[name] = value[:HELD_OUT]
            continue
        if (value == value[:1]).all() and value.dtype.kind == "f":
            low, high = around(float(value.flat[0]))
            shape = (HELD_OUT, *value.shape[1:])
            constant = bool((value == value.flat[0]).all())
            mixed = generator.uniform(low, high, shape) if constant else generator.choice(value.reshape(-1), shape)
        else:
            mixed = generator.permuted(value, axis=0)[:HELD_OUT]
        limit = usual_limit([value]) if value.dtype.kind == "f" else math.inf
        inputs[name] = (np.clip(mixed, -limit, limit) if math.isfinite(limit) else mixed).astype(value.dtype)
    size = min(map(len, inputs.values()))
    return {name: value[:size] for name, value in inputs.items()}
