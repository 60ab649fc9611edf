"""The results of one run: its phases, the load of the machine, its passes and artifacts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report.formatting import short_bytes
from tfopt.report.profile import DiagnosisReport
from tfopt.report.receipt import Receipt
from tfopt.report.record import Decision, PassReport, Record
from tfopt.report.sheet import Sheet, Shown, lines, pairs


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One phase of training.

    Attributes:
        name: For example "train".
        history: One value per epoch, by the name of the metric.
        step_time_ms: Median time of the steps without tracing and compiling; None if there was no such step.
        trace_seconds: Time to trace the step into a graph.
        compile_seconds: Time that XLA took to compile; 0 without XLA.
    Example:
        >>> print(Phase(name="train", history={}, step_time_ms=1.84, trace_seconds=0.9))
        train: 1.84 ms per step; tracing 0.9 s, compiling 0.0 s
    """

    name: str
    history: Mapping[str, Sequence[float]]
    # Phases with the same history are equal, even if their times differ.
    step_time_ms: float | None = field(default=None, compare=False)
    trace_seconds: float = field(default=0.0, compare=False)
    compile_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        step = "step time unavailable" if self.step_time_ms is None else f"{self.step_time_ms:.3g} ms per step"
        return f"{self.name}: {step}; tracing {self.trace_seconds:.1f} s, compiling {self.compile_seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class Utilization(Record, Shown):
    """The load of the machine during training, sampled by GpuMonitor.

    Attributes:
        source: Source of the values, for example "NVML (NVIDIA H200)" or "psutil (no NVIDIA GPU found)".
        seconds: Time of each sample since the start of training.
        series: One value per sample, by a name that includes the unit, for example "gpu_utilization_percent".
            A value that could not be read is None.
        unavailable: For each figure without values, the reason. It may name figures that have no series.
        notes: Remarks, for example why clocks were lowered, and which errors happened.
    Example:
        >>> load = Utilization(
        ...     source="NVML (A100)", seconds=(0, 1),
        ...     series={"gpu0_memory_used_bytes": (1e9, 3e9), "gpu0_energy_joules": (0, 250)},
        ...     unavailable={"gpu0_power_watts": "Not Supported"},
        ... )
        >>> print(load)
        NVML (A100): 2 samples in 1.0 s
          gpu0_memory_used_bytes           mean 2.00 GB, max 3.00 GB
          gpu0_energy_joules               total 250.0
          gpu0_power_watts                 unavailable (Not Supported)
    """

    source: str
    seconds: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def known(self) -> dict[str, list[float]]:
        """The values of each series that has any, without those that could not be read."""
        found = {name: [each for each in values if each is not None] for name, values in self.series.items()}
        return {name: values for name, values in found.items() if values}

    def _sheet(self) -> Sheet:
        lasted = self.seconds[-1] if self.seconds else 0.0
        rows, known = {}, self.known
        # A rate needs two samples, and the last one may come when a program has ended.
        missing = "the time was too short" if len(self.seconds) < 3 else "no value could be read"
        for name in dict.fromkeys([*self.series, *self.unavailable]):
            why = self.unavailable.get(name, missing)
            rows[name] = _in_short(name, known[name]) if name in known else f"unavailable ({why})"
        title = f"{self.source}: {len(self.seconds)} samples in {lasted:.1f} s"
        return Sheet(title=title, tables=[pairs(rows), lines(self.notes)])


def _in_short(name: str, values: Sequence[float]) -> str:
    """Returns what the values of a series come to, in the unit of its name."""
    mean, most = statistics.fmean(values), max(values)
    if name.endswith("_joules"):  # counts up
        return f"total {values[-1] - values[0]:,.1f}"
    if name.endswith("throttled"):
        return f"{mean:.0%} of the samples"
    if name.endswith("_bytes_per_second"):
        return f"mean {short_bytes(mean)}/s, max {short_bytes(most)}/s"
    if name.endswith("_bytes"):
        return f"mean {short_bytes(mean)}, max {short_bytes(most)}"
    return f"mean {mean:,.1f}, max {most:,.1f}"


@dataclass(frozen=True, kw_only=True)
class RunReport(Record):
    """The results and measurements of one `tfopt run`. The HTML report and `--json` show them."""

    recipe: str
    description: str
    task: str = "classification"
    created: str
    environment: Mapping[str, str]
    plan: Sequence[Decision]
    phases: Sequence[Phase]
    utilization: Utilization | None
    # A tfopt.data.InputReport of the training pipeline; None if it was not measured.
    input: Record | None = None
    passes: Sequence[PassReport]
    receipts: Mapping[str, Receipt]
    # Where the time of a training step goes, and what to change; None if it was not measured.
    diagnosis: DiagnosisReport | None = None


def run_of(diagnosis: DiagnosisReport | None, *, name: str, created: str = "") -> RunReport:
    """Returns the report of a run of which nothing is known but a diagnosis, or nothing at all."""
    return RunReport(
        recipe=name,
        description="",
        task="",
        created=created,
        environment={},
        plan=(),
        phases=(),
        utilization=None,
        passes=(),
        receipts={},
        diagnosis=diagnosis,
    )
