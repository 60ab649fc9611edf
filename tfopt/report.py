"""The plain records that passes, plans and verifications return.

They hold numbers and words only, print well and serialise to JSON; nothing in here imports TensorFlow. A value
that is unknown is `None`, and `unavailable` says why.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfopt.errors import TfoptWarning

MARKED_LOSS = 0.01
"""How much less accurate an artifact may be before reports mark it: one point."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record can do: become a dict of plain values, or JSON."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One setting of a plan: its value, and why."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One thing that a pass changed: a layer (by its path) or a graph node (by its name)."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Skip(Record):
    """One thing that a pass could have changed and left alone, with the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PassReport(Record):
    """What a pass did.

    Attributes:
        name: The pass, for example "prune".
        changed: What was changed.
        skipped: What was left alone, each with its reason.
        metrics: Figures of the whole pass, for example {"sparsity": 0.75}.
        steps: What was done on the way, in order.

    Example:
        >>> print(PassReport(name="prune", changed=(Change(name="conv", kind="Conv2D", detail="75.0% zeros"),)))
        prune: 1 changed, 0 skipped
          changed  conv (Conv2D): 75.0% zeros
    """

    name: str
    changed: Sequence[Change] = ()
    skipped: Sequence[Skip] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[Change] = ()

    def __str__(self) -> str:
        figures = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        lines = [f"{self.name}: {len(self.changed)} changed, {len(self.skipped)} skipped{figures}"]
        lines += [f"  step     {step.name} ({step.kind}): {step.detail}" for step in self.steps]
        lines += [f"  changed  {change.name} ({change.kind}): {change.detail}" for change in self.changed]
        lines += [f"  skipped  {skip.name} ({skip.kind}): {skip.reason}" for skip in self.skipped]
        return "\n".join(lines)

    def warn_if_unchanged(self, verdict: str = "") -> None:
        """Warns when the pass changed nothing, since a caller who ran it expected otherwise.

        Args:
            verdict: The reason, where one decided for all; else it is that of each thing skipped.
        """
        if self.changed:
            return
        each = "; ".join(sorted({skip.reason for skip in self.skipped}))
        reasons = verdict or each or "the model holds nothing it applies to"
        warnings.warn(f"{self.name} changed nothing: {reasons}.", TfoptWarning, stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """What an exported artifact was measured to be, in a fresh process that imports only TensorFlow.

    Attributes:
        artifact: The artifact's directory.
        precision: "float32", "int8" or another of ExportConfig's.
        signature: The signature that was called.
        baseline: The directory of the float artifact it is compared with, if any.
        parity_max_abs_error: Largest difference between its outputs and those the source model gave at export.
        parity_relative_error: The same difference as a ratio of Euclidean norms.
        agreement: Share of examples on which artifact and baseline decide alike, 0 to 1; of pixels, steps or labels
            where each example has several.
        accuracy: Share of labelled examples it classifies rightly, 0 to 1; of pixels, steps or labels where each
            example has several.
        baseline_accuracy: The same of the baseline.
        scores: What it scores on the labelled examples, by the metric's name; with several outputs each behind its
            name, as "mask_accuracy".
        baseline_scores: The same of the baseline.
        bytes_on_disk: Sum of the sizes of all its files.
        gzip_bytes: Size of the same files as a .tar.gz; what pruning saves shows here.
        weight_count: Number of weights that feed its matrix products and convolutions.
        zero_count: How many of these are exactly zero.
        batch_size: Examples per timed call.
        latency_ms_median: Median time of a call.
        latency_ms_p99: 99th percentile of the same calls.
        speedup: The baseline's median latency over this one's, measured alternately; above 1 is faster.
        speedup_range: The least and the greatest of the same ratio in a single round; what it covers is noise.
        kernels: How often each computing op occurs in the graph that was executed.
        tensorflow_version: The TensorFlow that ran it.
        device: The processor or GPU that ran it.
        unavailable: For each attribute above that is None, the reason.
        problems: What was found wanting; empty when all is well.
    """

    artifact: str
    precision: str
    signature: str = "serving_default"
    baseline: str | None = None
    parity_max_abs_error: float | None = None
    parity_relative_error: float | None = None
    agreement: float | None = None
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    baseline_scores: Mapping[str, float] = field(default_factory=dict)
    bytes_on_disk: int
    gzip_bytes: int
    weight_count: int
    zero_count: int
    batch_size: int
    latency_ms_median: float
    latency_ms_p99: float
    speedup: float | None = None
    speedup_range: tuple[float, float] | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    tensorflow_version: str
    device: str
    unavailable: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found wanting."""
        return not self.problems

    @property
    def sparsity(self) -> float:
        """Share of the weights that are exactly zero, 0 to 1."""
        return self.zero_count / self.weight_count if self.weight_count else 0.0

    @property
    def speed(self) -> str:
        """The speed against the baseline with the verdict, for example "0.72x (slower)"."""
        return self.show("speedup", "{:.2f}x") + (f" ({self.verdict})" if self.verdict else "")

    @property
    def verdict(self) -> str:
        """The speed against the baseline in a word: a difference is one of over 5% that every round of turns showed."""
        if self.speedup is None:
            return ""
        least, greatest = self.speedup_range or (self.speedup, self.speedup)
        if self.speedup < 0.95 and greatest < 1:
            return "slower"
        return "faster" if self.speedup >= 1.05 and least > 1 else "about even"

    def show(self, attribute: str, form: str = "{:.4g}") -> str:
        """Returns an attribute as text; one that is unknown as "unavailable (reason)"."""
        value = getattr(self, attribute)
        if value is None:
            return f"unavailable ({self.unavailable.get(attribute, 'not measured')})"
        return form.format(value)

    def _score(self, name: str) -> str:
        baseline = f" (baseline {self.baseline_scores[name]:.4g})" if name in self.baseline_scores else ""
        return f"{self.scores[name]:.4g}{baseline}"

    def __str__(self) -> str:
        rows = {
            "precision": self.precision
            + ("" if self.signature == "serving_default" else f", signature {self.signature}"),
            "accuracy": self.show("accuracy", "{:.2%}"),
            **({} if self.accuracy is not None else {name: self._score(name) for name in self.scores}),
            "parity (relative error)": self.show("parity_relative_error", "{:.2e}"),
            "agreement with baseline": self.show("agreement", "{:.2%}"),
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "gzip bytes": f"{self.gzip_bytes:,}",
            "zeros": f"{self.zero_count:,} of {self.weight_count:,} weights ({self.sparsity:.1%})",
            "latency": f"{self.latency_ms_median:.3f} ms median, {self.latency_ms_p99:.3f} ms p99"
            f" (batch {self.batch_size})",
            "speed against baseline": self.speed,
            "kernels": ", ".join(f"{count} {name}" for name, count in self.kernels.items()) or "none",
            "device": f"{self.device}, TensorFlow {self.tensorflow_version}",
        }
        lines = [self.artifact, *(f"  {name:24} {value}" for name, value in rows.items())]
        return "\n".join(lines + [f"  found wanting: {problem}" for problem in self.problems])


def lost_accuracy(first: Receipt, other: Receipt) -> bool:
    """Returns whether an artifact is more than a point less accurate than the first: what tables mark."""
    if first.accuracy is None or other.accuracy is None:
        return False
    return round(first.accuracy - other.accuracy, 9) > MARKED_LOSS


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One phase of training.

    Attributes:
        name: For example "train".
        history: Metric name to one value per epoch.
        step_time_ms: Median time of a step that neither traced nor compiled, None where there was none.
        trace_seconds: Time to trace the step into a graph.
        compile_seconds: Time that XLA took; 0 without it.

    Example:
        >>> print(Phase(name="train", history={}, step_time_ms=1.84, trace_seconds=0.9))
        train: 1.84 ms per step; tracing 0.9 s, compiling 0.0 s
    """

    name: str
    history: Mapping[str, Sequence[float]]
    # What was trained is the same, however long it took.
    step_time_ms: float | None = field(default=None, compare=False)
    trace_seconds: float = field(default=0.0, compare=False)
    compile_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        step = "step time unavailable" if self.step_time_ms is None else f"{self.step_time_ms:.3g} ms per step"
        return f"{self.name}: {step}; tracing {self.trace_seconds:.1f} s, compiling {self.compile_seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class Utilization(Record):
    """What the machine did during training, as sampled by GpuMonitor.

    Attributes:
        source: Where the figures come from, for example "NVML (NVIDIA H200)" or "psutil (no NVIDIA GPU found)".
        seconds: Time of each sample since the start of training.
        series: Figure name to one value per sample, the unit in the name, for example "gpu_utilization_percent".
            A single value that could not be read is None.
    """

    source: str
    seconds: Sequence[float]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class RunReport(Record):
    """Everything that one `tfopt run` did and measured; the HTML report and `--json` are made from it."""

    recipe: str
    description: str
    created: str
    environment: Mapping[str, str]
    plan: Sequence[Decision]
    phases: Sequence[Phase]
    utilization: Utilization | None
    passes: Sequence[PassReport]
    receipts: Mapping[str, Receipt]
