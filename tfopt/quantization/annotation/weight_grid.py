"""The number of bits of quantized weights, chosen so that every x86 processor computes the same results.

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

from tfopt.graph.edit import GraphEditor
from tfopt.quantization.annotation.fusion import Fusion, before_data_movement
from tfopt.quantization.annotation.range import Range, steps_above_zero

REDUCED_BITS = 7


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """The grid of a model's quantized weights.

    Attributes:
        bits: The width of the weights.
        reduce_range: Whether weights of 8 bits use only 7 of the bits where 8 could saturate without VNNI.

    Example:
        >>> WeightGrid(reduce_range=True).bits
        8
    """

    bits: int = 8
    reduce_range: bool = False

    def bits_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns the number of bits that the weights of a fusion use.

        Args:
            editor: An editor of the float graph.
            fusion: One of its fusions.
            ranges: The range of each tensor that enters a fusion.
        """
        if not self.reduce_range or self.bits < 8:
            return self.bits
        unsigned = not ranges[before_data_movement(editor, fusion.input)].signed
        by_channel = editor.nodes[fusion.op].op == "DepthwiseConv2dNative" and editor.value(fusion.weights).shape[2] > 1
        return self.bits if by_channel and unsigned else REDUCED_BITS

    def qmax_of(self, editor: GraphEditor, fusion: Fusion, ranges: Mapping[str, Range]) -> int:
        """Returns the largest quantized value of a fusion's weights. The arguments are those of `bits_of`."""
        return steps_above_zero(self.bits_of(editor, fusion, ranges))
