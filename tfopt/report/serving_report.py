"""The report of `tfopt.tune_serving`: what servers should set for each model, and which model is the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report.benchmark import COLUMNS, wrapped
from tfopt.report.formatting import grouped
from tfopt.report.ranking import is_faster
from tfopt.report.record import Record, record_of
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table
from tfopt.report.tuned_serving import TunedServing, machine_in_words
from tfopt.timing import Estimate, estimate


@dataclass(frozen=True, kw_only=True)
class ServedModel(Record):
    """What was measured of one model.

    Attributes:
        name: Its name in the report: the shortest end of its path that no other model has.
        path: Its path.
        format: The name of its format; "keras" for a .keras file, which is exported by Keras first.
        precision: The precision in an artifact's manifest. None for the models of other programs.
        tuned: What a server should set. None if it could not be measured.
        written: Whether this is in its manifest now.
        not_written: Why it is not; empty if it is.
        failure: Why it could not be measured, or why its manifest could not be written; empty if neither.
    """

    name: str
    path: str
    format: str
    precision: str | None = None
    tuned: TunedServing | None = None
    written: bool = False
    not_written: str = ""
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class FastestServed(Record):
    """Which of several models is the fastest, each with its own settings, measured in turns.

    Attributes:
        requests: "many requests" with the settings of each, or "one request": calls one after the other, of the
            smallest batch size.
        model: The name of the model. None if there is no clear winner.
        about_even: The names of the models among which there is no clear winner, the fastest first.
        shares: The speed of each model as a share of that of the fastest, with its interval.
    """

    requests: str
    model: str | None
    about_even: tuple[str, ...] = ()
    shares: Mapping[str, Estimate] = field(default_factory=dict)

    def __str__(self) -> str:
        others = ", ".join(f"{name} {each.median:.2f}x" for name, each in self.shares.items() if name != self.model)
        return f"{self.model} ({others} of it)" if self.model else f"no clear winner: {', '.join(self.about_even)}"


def fastest_of(requests: str, rates: Mapping[str, Sequence[float]]) -> FastestServed:
    """Returns which model is the fastest, by the rates of each turn. Only a difference of over 5% counts.

    Example:
        >>> fastest_of("many requests", {"a": [9.0, 10.0], "b": [20.0, 20.0]}).model
        'b'
        >>> fastest_of("many requests", {"a": [9.0, 10.0], "b": [10.0, 9.0]}).about_even
        ('a', 'b')
    """
    times = {name: [1 / rate for rate in found] for name, found in rates.items()}
    order = sorted(times, key=lambda name: statistics.median(times[name]))
    best = order[0]
    rivals = [name for name in order[1:] if not is_faster(times[best], times[name])]
    shares = {
        name: estimate([one / other for one, other in zip(rates[name], rates[best], strict=True)]) for name in order
    }
    return FastestServed(
        requests=requests,
        model=None if rivals else best,
        about_even=(best, *rivals) if rivals else (),
        shares=shares,
    )


@dataclass(frozen=True, kw_only=True)
class ServingReport(Record, Shown):
    """What servers should set for one or several models on this machine, by measurement.

    Attributes:
        device: The processor or GPU that ran the models.
        cores: Number of the processor's cores that the processes could use.
        models: The models in the order in which they were given.
        fastest: Which of several models is the fastest. Empty for one model.
        warnings: What to know before one of them is taken.
        seconds: How long it took.
    Example:
        >>> from tfopt.report import ThreadTimes
        >>> from tfopt.report.tuned_serving import tuned
        >>> alone = ThreadTimes(batch_size=1, threads=(1, 2), latency_ms_median=(9.0, 5.0), best_threads=2)
        >>> rates = {(1, 1): [200.0], (1, 2): [180.0], (8, 1): [500.0], (8, 2): [440.0]}
        >>> found = tuned(rates, [alone], device="AMD EPYC", cores=2, format="onnx", runtime="ONNX Runtime")
        >>> model = ServedModel(name="mine", path="onnx_models/mine", format="onnx", tuned=found, written=True)
        >>> print(ServingReport(device="AMD EPYC", cores=2, models=(model,)))
        serving on AMD EPYC, 2 cores
          mine            batches of 8, 2 calls at a time on 1 thread each: 500 examples/s
          alone, batch 1  best on 2: 9.000 ms on 1, 5.000 ms on 2
          manifest        has these settings
          batch  calls x threads  examples/s    interval  of the best  ms a call
              1            2 x 1         200  200 to 200          40%     10.000
              8            2 x 1         500  500 to 500         100%     32.000
    """

    device: str
    cores: int
    models: tuple[ServedModel, ...]
    fastest: tuple[FastestServed, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every model was measured, and everything written that should be."""
        return not any(each.failure for each in self.models)

    @classmethod
    def from_json(cls, text: str | bytes) -> ServingReport:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: The text is no report.
        """
        return record_of(cls, text)

    def _sheet(self) -> Sheet:
        tables = [table for each in self.models if each.tuned for table in _tables(each, each.tuned)]
        rows = [(f"fastest, {each.requests}", str(each)) for each in self.fastest]
        rows += [("warning", each) for each in self.warnings]
        rows += [(PROBLEM, f"{each.name}: {each.failure}") for each in self.models if each.failure]
        return Sheet(
            title=f"serving on {machine_in_words(self.device, self.cores)}", tables=[*tables, Table(rows=_rows(rows))]
        )


def _rows(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns rows of a name and a text that fit the width of a report."""
    width = COLUMNS - max((len(name) for name, _ in rows), default=0) - 4
    return [line for name, text in rows for line in wrapped(name, text, width)]


def _tables(model: ServedModel, found: TunedServing) -> Iterator[Table]:
    settings = [(server, line) for server, lines in found.settings.items() for line in lines]
    alone = [(f"alone, batch {each.batch_size}", str(each)) for each in found.alone]
    written = "has these settings" if model.written else f"unchanged: {model.not_written}"
    yield Table(rows=_rows([(model.name, str(found)), *alone, *settings, ("manifest", written)]))
    rows = [
        (
            str(each.batch_size),
            f"{each.calls} x {each.threads}",
            grouped(each.examples_per_s),
            f"{grouped(each.least)} to {grouped(each.most)}",
            f"{each.of_best:.0%}",
            f"{each.call_ms:.3f}",
        )
        for each in found.curve
    ]
    head = ("batch", "calls x threads", "examples/s", "interval", "of the best", "ms a call")
    yield Table(head=head, rows=rows, figures=range(6), folded="")
