"""One HTML page that shows two or more runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.atomic.own_files import write_own
from tfopt.report import RunReport
from tfopt.report.formatting import grouped, score_label, short_bytes, show_score
from tfopt.reporting import figures
from tfopt.reporting.comparison import Comparison, compare
from tfopt.reporting.receipt_table import UNKNOWN
from tfopt.reporting.rendering import is_page, render

TEMPLATE = "comparison.html.jinja"


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One value, and its change against the first run."""

    text: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the page: a row for each figure, with a cell for each run."""

    id: str
    title: str
    heading: str
    rows: Mapping[str, Sequence[ComparedCell]]
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
        TEMPLATE,
        title=" and ".join([", ".join(found.runs[:-1]), found.runs[-1]]),
        comparison=found,
        steps=figures.step_stack(steps),
        sections=_sections(found),
    )
    write_own(path, page, is_page)
    return path


def _sections(found: Comparison) -> list[Section]:
    parts = {
        part: [each.parts[part] if each else None for each in found.breakdowns]
        for part in ("input", "host", "compute", "communication")
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
        Section(id="sizes", title="Sizes", heading="Artifact", rows=_rows(found.bytes_on_disk, figures.show_bytes)),
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
            rows={
                name: [ComparedCell(text=value or UNKNOWN) for value in values] for name, values in found.plan.items()
            },
            note="Only what differs.",
        ),
    ]


def _shown_as(series: str) -> Callable[[float], str]:
    if series.endswith("bytes_per_second"):
        return lambda value: f"{short_bytes(value)}/s"
    if series.endswith("bytes"):
        return figures.show_bytes
    return grouped


def _score_title(name: str) -> str:
    artifact, _, score = name.partition(" ")
    return f"{artifact}, {score_label(score).lower()}"


def _score_cells(name: str, values: Sequence[float | None]) -> list[ComparedCell]:
    score = name.partition(" ")[2]
    return [ComparedCell(text=UNKNOWN if value is None else show_score(score, value)) for value in values]


def _rows(figures_of_runs: Mapping[str, Sequence[Any]], show: Callable[[float], str]) -> dict[str, list[ComparedCell]]:
    return {name: _cells(values, show) for name, values in figures_of_runs.items()}


def _cells(values: Sequence[float | None], show: Callable[[float], str]) -> list[ComparedCell]:
    first = values[0]
    return [
        ComparedCell(text=UNKNOWN if value is None else show(value), change=_change(first, value) if place else "")
        for place, value in enumerate(values)
    ]


def _change(first: float | None, value: float | None) -> str:
    if not first or value is None:
        return ""
    change = f"{value / first - 1:+.0%}"
    return "" if change in ("+0%", "-0%") else change
