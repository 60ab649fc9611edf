"""The links over which GPUs exchange gradients: bandwidths and latencies."""

from __future__ import annotations

from dataclasses import dataclass

from tfopt.hardware import GpuCard
from tfopt.report import Record

# Bytes per second of 16 lanes in one direction, by generation of PCIe, after its encoding.
PCIE_BYTES_PER_S = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
# Collective operations reach about this share of a link's rate: NCCL's all-reduce on eight A100 reaches 230 to 240 of
# 300 GB/s with large buffers (NVIDIA, nccl-tests).
REACHED = 0.78


@dataclass(frozen=True, kw_only=True)
class Link(Record):
    """A link of one GPU, or of one host.

    Attributes:
        name: Name of the link.
        bytes_per_s: Rate in one direction.
        latency_s: Time of one message of a collective operation, with the start of its kernel.
        reached: Share of the rate that a collective operation reaches.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    reached: float = REACHED

    @property
    def reached_bytes_per_s(self) -> float:
        """The rate that a collective operation reaches."""
        return self.reached * self.bytes_per_s


def _network(name: str, gigabits: float, latency_us: float) -> Link:
    return Link(name=name, bytes_per_s=gigabits * 1e9 / 8, latency_s=1e-6 * latency_us)


# Links of a host to the others, all its ports together. InfiniBand with RDMA has latencies of a few microseconds, TCP
# over Ethernet of tens.
LINKS: dict[str, Link] = {
    "ethernet_10": _network("10 Gbit/s Ethernet", 10, 50),
    "ethernet_25": _network("25 Gbit/s Ethernet", 25, 40),
    "ethernet_50": _network("50 Gbit/s Ethernet", 50, 40),
    "ethernet_100": _network("100 Gbit/s Ethernet", 100, 30),
    "infiniband_100": _network("InfiniBand EDR, 100 Gbit/s", 100, 5),
    "infiniband_200": _network("InfiniBand HDR, 200 Gbit/s", 200, 5),
    "infiniband_8x200": _network("InfiniBand HDR, 8 x 200 Gbit/s", 8 * 200, 5),
    "infiniband_8x400": _network("InfiniBand NDR, 8 x 400 Gbit/s", 8 * 400, 5),
}


def link_inside(card: GpuCard) -> Link:
    """Returns the link between the GPUs of a host: NVLink, or else PCIe.

    Example:
        >>> from tfopt.hardware import find_card
        >>> link_inside(find_card("A100")).name, link_inside(find_card("L4")).name
        ('NVLink, 300 GB/s', 'PCIe 4.0, 31.5 GB/s')
    """
    if card.nvlink_gb_per_s is not None:
        one_way = 1e9 * card.nvlink_gb_per_s / 2
        return Link(name=f"NVLink, {one_way / 1e9:g} GB/s", bytes_per_s=one_way, latency_s=3e-6)
    rate = PCIE_BYTES_PER_S[card.pcie_generation]
    return Link(name=f"PCIe {card.pcie_generation}.0, {rate / 1e9:g} GB/s", bytes_per_s=rate, latency_s=8e-6)
