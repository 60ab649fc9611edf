"""Models side by side on one machine: what was measured of each, and the report that names some of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report.formatting import grouped, memory_size, score_label, short_bytes, shortened, show_score
from tfopt.report.record import Record
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table

COLUMNS = 100  # the width of the printed report
NARROWEST_NAME = 12
UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class CallTimes(Record):
    """The times of a model's calls with one batch size, on one number of threads.

    Attributes:
        batch_size: Number of examples in each call.
        threads: Number of intra-op threads. 0 is the default of the model's runtime.
        calls: Number of timed calls.
        latency_ms_median: Median time of a call.
        latency_ms_p90, latency_ms_p99: Percentiles of the times of the same calls.
        examples_per_s: Examples that these calls, one after the other, compute in a second.
        round_ms: The median of each round. In the first nine all models have their turn. Those between which nine do
            not decide have eighteen more.
    """

    batch_size: int
    threads: int
    calls: int
    latency_ms_median: float
    latency_ms_p90: float
    latency_ms_p99: float
    examples_per_s: float
    round_ms: tuple[float, ...]


def best_of(times: Iterable[CallTimes], batch_size: int) -> CallTimes | None:
    """Returns the times on the number of threads with the least median; None without calls of this size."""
    own = [each for each in times if each.batch_size == batch_size]
    return min(own, key=lambda each: each.latency_ms_median, default=None)


@dataclass(frozen=True, kw_only=True)
class BenchmarkedModel(Record):
    """What was measured of one model. Of a model that failed, `failure` has the reason, and most figures are None.

    Attributes:
        name: Its name in the report: the shortest end of its path that no other model has.
        path: Its path.
        format: The name of its format, as in `ExportConfig.format`; "keras" for a .keras file, which was exported by
            Keras' own `model.export` and served as a SavedModel.
        precision: The precision in an artifact's manifest. None for the models of other programs.
        runtime: Name and version of what ran it.
        bytes_on_disk: Sum of the sizes of all files that are served.
        gzip_bytes: Size of the same files as a .tar.gz.
        load_ms: Time to load it in a fresh process that has imported its runtime.
        first_call_ms: Time of the first call, of the first batch size.
        memory_peak_bytes: Peak memory of that process after the first call, the runtime's own share included.
        scores: Scores on the labelled examples, by the name of the metric.
        score_share: Its score as a share of the baseline's. The least share if there are several scores. Where lower
            scores are better, the baseline's score as a share of its own. None without scores above 0.
        times: The times of its calls, by batch size and threads.
        skipped: The reason for each batch size that it cannot have.
        failure: Why it could not be measured; empty if it was.
        unavailable: For each figure above that is None although the model ran, the reason.
    """

    name: str
    path: str
    format: str
    precision: str | None = None
    runtime: str = ""
    bytes_on_disk: int | None = None
    gzip_bytes: int | None = None
    load_ms: float | None = None
    first_call_ms: float | None = None
    memory_peak_bytes: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    score_share: float | None = None
    times: tuple[CallTimes, ...] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)
    failure: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def best(self, batch_size: int) -> CallTimes | None:
        """Returns the times on the number of threads with the least median; None without calls of this size."""
        return best_of(self.times, batch_size)

    def reaches(self, gate: float | None) -> bool:
        """Whether it has enough of the baseline's score to be named; without a gate always."""
        return gate is None or (self.score_share is not None and round(self.score_share, 9) >= gate)


@dataclass(frozen=True, kw_only=True)
class Fastest(Record):
    """The fastest model for one batch size.

    Attributes:
        batch_size: The number of examples in each call.
        model: The name of the model. None if there is no clear winner.
        threads: The number of threads with which it is fastest, 0 for the default of its runtime. None if there is no
            clear winner, or if it is about as fast with another number.
        latency_ms_median: The median time of its call, or of the call with the least median.
        about_even: The names of the models among which there is no clear winner, the least median first.
    """

    batch_size: int
    model: str | None
    threads: int | None
    latency_ms_median: float
    about_even: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.model is None:
            return f"no clear winner: {', '.join(self.about_even)}"
        on = "" if self.threads is None else f" on {in_threads(self.threads)}"
        return f"{self.model}{on}, {self.latency_ms_median:.3f} ms"


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport(Record, Shown):
    """Models side by side: what each costs and how fast it is on this machine, and which to take.

    Attributes:
        device: The processor or GPU that ran the models.
        cores: Number of the processor's cores that the processes could use.
        batch_sizes, threads: What was measured.
        rounds, seconds: The number of rounds that each model had, before more for those that these left undecided, and
            how long each was timed in one.
        models: The models in the order in which they were given.
        baseline: The name of the model whose score the others are compared with. None without labelled examples.
        higher_is_better: Whether higher scores are better.
        gate: The least share of the baseline's score that a model must have to be named. None names any model.
        fastest: The fastest model for each batch size, of those that reach the gate.
        smallest: The name of the model with the fewest bytes on disk, of those that reach the gate. None if none does.
        warnings: What to know before one of them is taken.
    Example:
        >>> from tfopt.report.ranking import judged
        >>> times = CallTimes(
        ...     batch_size=1, threads=0, calls=50, latency_ms_median=2.0, latency_ms_p90=2.1, latency_ms_p99=2.5,
        ...     examples_per_s=490.0, round_ms=(2.0, 1.9, 2.1),
        ... )
        >>> model = BenchmarkedModel(
        ...     name="int8", path="out/int8", format="onnx", bytes_on_disk=120_000, gzip_bytes=90_000, load_ms=4.0,
        ...     first_call_ms=3.0, memory_peak_bytes=2**27, times=(times,),
        ... )
        >>> print(judged([model], device="CPU", cores=2, batch_sizes=(1,), threads=(0,), rounds=3, seconds=0.1))
        1 model on CPU, 2 cores
          model  format   bytes     gzip  load ms  first ms     memory
          int8   onnx    120 kB  90.0 kB        4         3  128.0 MiB
          model  batch  threads  median ms  p90 ms  p99 ms  examples/s
          int8       1  default      2.000   2.100   2.500         490
          fastest, batch 1  int8 on the default threads, 2.000 ms
          smallest          int8, 120 kB
    """

    device: str
    cores: int
    batch_sizes: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    seconds: float
    models: tuple[BenchmarkedModel, ...]
    baseline: str | None = None
    higher_is_better: bool = True
    gate: float | None = None
    fastest: tuple[Fastest, ...] = ()
    smallest: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every model was measured, and one reaches the gate if there is one."""
        gated = self.gate is None or any(self.reaches_gate(each) for each in self.models)
        return gated and not any(each.failure for each in self.models)

    @property
    def measured(self) -> list[BenchmarkedModel]:
        """The models that did not fail."""
        return [each for each in self.models if not each.failure]

    def reaches_gate(self, model: BenchmarkedModel) -> bool:
        """Whether a model was measured and may be named."""
        return not model.failure and model.reaches(self.gate)

    def conclusions(self) -> dict[str, str]:
        """Returns what the report names, in words by what it is."""
        gate = {} if self.gate is None else {"gate": f"{100 * self.gate:.4g}% of the score of {self.baseline}"}
        if self.smallest is None:
            return gate | {"fastest, smallest": "no model reaches the gate"}
        size = next(each.bytes_on_disk for each in self.models if each.name == self.smallest)
        named = {f"fastest, batch {each.batch_size}": str(each) for each in self.fastest}
        return gate | named | {"smallest": f"{self.smallest}, {short_bytes(size or 0)}"}

    def tables(self) -> tuple[Table, Table]:
        """Returns the sizes, the start and the score of each model, and the times of all calls."""
        return _costs(self, self.measured), _calls(self, self.measured)

    def _sheet(self) -> Sheet:
        shown = self.measured
        count = f"{len(self.models)} model{'s' if len(self.models) > 1 else ''}"
        words = [*self.conclusions().items(), *(("warning", each) for each in self.warnings)]
        words += [("skipped", f"{each.name}: {why}") for each in shown for why in dict.fromkeys(each.skipped.values())]
        words += [(PROBLEM, f"{each.name}: {each.failure}") for each in self.models if each.failure]
        width = max(len(head) for head, _ in words)
        rows = [row for head, text in words for row in wrapped(head, text, COLUMNS - width - 4)]
        return Sheet(title=f"{count} on {self.device}, {self.cores} cores", tables=[*self.tables(), Table(rows=rows)])


def in_threads(count: int) -> str:
    """Returns a number of threads in words.

    Example:
        >>> in_threads(0), in_threads(1), in_threads(8)
        ('the default threads', '1 thread', '8 threads')
    """
    return f"{count} thread{'s' if count > 1 else ''}" if count else "the default threads"


def _costs(report: BenchmarkReport, models: Sequence[BenchmarkedModel]) -> Table:
    """Returns the table with a row for each model: its sizes, its start and its score."""
    head = ["format", "bytes", "gzip", "load ms", "first ms", "memory"]
    names = list(dict.fromkeys(name for each in models for name in each.scores))[:1]  # the others are in the JSON
    if names:
        head += [score_label(names[0]).lower(), "share"]
    rows = []
    for each in models:
        cells = [
            each.format,
            UNKNOWN if each.bytes_on_disk is None else short_bytes(each.bytes_on_disk),
            UNKNOWN if each.gzip_bytes is None else short_bytes(each.gzip_bytes),
            UNKNOWN if each.load_ms is None else grouped(each.load_ms),
            UNKNOWN if each.first_call_ms is None else grouped(each.first_call_ms),
            UNKNOWN if each.memory_peak_bytes is None else memory_size(each.memory_peak_bytes),
        ]
        for name in names:
            below = "" if report.reaches_gate(each) else " below"
            cells.append(show_score(name, each.scores[name]) if name in each.scores else UNKNOWN)
            cells.append((UNKNOWN if each.score_share is None else f"{each.score_share:.2%}") + below)
        rows.append(cells)
    return _named(head, [each.name for each in models], rows, words=1)


def _calls(report: BenchmarkReport, models: Sequence[BenchmarkedModel]) -> Table:
    """Returns the table with a row for each batch size, model and number of threads."""
    head = ["batch", "threads", "median ms", "p90 ms", "p99 ms", "examples/s"]
    rows, names = [], []
    for size in report.batch_sizes:
        for model in models:
            for each in model.times:
                if each.batch_size == size:
                    latencies = (each.latency_ms_median, each.latency_ms_p90, each.latency_ms_p99)
                    rows.append(
                        [
                            str(size),
                            str(each.threads or "default"),
                            *(f"{milliseconds:.3f}" for milliseconds in latencies),
                            grouped(each.examples_per_s),
                        ]
                    )
                    names.append(model.name)
    return _named(head, names, rows)


def _named(head: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> Table:
    """Returns a table whose first column has names, cut to what the others leave.

    The next `words` columns hold words, and all others figures.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    space = max(COLUMNS - 2 - sum(widths) - 2 * len(widths), NARROWEST_NAME)
    cut = fitting_names(names, space)
    return Table(
        head=("model", *head),
        rows=[(cut[name], *row) for name, row in zip(names, rows, strict=True)],
        figures=range(1 + words, 1 + len(head)),
    )


def fitting_names(names: Sequence[str], width: int) -> dict[str, str]:
    """Returns names that are cut in the middle to a width, by the whole names. They stay distinct.

    Example:
        >>> fitting_names(["mine/int8", "a_very_long_directory/int8"], 12)
        {'mine/int8': 'mine/int8', 'a_very_long_directory/int8': 'a_very…/int8'}
    """
    unique = list(dict.fromkeys(names))
    cut = {name: shortened(name, width) for name in unique}
    if len(set(cut.values())) < len(unique):
        cut = {name: shortened(f"{number} {name}", width) for number, name in enumerate(unique, start=1)}
    return cut


def wrapped(head: str, text: str, width: int) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text that is too long, below each other, after its head."""
    for line in textwrap.wrap(text, width) or [""]:
        yield head, line
        head = ""
