"""The result of the search for a batch size: what fits, how fast it is, and the settings that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tomli_w

from tfopt.report import Decision, Record
from tfopt.report.formatting import grouped, memory_size
from tfopt.report.record import decision_table, record_of
from tfopt.report.sheet import Sheet, Shown, Table
from tfopt.tuning.memory import MemoryReport
from tfopt.tuning.throughput import ThroughputReport


@dataclass(frozen=True, kw_only=True)
class BatchSizeReport(Record, Shown):
    """The batch size of a training, with its reasons.

    Attributes:
        name: The recipe, the model or the script.
        memory: The largest batch that fits, and the trials that found it.
        throughput: The speed of the batches; None if it was not measured.
        noise_scale: The batch size at which the noise of the gradient equals its size; None if it was not measured.
        settings: Settings of the training, as in a TrainingConfig.
        decisions: The advice with its reasons.
        unavailable: For each attribute above that is None, the reason.
        seconds: How long the search took.
    """

    name: str
    memory: MemoryReport
    throughput: ThroughputReport | None = None
    noise_scale: float | None = None
    settings: Mapping[str, int | float] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_toml(self) -> str:
        """Returns the settings as TOML that can be laid over a recipe: `tfopt run NAME FILE.toml`.

        A model takes them as `TrainingConfig(**report.settings)`.
        """
        return tomli_w.dumps({"training": dict(self.settings)})

    @classmethod
    def from_json(cls, text: str | bytes) -> BatchSizeReport:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: The text is no report.
        """
        return record_of(cls, text)

    def _sheet(self) -> Sheet:
        memory = self.memory
        replicas = f", {memory.per_replica_batch_size} on each of {memory.replicas} replicas"
        rows = [
            ("memory", str(memory.limit)),
            ("largest batch", f"{memory.global_batch_size}{replicas if memory.replicas > 1 else ''}"),
            ("", f"{len(memory.trials)} trials; {memory.ended_by}"),
            *([("workers", f"found {', '.join(map(str, memory.workers))} on a replica")] if memory.workers else []),
            ("estimated", self._estimated()),
        ]
        if self.throughput is not None:
            best, found = self.throughput.best, self.throughput
            rows.append(("fastest batch", f"{best.global_batch_size}, {grouped(best.examples_per_s)} examples/s"))
            rows.append(("knee", f"{found.knee}, the smallest within 5% of the best, by {found.turns} turns"))
            if found.undecided:
                rows.append(("", f"more turns may show that it is {' or '.join(map(str, found.undecided))}"))
            if found.knee == found.curve[-1].global_batch_size and memory.ended_by.startswith("max_"):
                rows.append(("", "the largest that was timed; a larger one may be faster"))
            if memory.workers:
                rows.append(
                    ("", "the largest of the workers; speeds without the network, if all are as fast as this one")
                )
        else:
            rows.append(("speed", f"unavailable ({self.unavailable.get('throughput', 'not measured')})"))
        noise = "unavailable ({})".format(self.unavailable.get("noise_scale", "not measured"))
        rows.append(("noise scale", noise if self.noise_scale is None else grouped(self.noise_scale)))
        return Sheet(
            title=f"batch size of {self.name}",
            tables=[Table(rows=rows), self._curve(), self._trials(), decision_table(self.decisions)],
        )

    def _estimated(self) -> str:
        found = self.memory.estimated
        return f"unavailable ({self.memory.unavailable.get('estimated')})" if found is None else f"{found} on a replica"

    def _curve(self) -> Table:
        rows = [
            (
                str(each.global_batch_size),
                grouped(each.examples_per_s),
                f"{grouped(each.least)} to {grouped(each.most)}",
                f"{each.step_ms:.3g}",
                f"{each.of_best:.0%}",
            )
            for each in (() if self.throughput is None else self.throughput.curve)
        ]
        head = ("batch", "examples/s", "interval", "step ms", "of the best") if rows else ()
        return Table(head=head, rows=rows, figures=range(5), folded="")

    def _trials(self) -> Table:
        rows = [
            (
                str(each.per_replica_batch_size),
                "unknown" if each.peak_bytes is None else memory_size(each.peak_bytes),
                "fits" if each.fits else f"too large: {each.reason}",
            )
            for each in self.memory.trials
        ]
        return Table(head=("on a replica", "peak memory", ""), rows=rows, figures=range(2), folded="")
