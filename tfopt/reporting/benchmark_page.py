"""One HTML page about a benchmark: what it names, bars of times, sizes and scores, and the tables behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tfopt.atomic.own_files import write_own
from tfopt.report.benchmark import BenchmarkReport, fitting_names, in_threads
from tfopt.report.formatting import grouped, score_label, short_bytes, show_score
from tfopt.reporting.drawing import INK, MUTED, SERIES, Plot, bar_axes, in_pairs, to_svg, with_unique_ids
from tfopt.reporting.html_page import render
from tfopt.reporting.saved_report import is_page

NAME = 20  # characters of a name beside a bar


def write_benchmark_html(report: BenchmarkReport, path: Path) -> Path:
    """Writes a benchmark as one HTML page that opens offline, and returns its path.

    Args:
        report: What `tfopt.benchmark` returned.
        path: File to write, in an existing directory. An earlier page of tfopt is replaced.
    Raises:
        ConfigError: The file is there, and tfopt did not write it.
        ExportError: The file cannot be written.
    Example:
        >>> import tempfile
        >>> from tfopt.report import BenchmarkedModel
        >>> from tfopt.report.ranking import judged
        >>> model = BenchmarkedModel(name="int8", path="out/int8", format="onnx", bytes_on_disk=120_000)
        >>> report = judged([model], device="CPU", cores=2, batch_sizes=(1,), threads=(0,), rounds=9, seconds=0.1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     "120 kB" in write_benchmark_html(report, Path(directory) / "bench.html").read_text()
        True
    """
    page = render(
        "benchmark.html.jinja",
        title="Benchmark",
        report=report,
        conclusions=report.conclusions(),
        plots=_plots(report),
        tables=report.tables(),
        problems=[(each.name, each.failure) for each in report.models if each.failure],
        skipped=[(each.name, why) for each in report.measured for why in dict.fromkeys(each.skipped.values())],
    )
    write_own(path, page, is_page)
    return path


def _plots(report: BenchmarkReport) -> list[Plot]:
    plots = []
    for fastest in report.fastest:
        size, named = fastest.batch_size, fastest.about_even or (fastest.model,)
        timed = {each.name: best for each in report.measured if (best := each.best(size)) is not None}
        on = {name: f", {in_threads(best.threads)}" if len(report.threads) > 1 else "" for name, best in timed.items()}
        latencies = {name: best.latency_ms_median for name, best in timed.items()}
        texts = [f"{milliseconds:.3g} ms{on[name]}" for name, milliseconds in latencies.items()]
        plots.append(_bars(f"Median latency, batch {size}", latencies, texts, named))
        rates = {name: best.examples_per_s for name, best in timed.items()}
        texts = [f"{grouped(rate)} examples/s" for rate in rates.values()]
        plots.append(_bars(f"Throughput, batch {size}", rates, texts, named))
    sizes = {each.name: each.bytes_on_disk for each in report.measured if each.bytes_on_disk is not None}
    plots.append(_bars("Size on disk", sizes, map(short_bytes, sizes.values()), (report.smallest,)))
    for score in dict.fromkeys(name for each in report.measured for name in each.scores):
        scores = {each.name: each.scores[score] for each in report.measured if score in each.scores}
        plots.append(_bars(score_label(score), scores, [show_score(score, value) for value in scores.values()]))
    return with_unique_ids("bench", plots)


def _bars(
    title: str, values: Mapping[str, float], texts: Iterable[str], named: Collection[str | None] = frozenset()
) -> Plot:
    """Draws a bar for each model. Those that the report names are in colour."""
    cut, texts = fitting_names(list(values), NAME), list(texts)
    figure, axes = bar_axes(cut.values())
    axes.set_xlim(0, 2 * max(values.values(), default=0.0) or 1.0)  # room for the longest label
    colours = [SERIES[0] if name in named else MUTED for name in values]
    drawn = axes.barh(range(len(values)), list(values.values()), height=0.5, color=colours)
    axes.bar_label(drawn, texts, padding=5, color=INK, fontsize=10)
    return Plot(title=title, summary=f"{title}: {in_pairs(values, texts)}", svg=to_svg(figure))
