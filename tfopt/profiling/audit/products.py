"""Which matrix products and convolutions of a step run in the tensor cores of a card, by their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tfopt.hardware import GpuCard
from tfopt.profiling.cost import Kernel

# Depthwise convolutions are no matrix products: each output needs one channel.
DEPTHWISE = "Depthwise"


def tensor_core_share(kernels: Iterable[Kernel], card: GpuCard) -> tuple[float | None, dict[str, float]]:
    """Returns the share of the multiply-adds that tensor cores compute, and that of each reason why they do not.

    Float32 products run in tensor cores as TensorFloat-32, if the card has it. The share is None without multiply-adds.

    Example:
        >>> from tfopt.hardware import find_card
        >>> def product(dtype, kind="MatMul"):
        ...     return Kernel(name="a", kinds=(kind,), multiply_adds=10, moved_bytes=0, dtype=dtype)
        >>> tensor_core_share([product("float16"), product("float32")], find_card("Tesla T4"))
        (0.5, {'float32': 0.5})
        >>> tensor_core_share([product("float32")], find_card("NVIDIA A100-SXM4-40GB"))
        (1.0, {})
    """
    counted: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.multiply_adds:
            is_depthwise = kernel.kinds[0].startswith(DEPTHWISE)
            counted[DEPTHWISE.lower() if is_depthwise else kernel.dtype] += kernel.multiply_adds * kernel.executions
    whole = sum(counted.values())
    if not whole:
        return None, {}
    fast = {"float32": "tensorfloat32"}
    counts = counted.most_common()
    slow = {what: count / whole for what, count in counts if fast.get(what, what) not in card.peak_tflops}
    return 1 - sum(slow.values()) if slow else 1.0, slow
