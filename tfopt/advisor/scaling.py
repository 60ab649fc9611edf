"""The time of a training step on 1 to 1,024 GPUs that train together on equal parts of a batch.

Each GPU computes the gradients of its own examples. Then all GPUs sum the gradients, and each makes the same update. Of
S bytes of gradients, over n GPUs with links of B bytes per second and latency a, the sum takes

    ring           2 (n - 1) / n * S / B  +  2 (n - 1) * a
    hierarchical   2 (g - 1) / g * S / B1 +  2 (g - 1) * a1      between the g GPUs of a host
                 + 2 (h - 1) / h * S / B2 +  2 (h - 1) * a2      between h hosts, whose link the g GPUs share

A ring over several hosts is as slow as its slowest link. The sum may overlap with the backward pass, two thirds of the
computation, since the gradients of the last layers are known first. The sum of the last bucket cannot overlap. tfopt's
own step does not overlap: XLA returns all gradients together.

Not in the model: replicas that wait for the slowest, input that does not keep up, and congestion of the network.

Reference:
    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le

from tfopt.errors import ConfigError
from tfopt.hardware import GpuCard
from tfopt.report import Record
from tfopt.report.formatting import short_bytes
from tfopt.report.sheet import Sheet, Shown, Table, lines
from tfopt.settings.validation import check_fields

BACKWARD_SHARE = 2 / 3
# Frameworks sum gradients in buckets of this size (Horovod: 64 MB or more, PyTorch DDP: 25 MB).
BUCKET_BYTES = 25e6
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


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts with GPUs, and how these sum their gradients.

    Attributes:
        inside: The link of a GPU to the others of its host.
        between: The link of a host to the other hosts, all its ports together.
        gpus_per_host: Number of GPUs of a host.
        algorithm: "ring" over all GPUs, or "hierarchical": within each host, then between the hosts.
        overlap: Share of the backward pass with which the sum can overlap, 0 to 1.
        coordination_s: Fixed time of a step on several GPUs, in which they agree on what to sum.
        shared_cores: Whether all devices share the cores of one machine, as logical devices of a processor do. The
            computation of n devices then takes n times as long.
    """

    inside: Link
    between: Link
    gpus_per_host: Annotated[int, Ge(1)] = 8
    algorithm: Literal["ring", "hierarchical"] = "hierarchical"
    overlap: Annotated[float, Ge(0), Le(1)] = 0.0
    coordination_s: Annotated[float, Ge(0)] = 0.0
    shared_cores: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def all_reduce_s(self, size: float, gpus: int) -> float:
        """Returns the time in which GPUs sum a number of bytes.

        Example:
            >>> link = Link(name="a link", bytes_per_s=1e9, latency_s=0.0, reached=1.0)
            >>> round(Hosts(inside=link, between=link).all_reduce_s(1e9, 2), 3)
            1.0
        """
        if gpus == 1:
            return 0.0
        hosts = math.ceil(gpus / self.gpus_per_host)
        if hosts == 1:
            return _ring(size, gpus, self.inside)
        if self.algorithm == "ring":
            slowest = min(self.inside, self.between, key=lambda link: link.reached_bytes_per_s)
            latency = max(self.inside.latency_s, self.between.latency_s)
            return _ring(size, gpus, replace(slowest, latency_s=latency))
        within = _ring(size, min(gpus, self.gpus_per_host), self.inside) if self.gpus_per_host > 1 else 0.0
        return within + _ring(size, hosts, self.between)


@dataclass(frozen=True, kw_only=True)
class ScaledStep(Record):
    """A training step on a number of GPUs."""

    gpus: int  # number of GPUs
    step_ms: float  # time of a step
    all_reduce_ms: float  # time of the sum of the gradients
    exposed_ms: float  # the part of it that does not overlap with the computation, with the coordination
    examples_per_s: float  # examples of all GPUs in a second
    efficiency: float  # the rate as a share of the rate of one GPU times the number of GPUs


@dataclass(frozen=True, kw_only=True)
class ScalingTable(Record, Shown):
    """Steps on several numbers of GPUs, with the same number of examples on each GPU."""

    steps: Sequence[ScaledStep]  # one for each number of GPUs
    gradient_bytes: int  # bytes that are summed in a step
    assumptions: Sequence[str]  # what the estimate assumes

    def _sheet(self) -> Sheet:
        rows = [
            (
                str(step.gpus),
                f"{step.step_ms:.2f}",
                f"{step.all_reduce_ms:.2f}",
                f"{step.examples_per_s:,.0f}",
                f"{step.efficiency:.1%}",
            )
            for step in self.steps
        ]
        head = ("GPUs", "step ms", "sum ms", "examples/s", "efficiency")
        return Sheet(tables=[Table(head=head, rows=rows, figures=range(5)), lines(self.assumptions)])


def scale(
    compute_s: float, examples: int, gradient_bytes: int, hosts: Hosts, gpus: Sequence[int] = (1, 8, 64, 512, 1024)
) -> ScalingTable:
    """Estimates the time of a training step on several numbers of GPUs.

    Args:
        compute_s: Time of a step on one GPU.
        examples: Number of examples of a step on one GPU.
        gradient_bytes: Bytes of the gradients.
        hosts: The links, and how the gradients are summed.
        gpus: Numbers of GPUs.
    Raises:
        ConfigError: A number of GPUs is below 1, or the time of a step is not positive.
    Example:
        >>> from tfopt.hardware import find_card
        >>> hosts = Hosts(inside=link_inside(find_card("A100")), between=LINKS["ethernet_25"])
        >>> table = scale(0.1, 256, 102_000_000, hosts, gpus=(8, 64))
        >>> [round(step.efficiency, 2) for step in table.steps]
        [0.99, 0.57]
    """
    if not compute_s > 0:
        raise ConfigError(f"compute_s must be positive. Received: compute_s={compute_s}. Pass seconds per step.")
    if not gpus or min(gpus) < 1:
        raise ConfigError(f"gpus must be numbers from 1. Received: gpus={tuple(gpus)}. Pass for example (1, 8, 64).")
    steps = []
    for count in gpus:
        whole = hosts.all_reduce_s(gradient_bytes, count)
        last = hosts.all_reduce_s(min(BUCKET_BYTES, gradient_bytes), count)
        exposed = max(whole - hosts.overlap * BACKWARD_SHARE * compute_s, last)
        if count > 1:
            exposed += hosts.coordination_s
        seconds = compute_s * (count if hosts.shared_cores else 1) + exposed
        steps.append(
            ScaledStep(
                gpus=count,
                step_ms=1e3 * seconds,
                all_reduce_ms=1e3 * whole,
                exposed_ms=1e3 * exposed,
                examples_per_s=count * examples / seconds,
                efficiency=compute_s / seconds,
            )
        )
    return ScalingTable(
        steps=steps, gradient_bytes=gradient_bytes, assumptions=_assumptions(hosts, examples, gradient_bytes)
    )


def _ring(size: float, members: int, link: Link) -> float:
    return 2 * (members - 1) * (size / members / link.reached_bytes_per_s + link.latency_s)


def _assumptions(hosts: Hosts, examples: int, gradient_bytes: int) -> list[str]:
    overlap = f"overlaps with {hosts.overlap:.0%} of the backward pass" if hosts.overlap else "overlaps with nothing"
    way = "in one ring" if hosts.algorithm == "ring" else "within each host and then between hosts"
    return [
        f"{examples} examples on each GPU; {short_bytes(gradient_bytes)} of gradients, summed {way}, which {overlap}",
        f"links: {hosts.inside.name} inside a host of {hosts.gpus_per_host} GPUs, {hosts.between.name} between "
        "hosts; input, stragglers and congestion are left out",
    ]
