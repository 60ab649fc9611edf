"""The values that quantized tensors can take: the range of an activation, and the bits of weights.

A range has one of three forms:

- A tensor that is never negative uses the 256 values of [0, limit], stored as unsigned bytes.
- A tensor whose values reach about equally far below and above zero uses the 255 values of [-limit, limit], stored as
  signed bytes.
- A tensor that reaches much further on one side, as after swish, uses 256 values from its lowest to its highest value,
  stored as unsigned bytes with a zero point. The step is up to half as large as that of the symmetric form.

Weights have a number of bits that is chosen so that every x86 processor computes the same results.
With VNNI (or AMX), a kernel multiplies bytes and adds the products in 32 bits. Without VNNI, it first adds two products
in 16 bits, with the instruction vpmaddubsw, which saturates at 32767. The effect differs from kernel to kernel. The
test tests/exporting/int8/test_instructions.py compares each kernel with exact integer arithmetic:

- Unsigned activations in a convolution or product: the sum is at most 2 * 255 * |w|. It fits for |w| <= 64.
- Signed activations in a product: the kernel shifts them by 128, so they are unsigned. The bound is the same.
- Signed activations in a convolution, depthwise or not: the kernel shifts them too, but halves the weights first.
  Nothing saturates. Odd weights lose half a step, even weights are exact. So the lowering doubles the weights where it
  can and halves their scale, which keeps the values.
- Unsigned activations in a depthwise convolution: the kernel adds no pairs. It is exact with weights of 8 bits. A
  depthwise convolution with one channel is computed as an ordinary convolution.

So weights of 7 bits, from -63 to 63, are exact everywhere, unchanged or doubled. Weights of 4 bits are exact too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfopt.graph.edit import GraphEditor
from tfopt.quantization.annotation.fusion import Fusion, before_data_movement
from tfopt.report import Change

# A zero point costs some time where a convolution pads. So its step must be at most this share of the symmetric step.
WORTHWHILE_STEP = 0.9
DEPTHWISE = ("DepthwiseConv2dNative", "_FusedQuantizedDepthwiseConv2D")  # in float, and in int8


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

    A signed range is [-limit, limit] in 254 steps, stored as signed bytes. Others are stored as unsigned bytes in 255
    steps, and the byte `zero_point` represents zero: it is the number of steps below zero.

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


SMALLEST = 1e-30  # of a range; float32 has no numbers for the products of smaller steps


def covering(low: float, high: float) -> Range:
    """Returns the range that covers the values from `low` to `high`, in the form with the smallest step.

    Values under `SMALLEST` count as zeros.

    Example:
        >>> covering(0.0, 3.0)
        Range(limit=3.0, signed=False, zero_point=0)
        >>> covering(-3.0, 2.9)
        Range(limit=3.0, signed=True, zero_point=0)
        >>> covering(-1.0, 4.1)
        Range(limit=4.1, signed=False, zero_point=50)
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if max(high, -low) < SMALLEST:
        return Range(limit=1.0, signed=False)  # any limit will do for zeros
    if low == 0.0:
        return Range(limit=high, signed=False)
    symmetric = Range(limit=max(high, -low), signed=True)
    # The zero point is rounded to a whole number of steps. Both ends must still be covered.
    zero_point = min(max(round(-low * 255 / (high - low)), 1), 254)
    scale = max(-low / zero_point, high / (255 - zero_point))
    if scale > WORTHWHILE_STEP * symmetric.scale:
        return symmetric
    return Range(limit=scale * (255 - zero_point), signed=False, zero_point=zero_point)


REDUCED_BITS = 7


def adds_by_channel(op: str, weights: np.ndarray) -> bool:
    """Whether the kernel of an op adds no pairs of products, since each channel has a sum of its own.

    Example:
        >>> [adds_by_channel("DepthwiseConv2dNative", np.zeros((3, 3, channels))) for channels in (8, 1)]
        [True, False]
    """
    return op in DEPTHWISE and weights.shape[2] > 1


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """The grid of a model's quantized weights, of `bits` bits.

    With `reduce_range`, weights of 8 bits use only 7 of the bits where 8 could saturate without VNNI.
    """

    bits: int = 8
    reduce_range: bool = False

    def bits_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns the number of bits that the weights of a fusion of the float graph use."""
        if not self.reduce_range or self.bits < 8:
            return self.bits
        unsigned = not ranges[before_data_movement(editor, fusion.input)].signed
        by_channel = adds_by_channel(editor.nodes[fusion.op].op, editor.value(fusion.weights))
        return self.bits if by_channel and unsigned else REDUCED_BITS

    def qmax_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns the largest quantized value of a fusion's weights. The arguments are those of `bits_of`."""
        return steps_above_zero(self.bits_of(editor, fusion, ranges))


MUCH = 0.5
LOST = "lost weights"


def share_lost(weights: np.ndarray, rounded: np.ndarray) -> float:
    """Returns the share of the weights other than 0 that are 0 after rounding.

    Example:
        >>> share_lost(np.array([0.0, 1e-9, 1.0]), np.array([0.0, 1e-9, 1.0]).astype("float16"))
        0.5
    """
    nonzero = int(np.count_nonzero(weights))
    return 1 - int(np.count_nonzero(rounded)) / nonzero if nonzero else 0.0


def lost_weights(shares: Mapping[str, float]) -> list[Change]:
    """Returns a note for each tensor that loses most of its weights.

    Example:
        >>> [note.detail for note in lost_weights({"conv": 0.2, "head": 1.0})]
        ['100.0% of its weights other than 0 are rounded to 0']
    """
    return [
        Change(name=name, kind=LOST, detail=f"{share:.1%} of its weights other than 0 are rounded to 0")
        for name, share in shares.items()
        if share > MUCH
    ]
