"""The figures of a page: bars of artifacts and of steps, training curves, and the load of the machine over time."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from tfopt.report import Phase, Receipt, StepBreakdown, Utilization, score_names
from tfopt.report.formatting import SCORE_LABELS, grouped, is_share, score_label, short_bytes, show_score
from tfopt.reporting.drawing import (
    ALARM,
    INK,
    MUTED,
    SERIES,
    THEME,
    Line,
    Plot,
    bar_axes,
    draw_line,
    in_pairs,
    in_words,
    known_values,
    make_axes,
    short_name,
    to_svg,
    with_unique_ids,
)

# A difference that is a smaller share of the length cannot be seen in bars that start at 0.
VISIBLE_SHARE = 0.05
# Waiting is drawn in warm colours, work in cool ones.
COLOURS = {"input": SERIES[1], "host": SERIES[5], "compute": SERIES[0], "communication": SERIES[3]}


def bars(receipts: Mapping[str, Receipt]) -> list[Plot]:
    """Draws scores, size, gzip size and latency as bars, one per artifact.

    Shares, such as accuracies, that are too close for bars from 0 are drawn as differences to the first, in points.
    """
    figures: dict[str, tuple[Callable[[Receipt], float | None], Callable[[float], str]]] = {
        "Size on disk": (lambda receipt: receipt.bytes_on_disk, short_bytes),
        "Size as .tar.gz": (lambda receipt: receipt.gzip_bytes, short_bytes),
        "Median latency": (lambda receipt: receipt.latency_ms_median, "{:.3g} ms".format),
    }
    if not receipts:
        return []
    plots = []
    for score in score_names(receipts.values()):
        values = {name: receipt.score(score) for name, receipt in receipts.items()}
        draw = _difference_bar if is_share(score) and _too_close(values) else _bar
        plots.append(draw(score_label(score), values, functools.partial(show_score, score)))
    plots += [
        _bar(title, {name: value(receipt) for name, receipt in receipts.items()}, show)
        for title, (value, show) in figures.items()
    ]
    return with_unique_ids("bar", plots)


def _bar(title: str, values: Mapping[str, float | None], show: Callable[[float], str]) -> Plot:
    texts = ["unavailable" if value is None else show(value) for value in values.values()]
    lengths = [value or 0.0 for value in values.values()]
    figure, axes = bar_axes(values)
    axes.set_xlim(0, 1.35 * (max(lengths) or 1))  # room for the longest label
    colours = [MUTED, *[SERIES[0]] * (len(values) - 1)]  # the others are compared with the first
    drawn = axes.barh(range(len(values)), lengths, height=0.5, color=colours)
    axes.bar_label(drawn, texts, padding=5, color=INK, fontsize=10)
    return Plot(title=title, summary=f"{title}: {in_pairs(values, texts)}", svg=to_svg(figure))


def _difference_bar(title: str, values: Mapping[str, float | None], show: Callable[[float], str]) -> Plot:
    """Draws the difference of each value to the first, in points. All values must be known."""
    first, *others = (value or 0.0 for value in values.values())
    points = [100 * (value - first) for value in others]
    texts = [show(first), *(f"{change:+.2f} points" for change in points)]
    figure, axes = bar_axes(values)
    furthest = max(map(abs, points)) or 1.0
    lowest, highest = min(0.0, *points), max(0.0, *points)
    axes.set_xlim(lowest - 0.08 * furthest, highest + 0.9 * furthest)  # room for the labels, on the right of all bars
    axes.barh(range(1, len(values)), points, height=0.5, color=SERIES[0])
    axes.axvline(0, color=MUTED, linewidth=1)
    for row, text in enumerate(texts):
        end = highest if row == 0 else max(0.0, points[row - 1])
        axes.annotate(text, (end if row else 0.0, row), (5, 0), textcoords="offset points", va="center", color=INK)
    title = f"{title}, difference to {next(iter(values))}"
    return Plot(title=title, summary=f"{title}: {in_pairs(values, texts)}", svg=to_svg(figure))


def _too_close(values: Mapping[str, float | None]) -> bool:
    """Returns whether there are several values, all are known, and bars from 0 would look equally long."""
    known = [value for value in values.values() if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return False
    return max(known) - min(known) < VISIBLE_SHARE * max(known)


def step_stack(breakdowns: Mapping[str, StepBreakdown]) -> list[Plot]:
    """Draws each step by its name as a stacked bar: input, host, compute, communication. The list is empty without one.

    Example:
        >>> step = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
        >>> step_stack({"step": step})[0].summary
        'Milliseconds per step: 10 ms, input 6 ms (60%), host 1 ms (10%), compute 3 ms (30%)'
    """
    if not breakdowns:
        return []
    # Runs on one device have no communication, and need no entry for it.
    parts = [part for part in COLOURS if any(each.parts[part] for each in breakdowns.values())]
    figure, axes = bar_axes(breakdowns if len(breakdowns) > 1 else [""])
    longest = max(max(each.step_ms, sum(each.parts.values())) for each in breakdowns.values())
    axes.set_xlim(0, 1.25 * longest or 1)  # room for the label
    for row, each in enumerate(breakdowns.values()):
        lengths = [each.parts[part] for part in parts]
        starts = [0.0, *accumulate(lengths)]
        axes.barh([row] * len(parts), lengths, left=starts[:-1], height=0.55, color=[COLOURS[part] for part in parts])
        axes.annotate(
            f"{each.step_ms:.3g} ms", (starts[-1], row), (6, 0), textcoords="offset points", va="center", color=INK
        )
    legend = [
        Line(label=part, colour=COLOURS[part], note=_note(part, breakdowns), values=[], is_block=True) for part in parts
    ]
    summary = "; ".join(_in_words(name, each, parts) for name, each in breakdowns.items())
    if len(breakdowns) == 1:
        summary = summary.removeprefix(f"{next(iter(breakdowns))} ")
    plot = Plot(
        title="Milliseconds per step", summary=f"Milliseconds per step: {summary}", legend=legend, svg=to_svg(figure)
    )
    return with_unique_ids("step", [plot])


def _note(part: str, breakdowns: Mapping[str, StepBreakdown]) -> str:
    times = [each.parts[part] for each in breakdowns.values()]
    if len(times) > 1:
        return f"{', '.join(f'{ms:.3g}' for ms in times)} ms"
    (step,) = breakdowns.values()
    return f"{times[0]:.3g} ms, {step.share(times[0])}".removesuffix(", ")


def _in_words(name: str, step: StepBreakdown, parts: list[str]) -> str:
    times = [f"{part} {step.parts[part]:.3g} ms ({step.share(step.parts[part])})".removesuffix(" ()") for part in parts]
    return f"{name} {step.step_ms:.3g} ms, {', '.join(times)}"


# If the ratio of the largest to the smallest loss is higher, the axis is logarithmic: one and a half decades.
LOGARITHMIC_FROM = 10**1.5
Series = Mapping[str, Sequence[float | None]]

THROTTLED = "throttled"
MOST_LINES = len(SERIES)
# A page with every sample of a day would be large, and the drawing has about as many points across.
MOST_POINTS = 500
BYTES = {"bytes": "B", "bytes_per_second": "B/s"}
TITLES = {"mhz": "MHz", "celsius": "Degrees Celsius"}
# These units count up from the start, so the total is the last value without the first.
COUNTERS = frozenset({"joules"})


def curves(phases: Sequence[Phase]) -> list[Plot]:
    """Draws one plot per metric, with training and validation together and all phases on one axis of epochs.

    A metric is drawn only for the phases that recorded it, for example sparsity from the phase that prunes.
    """
    names = {name.removeprefix("val_") for phase in phases for name in phase.history}
    # The loss and the scores of tasks come first, then other metrics such as sparsity.
    metrics = sorted(names, key=lambda name: (name != "loss", name not in SCORE_LABELS, name))
    plots = (_curve(metric, phases) for metric in metrics)
    return with_unique_ids("curve", [plot for plot in plots if plot.legend])


def _curve(metric: str, phases: Sequence[Phase]) -> Plot:
    series = (metric, f"val_{metric}")
    recorded = [any(known_values(phase.history.get(name, ())) for name in series) for phase in phases]
    first = recorded.index(True) if any(recorded) else 0
    named, start, phases = len(phases) > 1, sum(map(_epochs, phases[:first])), phases[first:]
    legend = []
    for name, label, colour in zip(series, ("training", "validation"), SERIES, strict=False):
        values = []
        for phase in phases:
            recorded_here = [value if math.isfinite(value) else math.nan for value in phase.history.get(name, ())]
            values += recorded_here + [math.nan] * (_epochs(phase) - len(recorded_here))
        known = known_values(values)
        if known:
            legend.append(Line(label=label, colour=colour, note=f"{known[-1]:.4g}", values=values))

    figure, axes = make_axes("epoch")
    epochs = sum(map(_epochs, phases))
    axes.set_xlim(start + 0.5, start + epochs + 0.5)  # a later phase may not have recorded this metric
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for line in legend:
        draw_line(axes, range(start + 1, start + epochs + 1), line)
    title = score_label(metric) if metric in SCORE_LABELS else in_words(metric)
    every = [value for line in legend for value in known_values(line.values)]
    if "loss" in metric and every and min(every) > 0 and max(every) / min(every) >= LOGARITHMIC_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        title = f"{title}, logarithmic"
    if named:
        _mark_phases(axes, phases, start)
    ends = [f"{line.label} from {known_values(line.values)[0]:.4g} to {line.note}" for line in legend]
    where = f"epochs {start + 1} to {start + epochs}" if start else f"{epochs} epochs"
    return Plot(title=title, summary=f"{title} over {where}: {', '.join(ends)}", legend=legend, svg=to_svg(figure))


def _mark_phases(axes: Axes, phases: Sequence[Phase], epochs_before: int) -> None:
    start = epochs_before + 0.5  # epochs count from 1; a boundary is half-way between two epochs
    for phase in phases:
        end = start + _epochs(phase)
        axes.text(
            (start + end) / 2,
            1.02,
            short_name(phase.name),
            transform=axes.get_xaxis_transform(),
            ha="center",
            color=MUTED,
            fontsize=9,
            parse_math=False,
        )
        if phase is not phases[-1]:
            axes.axvline(end, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), gid="phase-boundary")
        start = end


def _epochs(phase: Phase) -> int:
    return max((len(values) for values in phase.history.values()), default=0)


def utilization(record: Utilization) -> list[Plot]:
    """Draws one plot per unit, so that the series on one axis can be compared.

    A plot that would have more lines than there are colours is divided: one plot for each figure, with a line for each
    GPU. A series whose name ends in "throttled" is no line. It marks the time in which it is not 0 in all plots.

    Example:
        >>> record = Utilization(source="NVML", seconds=[0, 1], series={"gpu0_power_watts": [300.0, 500.0]})
        >>> utilization(record)[0].summary
        'Watts over time: gpu0 power mean 400'
    """
    throttled = [values for name, values in record.series.items() if name.endswith(THROTTLED)]
    marked = [[any(sample) for sample in zip(*throttled, strict=True)]] if throttled else []  # of any GPU
    by_unit: dict[str, dict[str, Sequence[float | None]]] = {}
    for name, values in record.series.items():
        if not name.endswith(THROTTLED):
            label, unit = _split_unit(name)
            by_unit.setdefault(unit, {})[label] = values
    reasons = {_split_unit(name): why for name, why in record.unavailable.items()}
    plots = [
        _usage(title, unit, lines, record.seconds, marked, reasons)
        for unit, series in by_unit.items()
        for title, lines in _divided(unit, series)
    ]
    return with_unique_ids("usage", plots)


def _divided(unit: str, series: Series) -> Iterator[tuple[str, Series]]:
    """Yields the title and the lines of each plot of one unit."""
    if len(series) <= MOST_LINES:
        yield TITLES.get(unit, in_words(unit)), series
        return
    by_figure: dict[str, dict[str, Sequence[float | None]]] = {}
    for label, values in series.items():
        match = re.fullmatch(r"(.*\bgpu ?\d+) (.+)", label)
        by_figure.setdefault(match[2] if match else "", {})[match[1] if match else label] = values
    for figure, lines in by_figure.items():
        names = list(lines)
        for start in range(0, len(names), MOST_LINES):
            part = {name: lines[name] for name in names[start : start + MOST_LINES]}
            title = f"{in_words(figure)}, {unit.replace('_', ' ')}" if figure else TITLES.get(unit, in_words(unit))
            yield title, part


def _usage(
    title: str,
    unit: str,
    series: Series,
    seconds: Sequence[float],
    marked: Sequence[Sequence[bool]],
    reasons: Mapping[tuple[str, str], str],
) -> Plot:
    figure, axes = make_axes("seconds")
    legend = []
    for index, (label, samples) in enumerate(series.items()):
        values = [math.nan if value is None else value for value in samples]
        colour = SERIES[index % len(SERIES)]
        line = Line(
            label=label, colour=colour, note=_usage_note(values, unit, reasons.get((label, unit))), values=values
        )
        times, means = _thinned(seconds, values)
        draw_line(axes, times, Line(label=label, colour=colour, note="", values=means))
        legend.append(line)
    axes.set_xlim(0, max(seconds, default=0) or 1)
    axes.set_ylim(bottom=0)
    if unit in BYTES:
        axes.yaxis.set_major_formatter(EngFormatter(unit=BYTES[unit]))
    for samples in marked:
        _mark(axes, seconds, samples)
        share = sum(samples) / len(samples) if samples else 0.0
        legend.append(Line(label="throttled", colour=THEME[ALARM], note=f"{share:.0%} of the time", values=[]))
    notes = ", ".join(f"{line.label} {line.note}" for line in legend)
    return Plot(title=title, summary=f"{title} over time: {notes}", legend=legend, svg=to_svg(figure))


def _usage_note(values: Sequence[float], unit: str, why: str | None) -> str:
    per_second = BYTES.get(unit, "").removeprefix("B")
    show = (lambda value: short_bytes(value) + per_second) if unit in BYTES else grouped
    known = known_values(values)
    if not known:
        return f"unavailable ({why or 'no sample could be read'})"
    if unit in COUNTERS:
        return f"total {show(known[-1] - known[0])}"
    return f"mean {show(sum(known) / len(known))}"


def _mark(axes: Axes, seconds: Sequence[float], samples: Sequence[bool]) -> None:
    """Marks the time from each throttled sample to the next sample."""
    start = None
    for second, is_throttled in zip([*seconds, seconds[-1] if seconds else 0], [*samples, False], strict=True):
        if is_throttled and start is None:
            start = second
        elif not is_throttled and start is not None:
            axes.axvspan(start, second, ymin=0.97, color=ALARM, linewidth=0, gid="throttled")
            start = None


def _thinned(seconds: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns at most MOST_POINTS points, each the mean of the samples around it."""
    size = math.ceil(len(values) / MOST_POINTS) or 1
    if size == 1:
        return list(seconds), list(values)
    times, means = [], []
    for start in range(0, len(values), size):
        known = known_values(values[start : start + size])
        times.append(seconds[start])
        means.append(sum(known) / len(known) if known else math.nan)
    return times, means


def _split_unit(name: str) -> tuple[str, str]:
    """Splits a figure's name: "pcie_bytes_per_second" is "pcie" in "bytes_per_second"."""
    match = re.fullmatch(r"(.+?)_((?:[a-z]+_per_)?[a-z]+)", name)
    return (in_words(match[1]).lower(), match[2]) if match else (name, "")
