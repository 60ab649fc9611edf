"""The figures of the HTML report, drawn by matplotlib as inline SVG.

Only lines, bars and ticks are drawn. The page writes titles and legends, which it escapes, wraps and sets in its own
font. Text stays text. Lines are drawn in placeholder colours, which CSS variables of the page replace, so that its
light and dark themes also apply to the figures.

The `Figure` class is used without pyplot, so that no backend is chosen and no figure stays in memory.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from tfopt.report import Phase, Receipt, Utilization, score_names
from tfopt.score_text import SCORE_LABELS, is_share, score_label, show_score

INK, MUTED, RULE = "#101112", "#606162", "#d0d1d2"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)"}
# A difference that is a smaller share of the length cannot be seen in bars that start at 0.
VISIBLE_SHARE = 0.05
# If the ratio of the largest to the smallest loss is higher, the axis is logarithmic: one and a half decades.
LOGARITHMIC_FROM = 10**1.5
# Eight colours, because a machine usually has at most eight GPUs. All are readable on white and on black.
SERIES = ("#3b7dd8", "#d2691e", "#2e9367", "#a05fc0", "#c24b6a", "#8a7a2f", "#2b95a8", "#7a7f87")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot: its label in the legend, its colour, a summary figure, and its values, NaN if unknown."""

    label: str
    colour: str
    note: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure. A screen reader reads `summary`; `svg` is markup that is safe inside a page."""

    title: str
    summary: str
    legend: Sequence[Line] = ()
    svg: str


def curves(phases: Sequence[Phase]) -> list[Plot]:
    """Draws one plot per metric, with training and validation together and all phases on one axis of epochs.

    A metric is drawn only for the phases that recorded it, for example sparsity from the phase that prunes.
    """
    names = {name.removeprefix("val_") for phase in phases for name in phase.history}
    # The loss and the scores of tasks come first, then other metrics such as sparsity.
    metrics = sorted(names, key=lambda name: (name != "loss", name not in SCORE_LABELS, name))
    plots = (_curve(metric, phases) for metric in metrics)
    return _with_unique_ids("curve", [plot for plot in plots if plot.legend])


def utilization(record: Utilization) -> list[Plot]:
    """Draws one plot per unit, so that the series on one axis can be compared."""
    by_unit: dict[str, dict[str, Sequence[float | None]]] = {}
    for name, values in record.series.items():
        label, unit = _split_unit(name)
        by_unit.setdefault(unit, {})[label] = values
    plots = [_usage(unit, series, record.seconds) for unit, series in by_unit.items()]
    return _with_unique_ids("usage", plots)


def bars(receipts: Mapping[str, Receipt]) -> list[Plot]:
    """Draws scores, size, gzip size and latency as bars, one per artifact.

    Shares, such as accuracies, that are too close for bars from 0 are drawn as differences to the first, in points.
    """
    figures: dict[str, tuple[Callable[[Receipt], float | None], Callable[[float], str]]] = {
        "Size on disk": (lambda receipt: receipt.bytes_on_disk, show_bytes),
        "Size as .tar.gz": (lambda receipt: receipt.gzip_bytes, show_bytes),
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
    return _with_unique_ids("bar", plots)


def show_bytes(count: float) -> str:
    """Returns a size in the largest decimal unit in which it is at least 1.

    Example:
        >>> show_bytes(250_412)
        '250 kB'
    """
    return EngFormatter(unit="B", places=0 if count < 1e6 else 1)(count)


def _curve(metric: str, phases: Sequence[Phase]) -> Plot:
    series = (metric, f"val_{metric}")
    recorded = [any(_known(phase.history.get(name, ())) for name in series) for phase in phases]
    first = recorded.index(True) if any(recorded) else 0
    named, start, phases = len(phases) > 1, sum(map(_epochs, phases[:first])), phases[first:]
    legend = []
    for name, label, colour in zip(series, ("training", "validation"), SERIES, strict=False):
        values = [value for phase in phases for value in _padded(phase, name)]
        known = _known(values)
        if known:
            legend.append(Line(label=label, colour=colour, note=f"{known[-1]:.4g}", values=values))

    figure, axes = _axes("epoch")
    epochs = sum(map(_epochs, phases))
    axes.set_xlim(start + 0.5, start + epochs + 0.5)  # a later phase may not have recorded this metric
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for line in legend:
        _draw_line(axes, range(start + 1, start + epochs + 1), line)
    title = score_label(metric) if metric in SCORE_LABELS else _words(metric)
    if "loss" in metric and _spans_decades(legend):
        _set_logarithmic(axes)
        title = f"{title}, logarithmic"
    if named:
        _mark_phases(axes, phases, start)
    ends = [f"{line.label} from {_known(line.values)[0]:.4g} to {line.note}" for line in legend]
    where = f"epochs {start + 1} to {start + epochs}" if start else f"{epochs} epochs"
    return Plot(title=title, summary=f"{title} over {where}: {', '.join(ends)}", legend=legend, svg=_svg(figure))


def _spans_decades(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in _known(line.values)]
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOGARITHMIC_FROM


def _set_logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)


def _mark_phases(axes: Axes, phases: Sequence[Phase], epochs_before: int) -> None:
    start = epochs_before + 0.5  # epochs count from 1; a boundary is half-way between two epochs
    for phase in phases:
        end = start + _epochs(phase)
        axes.text(
            (start + end) / 2,
            1.02,
            _short(phase.name),
            transform=axes.get_xaxis_transform(),
            ha="center",
            color=MUTED,
            fontsize=9,
            parse_math=False,
        )
        if phase is not phases[-1]:
            axes.axvline(end, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), gid="phase-boundary")
        start = end


def _usage(unit: str, series: Mapping[str, Sequence[float | None]], seconds: Sequence[float]) -> Plot:
    show = EngFormatter(unit="B", sep=" ", places=1) if unit == "bytes" else "{:.3g}".format
    figure, axes = _axes("seconds")
    legend = []
    for index, (label, samples) in enumerate(series.items()):
        values = [math.nan if value is None else value for value in samples]
        known = _known(values)
        note = f"mean {show(sum(known) / len(known))}" if known else "unavailable (no sample could be read)"
        line = Line(label=label, colour=SERIES[index % len(SERIES)], note=note, values=values)
        _draw_line(axes, seconds, line)
        legend.append(line)
    axes.set_xlim(0, max(seconds, default=0) or 1)
    axes.set_ylim(bottom=0)
    if unit == "bytes":
        axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    title = _words(unit)
    means = ", ".join(f"{line.label} {line.note}" for line in legend)
    return Plot(title=title, summary=f"{title} over time: {means}", legend=legend, svg=_svg(figure))


def _bar(title: str, values: Mapping[str, float | None], show: Callable[[float], str]) -> Plot:
    texts = ["unavailable" if value is None else show(value) for value in values.values()]
    lengths = [value or 0.0 for value in values.values()]
    figure, axes = _bar_axes(values)
    axes.set_xlim(0, 1.35 * (max(lengths) or 1))  # room for the longest label
    colours = [MUTED, *[SERIES[0]] * (len(values) - 1)]  # the others are compared with the first
    drawn = axes.barh(range(len(values)), lengths, height=0.5, color=colours)
    axes.bar_label(drawn, texts, padding=5, color=INK, fontsize=10)
    return Plot(title=title, summary=f"{title}: {_pairs(values, texts)}", svg=_svg(figure))


def _difference_bar(title: str, values: Mapping[str, float | None], show: Callable[[float], str]) -> Plot:
    """Draws the difference of each value to the first, in points. All values must be known."""
    first, *others = (value or 0.0 for value in values.values())
    points = [100 * (value - first) for value in others]
    texts = [show(first), *(f"{change:+.2f} points" for change in points)]
    figure, axes = _bar_axes(values)
    furthest = max(map(abs, points)) or 1.0
    lowest, highest = min(0.0, *points), max(0.0, *points)
    axes.set_xlim(lowest - 0.08 * furthest, highest + 0.9 * furthest)  # room for the labels, on the right of all bars
    axes.barh(range(1, len(values)), points, height=0.5, color=SERIES[0])
    axes.axvline(0, color=MUTED, linewidth=1)
    for row, text in enumerate(texts):
        end = highest if row == 0 else max(0.0, points[row - 1])
        axes.annotate(text, (end if row else 0.0, row), (5, 0), textcoords="offset points", va="center", color=INK)
    title = f"{title}, difference to {next(iter(values))}"
    return Plot(title=title, summary=f"{title}: {_pairs(values, texts)}", svg=_svg(figure))


def _too_close(values: Mapping[str, float | None]) -> bool:
    """Returns whether there are several values, all are known, and bars from 0 would look equally long."""
    known = [value for value in values.values() if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return False
    return max(known) - min(known) < VISIBLE_SHARE * max(known)


def _bar_axes(names: Iterable[str]) -> tuple[Figure, Axes]:
    names = list(names)
    figure, axes = _axes("", height=0.1 + 0.36 * len(names))
    axes.set_yticks(range(len(names)), labels=map(_short, names), color=INK, fontsize=10, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return figure, axes


def _pairs(names: Iterable[str], texts: Iterable[str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _axes(xlabel: str, height: float = 2.7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.8, height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    axes.set_xlabel(xlabel, color=MUTED, fontsize=9)
    return figure, axes


def _draw_line(axes: Axes, x: Sequence[float], line: Line) -> None:
    """Draws a line that breaks at NaN. A single value, or a value between two gaps, is drawn as a dot."""
    padded = [math.nan, *line.values, math.nan]
    lone = [
        index
        for index, (before, value, after) in enumerate(zip(padded, line.values, padded[2:], strict=False))
        if math.isfinite(value) and not math.isfinite(before) and not math.isfinite(after)
    ]
    axes.plot(x, line.values, color=line.colour, linewidth=1.7)
    axes.plot([x[i] for i in lone], [line.values[i] for i in lone], "o", color=line.colour, markersize=3.5)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Only rcParams can keep text as text. The context restores them.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tfopt"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    markup = buffer.getvalue()
    markup = markup[markup.index("<svg") :]  # HTML must not contain an XML declaration or a DTD
    markup = re.sub(r' xmlns(:\w+)?="[^"]*"', "", markup)
    return re.sub("|".join(THEME), lambda match: THEME[match[0]], markup)


def _with_unique_ids(prefix: str, plots: Sequence[Plot]) -> list[Plot]:
    """Adds a prefix to the ids in each SVG and to their references, because ids must be unique on a page."""
    return [
        replace(plot, svg=re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-{index}-", plot.svg))
        for index, plot in enumerate(plots)
    ]


def _epochs(phase: Phase) -> int:
    return max((len(values) for values in phase.history.values()), default=0)


def _padded(phase: Phase, name: str) -> list[float]:
    values = [value if math.isfinite(value) else math.nan for value in phase.history.get(name, ())]
    return values + [math.nan] * (_epochs(phase) - len(values))


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _split_unit(name: str) -> tuple[str, str]:
    """Splits a figure's name: "pcie_bytes_per_second" is "pcie" in "bytes_per_second"."""
    match = re.fullmatch(r"(.+?)_((?:[a-z]+_per_)?[a-z]+)", name)
    return (_words(match[1]).lower(), match[2]) if match else (name, "")


def _short(name: str) -> str:
    """Returns a name that is short enough for the drawing. The tables show the full name."""
    return name if len(name) <= 20 else f"{name[:19]}…"


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Value"
