"""How many bits quantized weights use, so that every x86 processor computes the same with them.

With VNNI (or AMX) a kernel multiplies bytes and adds the products in 32 bits. Without, it adds two products in 16 bits
first, which saturate at 32767 (the instruction is vpmaddubsw). What that means differs from kernel to kernel; it was
found out by comparing each with exact integers (tests/exporting/int8/test_instructions.py):

- A convolution or product of unsigned activations adds up to 2 * 255 * |w|, which fits for |w| <= 64.
- A product of signed activations shifts them by 128 into unsigned ones: the same bound.
- A convolution of signed activations, depthwise or not, does so too, but halves its weights first. Nothing saturates,
  but odd weights lose half a step. Even ones are exact. So the lowering doubles the weights where it can, and their
  scale is half as large: the values are the same.
- A depthwise convolution of unsigned activations adds no pairs. It is exact with weights of 8 bits. With one channel
  only, it is computed as an ordinary convolution.

So weights of 7 bits, from -63 to 63, are exact everywhere: as they are, or doubled. Those of 4 bits are too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfopt.graph.edit import GraphEditor
from tfopt.quantization.annotation.fusion import Fusion, pass_through_origin
from tfopt.quantization.annotation.range import Range, steps_above_zero

REDUCED_BITS = 7


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """The grid of a model's quantized weights.

    Attributes:
        bits: The width of the weights.
        reduce_range: Whether weights of 8 bits use 7 of them where 8 could saturate without VNNI.

    Example:
        >>> WeightGrid(reduce_range=True).bits
        8
    """

    bits: int = 8
    reduce_range: bool = False

    def bits_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns how many bits the weights of a fusion use.

        Args:
            editor: An editor of the float graph.
            fusion: One of its fusions.
            ranges: The range of each tensor that enters a fusion.
        """
        if not self.reduce_range or self.bits < 8:
            return self.bits
        unsigned = not ranges[pass_through_origin(editor, fusion.input)].signed
        by_channel = editor.nodes[fusion.op].op == "DepthwiseConv2dNative" and editor.value(fusion.weights).shape[2] > 1
        return self.bits if by_channel and unsigned else REDUCED_BITS

    def top_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns how many quantized values of a fusion's weights lie above zero; arguments as for bits_of."""
        return steps_above_zero(self.bits_of(editor, fusion, ranges))
