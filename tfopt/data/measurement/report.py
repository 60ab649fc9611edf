"""The record of what `measure` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report import Record
from tfopt.report.sheet import Sheet, Shown, Table, lines


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
        if self.wait_ms is not None and self.wait_share is not None:
            wait = (
                f"a step of {_ms(self.step_time_ms)} waits {_ms(self.wait_ms)} for its batch, "
                f"{self.wait_share:.0%} of the time"
            )
        first = f"first batch of an epoch after {_ms(self.first_batch_ms)}"
        table = Table(head=("stage alone", "examples/s", "ms per batch"), rows=rows, figures={1, 2}, folded="")
        return Sheet(tables=[table, lines([first, wait, *(f"advice: {words}" for words in self.advice)])])

    def _mark(self, stage: StageSpeed) -> str:
        if stage.name == self.slowest:
            return "slowest"
        return "first epoch only" if stage.only_first_epoch else ""


def _ms(value: float | None) -> str:
    if value is None:
        return "unavailable"
    return f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"
