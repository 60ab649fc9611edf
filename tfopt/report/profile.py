"""Where the time of a training step goes, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report.record import Record, shown_or_reason
from tfopt.report.sheet import Sheet, Shown, Table, lines, pairs

# A larger difference of the parts to the step makes them doubtful.
UNEXPLAINED = 0.1
PARTS = ("input", "host", "compute", "communication")


@dataclass(frozen=True, kw_only=True)
class StepBreakdown(Record, Shown):
    """Where the time of a training step goes, in milliseconds per step.

    Each of the four parts is measured by itself. They add up to the step, but for `unexplained_ms`. With several steps
    in a call, and with batches from Python, the time of a call is what the others leave, divided by experiments.

    Attributes:
        step_ms: Mean time of a step, with everything that happens between two steps of an epoch.
        input_ms: Time that the step waits for its batch.
        host_ms: Time of Python between two steps: Keras' loop, callbacks, tracing and compilation.
        compute_ms: Time in which the device computes the step, on the slowest replica.
        communication_ms: Time in which replicas exchange gradients, as far as it is not hidden behind the computation.
        steps: Number of measured steps.
        batch_size: Number of examples of a batch, over all replicas.
        input_alone_ms: Time to make one batch when nothing else runs.
        callbacks_ms: Part of `host_ms` in callbacks.
        build_ms: Part of `host_ms` in which the step is traced and compiled again.
        traces: Number of traces in the measured steps, without the first.
        replica_ms: Computation of each replica alone.
        unavailable: For each attribute above that is None, the reason.
    Example:
        >>> print(StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32))
        10 ms per step of 32 examples, mean of 100 steps
          input            6 ms   60%
          host             1 ms   10%
          compute          3 ms   30%
          communication    0 ms    0%
    """

    step_ms: float
    input_ms: float
    host_ms: float
    compute_ms: float
    communication_ms: float = 0.0
    steps: int
    batch_size: int
    input_alone_ms: float | None = None
    callbacks_ms: float = 0.0
    build_ms: float = 0.0
    traces: int = 0
    replica_ms: Sequence[float] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """The milliseconds of each part, by its name."""
        return {part: getattr(self, f"{part}_ms") for part in PARTS}

    @property
    def unexplained_ms(self) -> float:
        """The step without its four parts. Negative if they are longer than the step."""
        return self.step_ms - sum(self.parts.values())

    @property
    def whole_ms(self) -> float:
        """What shares are taken of: the step, or the parts together where they are much longer, since they overlap."""
        return self.step_ms - self.unexplained_ms if self.doubt and self.unexplained_ms < 0 else self.step_ms

    @property
    def doubt(self) -> str:
        """Says so if the parts differ much from the step; otherwise empty."""
        if abs(self.unexplained_ms) <= UNEXPLAINED * self.step_ms:
            return ""
        together = sum(self.parts.values())
        return (
            f"The parts, each measured by itself, take {together:.3g} ms together: they overlap, the machine was busy, "
            "or the steps are too short to be timed. Measure again, or more steps."
        )

    def share(self, ms: float) -> str:
        """Returns a part of the step in percent, or nothing if the parts do not add up to the step.

        Example:
            >>> StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=9, batch_size=32).share(6)
            '60%'
        """
        return "" if self.doubt or not self.step_ms else f"{ms / self.step_ms:.0%}"

    def _sheet(self) -> Sheet:
        head = f"{self.step_ms:.3g} ms per step of {self.batch_size} examples, mean of {self.steps} steps"
        rows = [(part, f"{ms:.3g} ms", self.share(ms)) for part, ms in self.parts.items()]
        return Sheet(title=head, tables=[Table(rows=rows, figures={1, 2}), lines(filter(None, [self.doubt]))])


@dataclass(frozen=True, kw_only=True)
class OperatorTime(Record):
    """The time of one operator in a trace."""

    name: str  # name of the operation or kernel
    kind: str  # kind of the operation, for example "MatMul"
    # Milliseconds per step, without other operators that it runs. With several GPUs, the mean of them.
    ms_per_step: float
    share: float  # share of the time of all operators, 0 to 1
    calls_per_step: float  # number of calls per step
    on_device: bool  # whether it ran on a GPU
    tensor_cores: bool | None = None  # whether its kernel uses tensor cores; None if unknown


@dataclass(frozen=True, kw_only=True)
class TraceSummary(Record, Shown):
    """What a trace of TensorFlow's profiler says of some steps.

    Attributes:
        directory: Directory of the trace, which XProf and TensorBoard open.
        steps: Number of steps.
        span_ms: Milliseconds from the first operator to the last.
        idle_share: Share of that time in which the device runs no operator.
        tensor_core_share: Share of the time of kernels that use tensor cores; None without a GPU.
        copy_ms_per_step: Copies between host and device; None without a GPU.
        operators: The operators with the most time, the longest first.
        unavailable: For each attribute above that is None, the reason.
    """

    directory: str
    steps: int
    span_ms: float
    idle_share: float
    tensor_core_share: float | None = None
    copy_ms_per_step: float | None = None
    operators: Sequence[OperatorTime] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        kernels = shown_or_reason(self, "tensor_core_share", "{:.1%} of the time of all kernels")
        return {
            "idle": f"{self.idle_share:.1%} of {self.span_ms:.3g} ms, {self.steps} steps",
            "kernels in tensor cores": kernels,
            "copies of host and device": shown_or_reason(self, "copy_ms_per_step", "{:.3g} ms per step"),
        }

    def _sheet(self) -> Sheet:
        times = [(f"{each.ms_per_step:.3g} ms", f"{each.share:.0%}", each.name) for each in self.operators[:10]]
        return Sheet(title=self.directory, tables=[pairs(self.rows()), Table(rows=times, figures={0, 1})])


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Record):
    """One reason why a training step takes longer than it has to.

    Attributes:
        cause: Name of the rule that found it, for example "slow_map".
        title: The reason in a few words.
        evidence: The figures that show it, against the threshold of the rule.
        gain: Share of the step time that the change saves, 0 to 1. None if it cannot be estimated on this machine.
        advice: The setting or the line of code to change.
        settings: The settings of a recipe that apply the advice, such as {"training.steps_per_execution": 16}.
        changes_training: Whether the advice changes what the model learns, beyond rounding.
        source: Where the rule comes from.
    """

    cause: str
    title: str
    evidence: str
    gain: float | None
    advice: str
    settings: Mapping[str, int | bool | str] = field(default_factory=dict)
    changes_training: bool = False
    source: str = ""

    def __str__(self) -> str:
        gain = "gain unknown" if self.gain is None else f"saves about {self.gain:.0%} of the step"
        changes = ". This changes what the model learns" if self.changes_training else ""
        return f"{self.title} ({gain})\n  {self.evidence}\n  {self.advice}{changes}"


@dataclass(frozen=True, kw_only=True)
class DiagnosisReport(Record):
    """What holds a training back, the largest gain first.

    Attributes:
        name: The model, script or recipe.
        breakdown: Where the time of a step goes.
        diagnoses: The causes that were found, the largest gain first.
        absent: For each rule that found nothing, the figure that says so.
        unchecked: For each rule that could not be checked, the reason.
        efficiency: A tfopt.profiling.cost.Efficiency: the use of the peak rate; None if it was not measured.
        trace: A summary of a profiler trace; None if none was asked for.
    Example:
        >>> step = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
        >>> serial = Diagnosis(
        ...     cause="slow_map", title="map decode is serial", evidence="the step waits for 60% of its time", gain=0.5,
        ...     advice="map(..., num_parallel_calls=tf.data.AUTOTUNE)",
        ... )
        >>> print(DiagnosisReport(name="resnet", breakdown=step, diagnoses=(serial,)))
        resnet
        10 ms per step of 32 examples, mean of 100 steps
          input            6 ms   60%
          host             1 ms   10%
          compute          3 ms   30%
          communication    0 ms    0%
        1. map decode is serial (saves about 50% of the step)
          the step waits for 60% of its time
          map(..., num_parallel_calls=tf.data.AUTOTUNE)
    """

    name: str
    breakdown: StepBreakdown
    diagnoses: Sequence[Diagnosis] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)
    efficiency: Record | None = None
    trace: TraceSummary | None = None

    def __str__(self) -> str:
        found = [f"{number}. {each}" for number, each in enumerate(self.diagnoses, start=1)]
        efficiency = [] if self.efficiency is None else [str(self.efficiency)]
        return "\n".join([self.name, str(self.breakdown), *efficiency, *(found or ["nothing holds it back"])])
