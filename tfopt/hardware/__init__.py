"""The hardware of this machine, the figures of known GPUs, and the measured peaks of a processor.

Start in machine.py, which lists what this machine has. gpus.py is the table of GPUs; processor_peak.py measures the
peaks of a processor.
"""

from tfopt.hardware.gpus import GPU_CARDS, KERNEL_START_US, Gpu, GpuCard, find_card, peak_tflops
from tfopt.hardware.machine import (
    CPU_FEATURES,
    Hardware,
    computes_bfloat16,
    detect,
    has_vnni,
    logical_cores,
    multiplies_bfloat16,
    writes_bfloat16,
)
from tfopt.hardware.processor_peak import CpuPeak, cpu_peak

__all__ = [
    "CPU_FEATURES",
    "GPU_CARDS",
    "KERNEL_START_US",
    "CpuPeak",
    "Gpu",
    "GpuCard",
    "Hardware",
    "computes_bfloat16",
    "cpu_peak",
    "detect",
    "find_card",
    "has_vnni",
    "logical_cores",
    "multiplies_bfloat16",
    "peak_tflops",
    "writes_bfloat16",
]
