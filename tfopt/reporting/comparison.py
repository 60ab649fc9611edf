"""Two or more runs side by side: what differs in their plans, and what they measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tfopt.errors import ConfigError
from tfopt.report import Record, RunReport, StepBreakdown, score_names

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
