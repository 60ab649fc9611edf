"""The rates that a step reaches on a device, and its time by the roofline of each kernel.

A kernel takes the longer of the time of its operations and the time of its bytes, and a fixed time for its start:

    seconds of a step  =  sum over kernels of  max(flops / rate of the dtype, bytes / bandwidth) + start

No kernel reaches the peaks of a datasheet. So the rates of a GPU are shares of them. The shares were chosen so that the
single-GPU runs that NVIDIA publishes are met best (benchmarks/advisor.py, which also states the error of each run). The
rates of a processor are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tfopt.hardware import KERNEL_START_US, CpuPeak, GpuCard, Hardware
from tfopt.profiling.cost import Kernel
from tfopt.report import Record

TENSOR_CORE_SHARE = 0.6
CUDA_CORE_SHARE = 0.85
MEMORY_SHARE = 0.9
# A convolution reaches less of the rate that a large matrix product reaches on a processor. Both shares of a processor
# were chosen by the recipes that benchmarks/advisor.py measures.
CPU_COMPUTE_SHARE = 0.5
# Depthwise convolutions have no matrix product: tensor cores do not compute them, and a processor reaches little.
CPU_DEPTHWISE_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class Device(Record):
    """What a step reaches on a device."""

    name: str  # name of the device
    flops_per_s: Mapping[str, float]  # rate of matrix products and convolutions by the dtype of their inputs
    depthwise_flops_per_s: float  # rate of depthwise convolutions
    bytes_per_s: float  # bandwidth of the memory
    kernel_s: float  # time of a kernel's start
    memory_bytes: int  # size of the memory
    watts: float | None = None  # power of the board; None if it is unknown


def of_card(name: str, card: GpuCard) -> Device:
    """Returns a GPU of the table. Float32 products run in TensorFloat-32 if the GPU has it, as is the default.

    Example:
        >>> from tfopt.hardware import find_card
        >>> device = of_card("A100", find_card("A100"))
        >>> device.flops_per_s["float32"] == TENSOR_CORE_SHARE * 156e12
        True
    """
    rates = {dtype: 1e12 * TENSOR_CORE_SHARE * rate for dtype, rate in card.peak_tflops.items()}
    rates["float32"] = 1e12 * CUDA_CORE_SHARE * card.peak_tflops["float32"]
    if "tensorfloat32" in rates:
        rates["float32"] = rates["tensorfloat32"]
    return Device(
        name=name,
        flops_per_s=rates,
        depthwise_flops_per_s=1e12 * CUDA_CORE_SHARE * card.peak_tflops["float32"],
        bytes_per_s=1e9 * MEMORY_SHARE * card.memory_gb_per_s,
        kernel_s=1e-6 * KERNEL_START_US,
        memory_bytes=card.memory_bytes,
        watts=card.board_watts,
    )


def of_processor(hardware: Hardware, peak: CpuPeak) -> Device:
    """Returns the processor of this machine, by its measured peaks."""
    return Device(
        name=f"{hardware.processor}, {peak.logical_cores} logical cores",
        flops_per_s={
            dtype: 1e9 * CPU_COMPUTE_SHARE * gflops
            for dtype, gflops in (("float32", peak.float32_gflops), ("bfloat16", peak.bfloat16_gflops))
            if gflops is not None
        },
        depthwise_flops_per_s=1e9 * CPU_DEPTHWISE_SHARE * peak.float32_gflops,
        bytes_per_s=1e9 * peak.memory_gb_per_s,
        kernel_s=1e-6 * peak.kernel_us,
        memory_bytes=hardware.memory_bytes,
    )


def step_seconds(kernels: Iterable[Kernel], device: Device) -> float | None:
    """Returns the time of a step; None if the device has no known rate for the dtype of a product.

    Example:
        >>> device = Device(
        ...     name="a", flops_per_s={"float32": 2e12}, depthwise_flops_per_s=1e11, bytes_per_s=1e12, kernel_s=1e-6,
        ...     memory_bytes=2**30,
        ... )
        >>> product = Kernel(name="b", kinds=("MatMul",), multiply_adds=10**9, moved_bytes=10**6, dtype="float32")
        >>> round(step_seconds([product], device), 6)
        0.001001
    """
    seconds = 0.0
    for kernel in kernels:
        rate = device.flops_per_s.get(kernel.dtype or "float32")
        if kernel.kinds[0].startswith("Depthwise"):
            rate = device.depthwise_flops_per_s
        if kernel.multiply_adds and rate is None:
            return None
        computing = 2 * kernel.multiply_adds / rate if rate else 0.0
        moving = kernel.moved_bytes / device.bytes_per_s
        seconds += kernel.executions * (max(computing, moving) + device.kernel_s)
    return seconds
