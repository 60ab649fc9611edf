"""The plain records that passes, plans and verifications return.

A record holds only numbers and text, prints as a short table and becomes JSON. This module does not import TensorFlow.
An unknown value is `None`, and `unavailable` gives the reason.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfopt import notebook
from tfopt.errors import TfoptWarning
from tfopt.number_text import short_count
from tfopt.score_text import is_share, score_label, show_score

MARKED_LOSS = 0.01
"""Reports mark an artifact that loses more than this: one point of a share such as accuracy, 1% of another score."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The base of all records: it becomes a dict of plain values, or JSON."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One setting of a plan: its value, and the reason for it."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """A layer (by its path) or a graph node (by its name) that a pass changed."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Skip(Record):
    """A layer or a graph node that a pass did not change, with the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PassReport(Record):
    """The result of a pass.

    Attributes:
        name: Name of the pass, for example "prune".
        changed: The changed layers or nodes.
        skipped: The unchanged layers or nodes, each with the reason.
        metrics: Figures of the whole pass, for example {"sparsity": 0.75}.
        steps: The steps of the pass, in order.

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

    @property
    def headline(self) -> str:
        """The numbers of changes and skips, and the figures, in one line."""
        figures = "".join(f", {figure}" for figure in self.figures)
        return f"{self.name}: {len(self.changed)} changed, {len(self.skipped)} skipped{figures}"

    @property
    def figures(self) -> list[str]:
        """The metrics as text, "size" together with "size_before"."""
        return list(self._figures())

    def _figures(self) -> Iterator[str]:
        for name, value in self.metrics.items():
            before = self.metrics.get(f"{name}_before")
            words = name.replace("_", " ")
            if before is not None:
                yield f"{words} {_figure(before)} -> {_figure(value)}"
            elif not name.endswith("_before"):
                yield f"{words} {_figure(value)}"

    def _repr_html_(self) -> str:
        rows = [("step", each.name, each.kind, each.detail) for each in self.steps]
        rows += [("changed", each.name, each.kind, each.detail) for each in self.changed]
        rows += [("skipped", each.name, each.kind, each.reason) for each in self.skipped]
        return notebook.block(self.headline, notebook.table(rows))

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  step     {step.name} ({step.kind}): {step.detail}" for step in self.steps]
        lines += [f"  changed  {change.name} ({change.kind}): {change.detail}" for change in self.changed]
        lines += [f"  skipped  {skip.name} ({skip.kind}): {skip.reason}" for skip in self.skipped]
        return "\n".join(lines)

    def warn_if_unchanged(self, verdict: str = "") -> None:
        """Warns if the pass changed nothing, because its caller expected a change.

        Args:
            verdict: The reason, if there is one for the whole pass. Otherwise the reasons of the skips are given.
        """
        if self.changed:
            return
        each = "; ".join(sorted({skip.reason for skip in self.skipped}))
        reasons = verdict or each or "the model has no layer or node that it can change"
        warnings.warn(f"{self.name} changed nothing: {reasons}.", TfoptWarning, stacklevel=3)


def _figure(value: float) -> str:
    return short_count(value) if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """The measurements of an exported artifact, taken in a fresh process that imports only TensorFlow.

    Attributes:
        artifact: Directory of the artifact.
        precision: "float32", "int8" or another precision of ExportConfig.
        signature: The signature that was called.
        baseline: Directory of the float artifact for the comparison, if there is one.
        parity_max_abs_error: Largest difference between the outputs and the outputs recorded at export.
        parity_relative_error: The same difference as a ratio of Euclidean norms.
        agreement: Share of examples with the same prediction from artifact and baseline, 0 to 1. If an example has
            several pixels, steps or labels, the share of these.
        accuracy: Share of labelled examples with the right prediction, 0 to 1. If an example has several pixels, steps
            or labels, the share of these.
        baseline_accuracy: The accuracy of the baseline.
        scores: Scores on the labelled examples, by the name of the metric. With several outputs the name of the output
            comes first, as in "mask_accuracy".
        baseline_scores: The scores of the baseline.
        higher_is_better: Whether higher scores are better.
        bytes_on_disk: Sum of the sizes of all files.
        gzip_bytes: Size of the same files as a .tar.gz. Pruning makes this size smaller.
        weight_count: Number of weights in matrix products and convolutions.
        zero_count: Number of these weights that are exactly zero.
        batch_size: Number of examples in each timed call.
        latency_ms_median: Median time of a call.
        latency_ms_p99: 99th percentile of the times of the same calls.
        speedup: Median latency of the baseline divided by that of the artifact, measured alternately. Above 1 the
            artifact is faster.
        speedup_range: Smallest and largest ratio of a single round. A difference within this range is noise.
        kernels: Number of times that each computing op occurs in the executed graph.
        tensorflow_version: Version of the TensorFlow that ran the artifact.
        device: The processor or GPU that ran the artifact.
        unavailable: For each attribute above that is None, the reason.
        problems: Problems that the check found; empty if it found none.
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
    higher_is_better: bool = True
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
        """Whether the check found no problem."""
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
        """The speed against the baseline in words. Only a difference of over 5% that every round shows counts."""
        if self.speedup is None:
            return ""
        least, greatest = self.speedup_range or (self.speedup, self.speedup)
        if self.speedup < 0.95 and greatest < 1:
            return "slower"
        return "faster" if self.speedup >= 1.05 and least > 1 else "about even"

    def score(self, name: str) -> float | None:
        """Returns a score by name, or None if there is none. "accuracy" is the accuracy of a classifier of any kind."""
        return self.accuracy if name == "accuracy" and self.accuracy is not None else self.scores.get(name)

    def baseline_score(self, name: str) -> float | None:
        """Returns a score of the baseline by name, or None if there is none."""
        own = self.baseline_accuracy if name == "accuracy" else None
        return self.baseline_scores.get(name) if own is None else own

    def show_score(self, name: str) -> str:
        """Returns a score as text, or "unavailable (reason)"."""
        value = self.score(name)
        return self.show("accuracy") if value is None else show_score(name, value)

    def show(self, attribute: str, form: str = "{:.4g}") -> str:
        """Returns an attribute as text, or "unavailable (reason)" if its value is unknown."""
        value = getattr(self, attribute)
        if value is None:
            return f"unavailable ({self.unavailable.get(attribute, 'not measured')})"
        return form.format(value)

    def _score(self, name: str) -> str:
        baseline = self.baseline_scores.get(name)
        return self.show_score(name) + ("" if baseline is None else f" (baseline {show_score(name, baseline)})")

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        return {
            "precision": self.precision
            + ("" if self.signature == "serving_default" else f", signature {self.signature}"),
            **{score_label(name).lower(): self._score(name) for name in score_names([self])},
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

    def _repr_html_(self) -> str:
        problems = notebook.table([("problem", problem) for problem in self.problems], marked=range(len(self.problems)))
        return notebook.block(self.artifact, notebook.pairs(self.rows()), problems)

    def __str__(self) -> str:
        lines = [self.artifact, *(f"  {name:24} {value}" for name, value in self.rows().items())]
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])


def score_names(receipts: Iterable[Receipt]) -> list[str]:
    """Returns the names of the scores that reports show: "accuracy" for classifiers of one output.

    Example:
        >>> score_names([])
        ['accuracy']
    """
    found = [
        name for receipt in receipts for name in (["accuracy"] if receipt.accuracy is not None else receipt.scores)
    ]
    return list(dict.fromkeys(found)) or ["accuracy"]


def score_change(name: str, first: Receipt, other: Receipt) -> str:
    """Returns the difference of a score to the first artifact's: in points, or in per cent of the first.

    Example:
        >>> from dataclasses import replace
        >>> one = Receipt(
        ...     artifact="a", precision="float32", scores={"mean_iou": 0.9}, bytes_on_disk=1, gzip_bytes=1,
        ...     weight_count=1, zero_count=0, batch_size=1, latency_ms_median=1, latency_ms_p99=1,
        ...     tensorflow_version="", device="",
        ... )
        >>> score_change("mean_iou", one, replace(one, scores={"mean_iou": 0.88}))
        '-2.00 pt'
    """
    before, after = first.score(name), other.score(name)
    if before is None or after is None:
        return ""
    if is_share(name):
        return f"{100 * (after - before):+.2f} pt"
    return f"{(after - before) / abs(before):+.2%}" if before else f"{after - before:+.4g}"


def lost_score(name: str, first: Receipt, other: Receipt) -> bool:
    """Returns whether an artifact scores worse than the first by over a point of a share, or 1% of another score."""
    before, after = first.score(name), other.score(name)
    if before is None or after is None:
        return False
    loss = before - after if first.higher_is_better else after - before
    return round(loss if is_share(name) else loss / (abs(before) or 1.0), 9) > MARKED_LOSS


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
class Utilization(Record):
    """The load of the machine during training, sampled by GpuMonitor.

    Attributes:
        source: Source of the values, for example "NVML (NVIDIA H200)" or "psutil (no NVIDIA GPU found)".
        seconds: Time of each sample since the start of training.
        series: One value per sample, by a name that includes the unit, for example "gpu_utilization_percent".
            A value that could not be read is None.
    """

    source: str
    seconds: Sequence[float]
    series: Mapping[str, Sequence[float | None]]


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
