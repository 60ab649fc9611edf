"""The record of what `measure` found, and what to change in a pipeline that makes the training wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfopt.data.measurement.stages import Stage
from tfopt.report import Record
from tfopt.report.sheet import Sheet, Shown, Table, lines

# Waiting below this share of a step's time is not worth a change.
WORTH_A_CHANGE = 0.05
# Taking a batch that is ready costs a loop in Python up to this. Keras' fit takes batches inside TensorFlow.
CALL_MS = 1.0
FASTER = 3
READING = ("TFRecord files", "text files", "record files", "interleave", "cache on disk")


@dataclass(frozen=True, kw_only=True)
class StageSpeed(Record):
    """The speed of one stage alone, with its inputs in memory.

    Attributes:
        name: What the stage does, with the name of its function or its size, for example "map decode".
        examples_per_second: Its speed alone, in examples that reach the training step.
        batch_ms: Its time for one batch.
        outputs_per_batch: Number of its outputs that make one batch.
        only_first_epoch: Whether a cache behind it keeps its results after the first epoch.
    """

    name: str
    examples_per_second: float
    batch_ms: float
    outputs_per_batch: float = 1.0
    only_first_epoch: bool = False


@dataclass(frozen=True, kw_only=True)
class InputReport(Record, Shown):
    """The speed of an input pipeline.

    Attributes:
        stages: The speed of each stage alone, the sources first.
        examples_per_second: Speed of the whole pipeline, if nothing else uses the processor.
        batch_ms: Its time for one batch: a training step that takes less than this waits.
        first_batch_ms: Time to the first batch of an epoch, in which shuffle buffers are filled.
        batches_per_epoch: Number of batches of an epoch; None if it is not known.
        slowest: Name of the stage that limits the speed.
        step_time_ms: Time of a training step; None if it was not given.
        wait_ms: Time that a step waits for its batch after the start of an epoch; None without a step time.
        wait_of_first_ms: Time that the first step of an epoch waits; None without a step time.
        advice: What to change, the most useful first.
        unavailable: For each attribute above that is None, the reason.
        cores: Number of processor cores that the pipeline could use.
    """

    stages: Sequence[StageSpeed]
    examples_per_second: float
    batch_ms: float
    first_batch_ms: float
    batches_per_epoch: int | None
    slowest: str
    step_time_ms: float | None = None
    wait_ms: float | None = None
    wait_of_first_ms: float | None = None
    advice: Sequence[str] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1

    @property
    def wait_share(self) -> float | None:
        """Share of the time of a step that is waiting, 0 to 1; None without a step time."""
        if self.wait_ms is None or self.step_time_ms is None:
            return None
        return self.wait_ms / (self.wait_ms + self.step_time_ms) if self.wait_ms else 0.0

    def _sheet(self) -> Sheet:
        together = StageSpeed(name="together", examples_per_second=self.examples_per_second, batch_ms=self.batch_ms)
        rows = [
            (each.name, f"{each.examples_per_second:,.0f}", f"{each.batch_ms:.3g}", self._mark(each))
            for each in (*self.stages, together)
        ]
        wait = f"wait of a step: unavailable ({self.unavailable.get('wait_ms', 'not measured')})"
        if self.wait_ms is not None and self.wait_share is not None and self.step_time_ms is not None:
            wait = (
                f"a step of {_ms(self.step_time_ms)} waits {_ms(self.wait_ms)} for its batch, "
                f"{self.wait_share:.0%} of the time"
            )
        first = f"first batch of an epoch after {_ms(self.first_batch_ms)}"
        table = Table(head=("stage alone", "examples/s", "ms per batch", ""), rows=rows, figures={1, 2}, folded="")
        return Sheet(tables=[table, lines([first, wait, *(f"advice: {words}" for words in self.advice)])])

    def _mark(self, stage: StageSpeed) -> str:
        if stage.name == self.slowest:
            return "slowest"
        return "first epoch only" if stage.only_first_epoch else ""


def _ms(value: float) -> str:
    return f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def advise(report: InputReport, slowest: Stage | None, stages: list[Stage]) -> InputReport:
    """Returns the report with advice."""
    share = report.wait_share
    if share is not None and share < WORTH_A_CHANGE and not _starts_slowly(report):
        return replace(report, advice=(f"none: a step waits for its batch for {share:.1%} of the time",))
    waits_briefly = report.wait_ms is not None and report.wait_ms < CALL_MS and not _starts_slowly(report)
    if waits_briefly and report.step_time_ms is not None and FASTER * report.batch_ms < report.step_time_ms:
        words = "none: the pipeline is much faster than the step; the wait is what taking a batch in Python costs"
        return replace(report, advice=(words,))
    if slowest is None:
        return report
    return replace(report, advice=tuple(_changes(report, slowest, stages)))


def _starts_slowly(report: InputReport) -> bool:
    """Whether the first batch of an epoch takes a good part of it."""
    if report.wait_of_first_ms is None or report.step_time_ms is None or not report.batches_per_epoch:
        return False
    return report.wait_of_first_ms > WORTH_A_CHANGE * report.step_time_ms * report.batches_per_epoch


def _changes(report: InputReport, slowest: Stage, stages: list[Stage]) -> Iterator[str]:
    name = slowest.name
    if slowest.kind == "shuffle":
        yield (
            f"{name}: an epoch begins when this buffer is full, after {report.first_batch_ms:,.0f} ms. Shuffle before "
            "the examples are decoded, when they are file names or encoded images, or make the buffer smaller"
        )
        return
    if slowest.calls_python or slowest.kind == "generator":
        yield (
            f"{name} runs Python, one call at a time. Write it in TensorFlow, or convert the examples once to TFRecord "
            "files: tfopt data convert"
        )
    elif slowest.is_serial and slowest.kind == "map":
        yield f"{name} runs one call at a time: map(..., num_parallel_calls=tf.data.AUTOTUNE)"
    elif slowest.is_serial and slowest.kind in ("interleave", "flat_map"):
        yield f"{name} reads one input at a time: interleave(..., num_parallel_calls=tf.data.AUTOTUNE)"
    elif slowest.is_serial and slowest.kind == "filter":
        yield f"{name} runs one call at a time: compute its condition in a parallel map before it"
    elif slowest.kind in READING:
        yield f"{name} reads slowly: put the files on a faster disk, or read several at a time"
    elif slowest.kind in ("batch", "padded batch"):
        yield f"{name} copies examples: make them smaller, with uint8 images that are cast after batching"
    if any(inner.kind == "Random" for inner in slowest.walk()):
        yield f"{name} changes examples at random: if there is a GPU, augment there, where='device'"
    elif not any(stage.kind in ("cache", "cache on disk", "arrays in memory") for stage in stages):
        yield "keep the decoded examples after the first epoch: cache='memory', or cache='disk' with a cache_dir"
    if not any(stage.node.op.startswith("Prefetch") for stage in stages[-3:]):
        yield "prepare batches while a step runs: end the pipeline with prefetch(2)"
    if not (slowest.calls_python or slowest.kind == "generator"):
        yield f"use more than these {report.cores} processor cores, on this machine or through a tf.data service"
