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
from tfopt.reporting.figures import step_stack
from tfopt.reporting.html_page import render
from tfopt.reporting.receipts import UNKNOWN, Cell
from tfopt.reporting.saved_report import is_page

Value = TypeVar("Value")

# Series that end so count up from the start, so their total is the last value without the first.
COUNTERS = ("_joules",)


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Runs side by side. Each sequence has one value for each run; a value that a run lacks is None."""

    runs: Sequence[str]  # names of the runs
    plan: Mapping[str, Sequence[str | None]]  # the settings of the plan and of the environment that differ
    step_time_ms: Mapping[str, Sequence[float | None]]  # median time of a step, by the name of the phase
    breakdowns: Sequence[StepBreakdown | None]  # where the time of a step goes
    scores: Mapping[str, Sequence[float | None]]  # scores by artifact, as in "int8 accuracy"
    bytes_on_disk: Mapping[str, Sequence[int | None]]  # sizes of the artifacts
    latency_ms_median: Mapping[str, Sequence[float | None]]  # median latencies of the artifacts
    # Means of the samples by the name of the series. Of energy, which counts up, the total.
    utilization: Mapping[str, Sequence[float | None]]


def compare(reports: Mapping[str, RunReport]) -> Comparison:
    """Returns two or more runs side by side, by their names. The others are compared with the first.

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
        plan={
            **_different(runs, lambda run: {decision.setting: decision.value for decision in run.plan}),
            **_different(runs, lambda run: run.environment),
        },
        step_time_ms=_side_by_side(runs, _step_times),
        breakdowns=[run.diagnosis.breakdown if run.diagnosis else None for run in runs],
        scores=_side_by_side(runs, _scores),
        bytes_on_disk=_of_artifacts(runs, "bytes_on_disk"),
        latency_ms_median=_of_artifacts(runs, "latency_ms_median"),
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


def _of_artifacts(runs: Sequence[RunReport], figure: str) -> dict[str, list[Any]]:
    return _side_by_side(runs, lambda run: {name: getattr(each, figure) for name, each in run.receipts.items()})


def _step_times(run: RunReport) -> dict[str, float]:
    return {phase.name: phase.step_time_ms for phase in run.phases if phase.step_time_ms is not None}


def _scores(run: RunReport) -> dict[str, float]:
    pairs = ((name, score, each.score(score)) for name, each in run.receipts.items() for score in score_names([each]))
    return {f"{name} {score}": value for name, score, value in pairs if value is not None}


def _load(run: RunReport) -> dict[str, float]:
    known = run.utilization.known if run.utilization else {}
    return {
        name: values[-1] - values[0] if name.endswith(COUNTERS) else sum(values) / len(values)
        for name, values in known.items()
    }


@dataclass(frozen=True)
class Section:
    """One table of the page: a row for each figure, with a cell for each run."""

    id: str
    title: str
    heading: str
    rows: Mapping[str, Sequence[Cell]]
    note: str = ""


def write_comparison_html(reports: Mapping[str, RunReport], path: Path) -> Path:
    """Writes a page that shows runs side by side, as `compare` does, and returns its path.

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
    plan = {name: [Cell(text=value or UNKNOWN) for value in values] for name, values in found.plan.items()}
    scores = dict(_score_row(name, values) for name, values in found.scores.items())
    load = {name.replace("_", " "): _cells(values, _shown_as(name)) for name, values in found.utilization.items()}
    latencies = _rows(found.latency_ms_median, "{:.3g} ms".format)
    noise = "Median time of a call. The runs were not measured alternately, so small differences are noise."
    return [
        Section("times", "Times", "Time", _rows({**times, **totals, **parts}, "{:.3g} ms".format)),
        Section("scores", "Scores", "Artifact", scores),
        Section("sizes", "Sizes", "Artifact", _rows(found.bytes_on_disk, short_bytes)),
        Section("latencies", "Latencies", "Artifact", latencies, noise),
        Section("utilization", "Utilization", "Mean, or total energy", load),
        Section("plan", "Plan and environment", "Setting", plan, "Only what differs."),
    ]


def _shown_as(series: str) -> Callable[[float], str]:
    if series.endswith("bytes_per_second"):
        return lambda value: f"{short_bytes(value)}/s"
    if series.endswith("bytes"):
        return short_bytes
    return grouped


def _score_row(name: str, values: Sequence[float | None]) -> tuple[str, list[Cell]]:
    artifact, _, score = name.partition(" ")
    cells = [Cell(text=UNKNOWN if value is None else show_score(score, value)) for value in values]
    return f"{artifact}, {score_label(score).lower()}", cells


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
