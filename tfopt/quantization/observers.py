"""Observers: they see the values of one tensor, batch by batch, and end with the range to quantize it with.

Ranges are symmetric, because the int8 kernels take no zero point: a tensor that is never negative uses all 256 steps
of [0, max] (unsigned), any other the 255 steps of [-max, max] (signed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of one quantized tensor: [0, limit] if unsigned, else [-limit, limit].

    Example:
        >>> Range(limit=510.0, signed=False).scale
        2.0
    """

    limit: float
    signed: bool

    @property
    def low(self) -> float:
        return -self.limit if self.signed else 0.0

    @property
    def scale(self) -> float:
        """The step between two neighbouring quantized values."""
        return self.limit / (127 if self.signed else 255)


class Observer(Protocol):
    def update(self, values: np.ndarray) -> None:
        """Takes in the tensor's values on one batch."""

    def range(self) -> Range:
        """Returns the range for all that was seen."""


class MinMaxObserver:
    """The range that covers every value seen. Exact for clean data; one outlier costs all others resolution.

    Example:
        >>> observer = MinMaxObserver()
        >>> observer.update(np.array([-1.0, 3.0]))
        >>> observer.update(np.array([0.5, 2.0]))
        >>> observer.range()
        Range(limit=3.0, signed=True)
    """

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf

    def update(self, values: np.ndarray) -> None:
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))

    def range(self) -> Range:
        # A tensor that was zero throughout has no scale of its own; any one does.
        return Range(limit=max(abs(self.low), abs(self.high)) or 1.0, signed=self.low < 0)


OBSERVERS: dict[str, type[Observer]] = {"minmax": MinMaxObserver}
