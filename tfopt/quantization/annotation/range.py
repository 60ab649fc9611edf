"""The range of a quantized tensor: the values that its quantized steps cover.

A range has one of three forms:

- A tensor that is never negative uses the 256 values of [0, limit], stored as unsigned bytes.
- A tensor whose values reach about equally far below and above zero uses the 255 values of [-limit, limit], stored as
  signed bytes.
- A tensor that reaches much further on one side, as after swish, uses 256 values from its lowest to its highest value,
  stored as unsigned bytes with a zero point. The step is up to half as large as that of the symmetric form.
"""

from __future__ import annotations

from dataclasses import dataclass

# A zero point costs some time where a convolution pads. So its step must be at most this share of the symmetric step.
WORTHWHILE_STEP = 0.9


def steps_above_zero(bits: int, *, signed: bool = True) -> int:
    """Returns how many quantized values lie above zero.

    Example:
        >>> steps_above_zero(8), steps_above_zero(8, signed=False), steps_above_zero(4)
        (127, 255, 7)
    """
    return 2 ** (bits - 1) - 1 if signed else 2**bits - 1


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of one quantized tensor. Zero is always one of its values.

    Attributes:
        limit: The largest value.
        signed: Whether it is stored as signed bytes: [-limit, limit] in 254 steps. Otherwise it is stored as unsigned
            bytes in 255 steps.
        zero_point: The unsigned byte that represents zero. It is the number of steps below zero.

    Example:
        >>> Range(limit=510.0, signed=False).scale
        2.0
        >>> Range(limit=200.0, signed=False, zero_point=55).low
        -55.0
    """

    limit: float
    signed: bool
    zero_point: int = 0

    @property
    def low(self) -> float:
        """The smallest value."""
        return -self.limit if self.signed else -self.zero_point * self.scale

    @property
    def steps(self) -> int:
        """How many quantized values lie above zero."""
        return 127 if self.signed else 255 - self.zero_point

    @property
    def scale(self) -> float:
        """The step between two neighbouring quantized values."""
        return self.limit / self.steps

    def symmetric(self) -> Range:
        """Returns the range without a zero point that covers this one."""
        return Range(limit=max(self.limit, -self.low), signed=True) if self.zero_point else self


def covering(low: float, high: float) -> Range:
    """Returns the range that covers the values from `low` to `high`, in the form with the smallest step.

    Example:
        >>> covering(0.0, 3.0)
        Range(limit=3.0, signed=False, zero_point=0)
        >>> covering(-3.0, 2.9)
        Range(limit=3.0, signed=True, zero_point=0)
        >>> covering(-1.0, 4.1)
        Range(limit=4.1, signed=False, zero_point=50)
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if low == 0.0:
        return Range(limit=_or_one(high), signed=False)
    symmetric = Range(limit=max(high, -low), signed=True)
    # The zero point is rounded to a whole number of steps. Both ends must still be covered.
    zero_point = min(max(round(-low * 255 / (high - low)), 1), 254)
    scale = max(-low / zero_point, high / (255 - zero_point))
    if scale > WORTHWHILE_STEP * symmetric.scale:
        return symmetric
    return Range(limit=scale * (255 - zero_point), signed=False, zero_point=zero_point)


def _or_one(limit: float) -> float:
    """Returns the limit, or 1 for a tensor of zeros, for which any limit will do."""
    return limit or 1.0
