"""Two or more runs side by side: what differs in their plans, what they measured, and a page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tfopt.atomic.own_files import write_own
from tfopt.errors import ConfigError
from tfopt.report import Record, RunReport, StepBreakdown, score_names
from tfopt.report.formatting import grouped, score_label, short_bytes, show_score
from tfopt.report.profile import PARTS
from tfopt.reporting.bars import step_stack
from tfopt.reporting.html_page import render
from tfopt.reporting.receipts import UNKNOWN, Cell
from tfopt.reporting.saved_report import is_page

Value = TypeVar("Value")

# Series that end so count up from the start, so their total is the last value without the first.
COUNTERS = ("_joules",)


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Runs side by side. Each sequence has one value for each run; a value that a run lacks is None.

    Attributes:
        runs: Names of the runs.
        plan: The settings of the plan and of the environment that differ.
        step_time_ms: Median time of a step, by the name of the phase.
        breakdowns: Where the time of a step goes.
        scores: Scores by artifact, as in "int8 accuracy".
        bytes_on_disk: Sizes of the artifacts.
        latency_ms_median: Median latencies of the artifacts.
        utilization: Means of the samples by the name of the series. Of energy, which counts up, the total.
    """

    runs: Sequence[str]
    plan: Mapping[str, Sequence[str | None]]
    step_time_ms: Mapping[str, Sequence[float | None]]
    breakdowns: Sequence[StepBreakdown | None]
    scores: Mapping[str, Sequence[float | None]]
    bytes_on_disk: Mapping[str, Sequence[int | None]]
    latency_ms_median: Mapping[str, Sequence[float | None]]
    utilization: Mapping[str, Sequence[float | None]]


def compare(reports: Mapping[str, RunReport]) -> Comparison:
    """Returns two or more runs side by side.

    Args:
        reports: The report of each run by its name. The first is the one that the others are compared with.
    Raises:
        ConfigError: There is one run only.
    Example:
        >>> compare({})
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A comparison needs at least two runs. Received: 0. Give another directory.
    """
    if len(reports) < 2:
        raise ConfigError(f"A comparison needs at least two runs. Received: {len(reports)}. Give another directory.")
    runs = list(reports.values())
    return Comparison(
        runs=list(reports),
        plan={**_different(runs, _plan), **_different(runs, lambda run: run.environment)},
        step_time_ms=_side_by_side(runs, _step_times),
        breakdowns=[run.diagnosis.breakdown if run.diagnosis else None for run in runs],
        scores=_side_by_side(runs, _scores),
        bytes_on_disk=_side_by_side(
            runs, lambda run: {name: each.bytes_on_disk for name, each in run.receipts.items()}
        ),
        latency_ms_median=_side_by_side(
            runs, lambda run: {name: each.latency_ms_median for name, each in run.receipts.items()}
        ),
        utilization=_side_by_side(runs, _load),
    )


def _side_by_side(
    runs: Sequence[RunReport], read: Callable[[RunReport], Mapping[str, Value]]
) -> dict[str, list[Value | None]]:
    found = [read(run) for run in runs]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: [each.get(name) for each in found] for name in names}


def _different(
    runs: Sequence[RunReport], read: Callable[[RunReport], Mapping[str, str]]
) -> dict[str, list[str | None]]:
    return {name: values for name, values in _side_by_side(runs, read).items() if len(set(values)) > 1}


def _plan(run: RunReport) -> dict[str, str]:
    return {decision.setting: decision.value for decision in run.plan}


def _step_times(run: RunReport) -> dict[str, float]:
    return {phase.name: phase.step_time_ms for phase in run.phases if phase.step_time_ms is not None}


def _scores(run: RunReport) -> dict[str, float]:
    pairs = ((name, score, each.score(score)) for name, each in run.receipts.items() for score in score_names([each]))
    return {f"{name} {score}": value for name, score, value in pairs if value is not None}


def _load(run: RunReport) -> dict[str, float]:
    series = run.utilization.series if run.utilization else {}
    known = {name: [value for value in values if value is not None] for name, values in series.items()}
    return {name: _total_or_mean(name, values) for name, values in known.items() if values}


def _total_or_mean(name: str, values: Sequence[float]) -> float:
    return values[-1] - values[0] if name.endswith(COUNTERS) else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the page: a row for each figure, with a cell for each run."""

    id: str
    title: str
    heading: str
    rows: Mapping[str, Sequence[Cell]]
    note: str = ""


def write_comparison_html(reports: Mapping[str, RunReport], path: Path) -> Path:
    """Writes a page that shows runs side by side, and returns its path.

    Args:
        reports: The report of each run by its name. The first is the one that the others are compared with.
        path: File to write, in an existing directory. An earlier page of tfopt is replaced.
    Raises:
        ConfigError: There is one run only, or the file is there and tfopt did not write it.
    """
    found = compare(reports)
    steps = {name: each for name, each in zip(found.runs, found.breakdowns, strict=True) if each}
    page = render(
        "comparison.html.jinja",
        title=" and ".join([", ".join(found.runs[:-1]), found.runs[-1]]),
        comparison=found,
        steps=step_stack(steps),
        sections=_sections(found),
    )
    write_own(path, page, is_page)
    return path


def _sections(found: Comparison) -> list[Section]:
    parts = {
        part: [each.parts[part] if each else None for each in found.breakdowns]
        for part in PARTS
        if any(each and each.parts[part] for each in found.breakdowns)
    }
    totals = {"whole step": [each.step_ms if each else None for each in found.breakdowns]} if parts else {}
    times = {f"phase {name}, median step": values for name, values in found.step_time_ms.items()}
    return [
        Section(
            id="times", title="Times", heading="Time", rows=_rows({**times, **totals, **parts}, "{:.3g} ms".format)
        ),
        Section(
            id="scores",
            title="Scores",
            heading="Artifact",
            rows={_score_title(name): _score_cells(name, values) for name, values in found.scores.items()},
        ),
        Section(id="sizes", title="Sizes", heading="Artifact", rows=_rows(found.bytes_on_disk, short_bytes)),
        Section(
            id="latencies",
            title="Latencies",
            heading="Artifact",
            rows=_rows(found.latency_ms_median, "{:.3g} ms".format),
            note="Median time of a call. The runs were not measured alternately, so small differences are noise.",
        ),
        Section(
            id="utilization",
            title="Utilization",
            heading="Mean, or total energy",
            rows={
                name.replace("_", " "): _cells(values, _shown_as(name)) for name, values in found.utilization.items()
            },
        ),
        Section(
            id="plan",
            title="Plan and environment",
            heading="Setting",
            rows={name: [Cell(text=value or UNKNOWN) for value in values] for name, values in found.plan.items()},
            note="Only what differs.",
        ),
    ]


def _shown_as(series: str) -> Callable[[float], str]:
    if series.endswith("bytes_per_second"):
        return lambda value: f"{short_bytes(value)}/s"
    if series.endswith("bytes"):
        return short_bytes
    return grouped


def _score_title(name: str) -> str:
    artifact, _, score = name.partition(" ")
    return f"{artifact}, {score_label(score).lower()}"


def _score_cells(name: str, values: Sequence[float | None]) -> list[Cell]:
    score = name.partition(" ")[2]
    return [Cell(text=UNKNOWN if value is None else show_score(score, value)) for value in values]


def _rows(figures_of_runs: Mapping[str, Sequence[Any]], show: Callable[[float], str]) -> dict[str, list[Cell]]:
    return {name: _cells(values, show) for name, values in figures_of_runs.items()}


def _cells(values: Sequence[float | None], show: Callable[[float], str]) -> list[Cell]:
    first = values[0]
    return [
        Cell(text=UNKNOWN if value is None else show(value), change=_change(first, value) if place else "")
        for place, value in enumerate(values)
    ]


def _change(first: float | None, value: float | None) -> str:
    if not first or value is None:
        return ""
    change = f"{value / first - 1:+.0%}"
    return "" if change in ("+0%", "-0%") else change
