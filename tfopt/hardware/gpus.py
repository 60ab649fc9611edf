"""NVIDIA's GPUs, most of them for data centers: peak rates, memory, power and links, from the datasheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfopt.errors import unknown_name
from tfopt.report import Record
from tfopt.report.formatting import memory_size

# Microseconds until a small kernel has started; the value that fits published training runs best (docs/efficiency.md).
KERNEL_START_US = 4.0


@dataclass(frozen=True)
class GpuCard(Record):
    """What the datasheet of a GPU says. Bandwidths are in 10^9 bytes per second."""

    peak_tflops: Mapping[str, float]  # dense, in 10^12 operations per second by dtype; see the function `peak_tflops`
    memory_gib: float  # datasheets write GB; the drivers report about as many GiB
    memory_gb_per_s: float
    board_watts: float  # the largest power of the board
    nvlink_gb_per_s: float | None  # of all NVLinks of the GPU, both directions together; None without NVLink
    pcie_generation: int  # of the connection, which has 16 lanes
    compute_capability: tuple[int, int]  # major and minor number, for example (9, 0)

    @property
    def memory_bytes(self) -> int:
        """Size of the memory in bytes."""
        return int(self.memory_gib * 2**30)


def _peaks(float32: float, tensorfloat32: float, float16: float, int8: float) -> dict[str, float]:
    """Returns peak rates by dtype. Since Ampere, bfloat16 has the rate of float16."""
    half = {"float16": float16, "bfloat16": float16}
    return {"float32": float32, "tensorfloat32": tensorfloat32, **half, "int8": int8}


_V100 = {"float32": 15.7, "float16": 125.0}
_A100 = _peaks(19.5, 156.0, 312.0, 624.0)
_HOPPER = _peaks(67.0, 494.5, 989.5, 1979.0)
_HOPPER_NVL = _peaks(60.0, 417.5, 835.5, 1670.5)

# Dense peaks in 10^12 operations per second: float32 on the CUDA cores, all others on the tensor cores; then the memory
# in GiB and in GB/s, the power in W, NVLink in GB/s, the generation of PCIe, and the compute capability. If a datasheet
# gives the rate with 2:4 sparsity, the dense rate is half of it. A key is words of the device name. The first key with
# all its words in the name is used, so a variant comes before its family. Products with similar names (A10G, L40,
# GH200) are not in the table.
GPU_CARDS: dict[str, GpuCard] = {
    # "NVIDIA V100 Tensor Core GPU" datasheet, January 2020. Of each V100, the smaller memory. SXM3 is the V100 of the
    # DGX-2 ("NVIDIA DGX-2" datasheet, 2019).
    "V100 SXM2": GpuCard(_V100, 16, 900, 300, 300, 3, (7, 0)),
    "V100 SXM3": GpuCard(_V100, 32, 900, 350, 300, 3, (7, 0)),
    "V100 PCIE": GpuCard({"float32": 14.0, "float16": 112.0}, 16, 900, 250, None, 3, (7, 0)),
    # "NVIDIA T4" product brief PB-09256-001.
    "T4": GpuCard({"float32": 8.1, "float16": 65.0, "int8": 130.0}, 16, 320, 70, None, 3, (7, 5)),
    # "NVIDIA A10 Tensor Core GPU" datasheet, 2021.
    "A10": GpuCard(_peaks(31.2, 62.5, 125.0, 250.0), 24, 600, 150, None, 4, (8, 6)),
    # "NVIDIA A100 Tensor Core GPU" datasheets of November 2020 (40 GB) and June 2021 (80 GB).
    "A100 SXM4 80GB": GpuCard(_A100, 80, 2039, 400, 600, 4, (8, 0)),
    "A100 80GB PCIE": GpuCard(_A100, 80, 1935, 300, 600, 4, (8, 0)),
    "A100 PCIE 40GB": GpuCard(_A100, 40, 1555, 250, 600, 4, (8, 0)),
    "A100": GpuCard(_A100, 40, 1555, 400, 600, 4, (8, 0)),
    # "NVIDIA L4 Tensor Core GPU" and "NVIDIA L40S" datasheets, 2023.
    "L4": GpuCard(_peaks(30.3, 60.0, 121.0, 242.5), 24, 300, 72, None, 4, (8, 9)),
    "L40S": GpuCard(_peaks(91.6, 183.0, 362.05, 733.0), 48, 864, 350, None, 4, (8, 9)),
    # "NVIDIA Ada GPU Architecture" white paper. The half-precision rate is that with sums in float32, as TensorFlow
    # computes.
    "RTX 4090": GpuCard(_peaks(82.6, 82.6, 165.2, 660.6), 24, 1008, 450, None, 4, (8, 9)),
    # "NVIDIA H100 Tensor Core GPU" datasheets: PCIe of 2022, SXM and NVL of 2024.
    "H100 PCIE": GpuCard(_peaks(51.0, 378.0, 756.5, 1513.0), 80, 2000, 350, 600, 5, (9, 0)),
    "H100 NVL": GpuCard(_HOPPER_NVL, 94, 3900, 400, 600, 5, (9, 0)),
    "H100 HBM3": GpuCard(_HOPPER, 80, 3350, 700, 900, 5, (9, 0)),
    # "NVIDIA H200 Tensor Core GPU" datasheet, 2024.
    "H200 NVL": GpuCard(_HOPPER_NVL, 141, 4800, 600, 900, 5, (9, 0)),
    "H200": GpuCard(_HOPPER, 141, 4800, 700, 900, 5, (9, 0)),
    # "NVIDIA DGX B200" datasheet, 2024: an eighth of the system's memory, bandwidth and NVLink; 1,000 W for each GPU
    # ("NVIDIA Blackwell Architecture" technical brief).
    "B200": GpuCard(_peaks(75.0, 1100.0, 2250.0, 4500.0), 180, 8000, 1000, 1800, 5, (10, 0)),
}


# Words of the names of GPUs that have less than what the datasheet of their namesake says.
LESS = frozenset({"MIG", "GRID", "LAPTOP", "MAX", "D"})


@dataclass(frozen=True, kw_only=True)
class Gpu(Record):
    """One GPU that TensorFlow can use, by its product name.

    Example:
        >>> print(Gpu(name="NVIDIA A1", compute_capability=(8, 6)))
        NVIDIA A1, compute capability 8.6, memory unavailable (NVML does not report it),
        peak rates unavailable (not among the GPUs that tfopt knows)
    """

    name: str
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    peak_tflops: Mapping[str, float] | None = None

    def __str__(self) -> str:
        capability, memory = "unavailable (TensorFlow does not report it)", "unavailable (NVML does not report it)"
        rates = "rates unavailable (not among the GPUs that tfopt knows)"
        if self.compute_capability is not None:
            capability = "{}.{}".format(*self.compute_capability)
        if self.memory_bytes is not None:
            memory = memory_size(self.memory_bytes)
        if self.peak_tflops is not None:
            rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in self.peak_tflops.items()) + " TFLOP/s"
        return f"{self.name}, compute capability {capability}, memory {memory}, peak {rates}"


def peak_tflops(gpu_name: str) -> dict[str, float] | None:
    """Returns the peak rates of a GPU by dtype, or None if they are unknown.

    The rates are dense (no 2:4 sparsity), in 10^12 operations per second. "float32" is the rate of the CUDA cores.
    "tensorfloat32" is the rate of float32 matrix products in TensorFlow by default, since Ampere. A slice of a GPU
    (MIG, vGPU) has only a share of the rates, and its name does not give the share, so its rates are unknown. The name
    is the product name that TensorFlow or NVML reports.

    Example:
        >>> peak_tflops("Tesla T4")
        {'float32': 8.1, 'float16': 65.0, 'int8': 130.0}
        >>> peak_tflops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
    """
    card = find_card(gpu_name)
    return None if card is None else dict(card.peak_tflops)


def find_card(gpu_name: str) -> GpuCard | None:
    """Returns what the datasheet of a GPU says, or None if the GPU is not in the table.

    A slice of a GPU (MIG, vGPU) has only a share of it, which its name does not give, so it is unknown too. The same
    holds for the laptop form of a GPU, and for the D form, which have lower rates.
    """
    words = _words(gpu_name)
    if words & LESS:
        return None
    return next((card for key, card in GPU_CARDS.items() if set(key.split()) <= words), None)


def card_name(name: str) -> str:
    """Returns the name that a GPU has in GPU_CARDS: of its own name, a product name, or in short, such as "h100".

    A part that several GPUs have in common means the one with the highest peak rate, of those with the memory that the
    name gives.

    Raises:
        ConfigError: There is no such GPU in the table.
    Example:
        >>> card_name("H100"), card_name("a100"), card_name("NVIDIA H100 80GB HBM3")
        ('H100 HBM3', 'A100', 'H100 HBM3')
        >>> card_name("A100-80GB"), card_name("H100 SXM5 80GB"), card_name("rtx4090"), card_name("V100-32GB")
        ('A100 SXM4 80GB', 'H100 HBM3', 'RTX 4090', 'V100 SXM3')
    """
    if name.upper() in GPU_CARDS:
        return name.upper()
    words = _words(name)
    of_part = [key for key in GPU_CARDS if words and words <= set(key.split())]
    if of_part:
        return max(of_part, key=_half_rate)
    of_product = next((key for key, card in GPU_CARDS.items() if card is find_card(name)), None)
    if of_product is not None:
        return of_product
    sizes = {int(word[:-2]) for word in words if re.fullmatch(r"[0-9]+GB", word)}
    of_family = [
        key
        for key, card in GPU_CARDS.items()
        if _family(key) <= words and not words & LESS and (not sizes or card.memory_gib in sizes)
    ]
    if not of_family:
        raise unknown_name("card", name, GPU_CARDS)
    return max(of_family, key=_half_rate)


def _family(key: str) -> set[str]:
    """Returns the words that name the family of a card of the table: its first, or of an RTX its first two."""
    words = key.split()
    return set(words[:2]) if words[0] == "RTX" else {words[0]}


def _half_rate(key: str) -> float:
    return GPU_CARDS[key].peak_tflops["float16"]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", re.sub(r"RTX(?=[0-9])", "RTX ", name.upper())))
