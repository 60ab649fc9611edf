"""A few examples that were not calibrated on. On these, an export compares the int8 model with the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

HELD_OUT = 32  # the number of examples
REST = "the rest of calibration_data"
EVALUATION = "evaluation_data"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HeldOut:
    """Examples that were not used for the calibration.

    Attributes:
        inputs: The examples by input name, all of one shape.
        origin: Where they come from.
    """

    inputs: Mapping[str, np.ndarray]
    origin: str


def held_out(batches: Sequence[Mapping[str, Any]], origin: str) -> HeldOut | None:
    """Returns the first examples of one shape, HELD_OUT at most, or None where there are none.

    Example:
        >>> batches = [{"x": np.zeros((20, 3))}, {"x": np.zeros((20, 3))}, {"x": np.zeros((20, 4))}]
        >>> held_out(batches, "the rest").inputs["x"].shape
        (32, 3)
    """
    parts: list[dict[str, np.ndarray]] = []
    for batch in batches:
        arrays = {name: np.asarray(value) for name, value in batch.items()}
        if parts and any(value.shape[1:] != parts[0][name].shape[1:] for name, value in arrays.items()):
            break
        parts.append(arrays)
    if not parts:
        return None
    joined = {name: np.concatenate([part[name] for part in parts])[:HELD_OUT] for name in parts[0]}
    return HeldOut(inputs=joined, origin=origin)
