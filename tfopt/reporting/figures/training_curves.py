"""Training curves: one plot per metric, over the epochs of all phases."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from tfopt.report import Phase
from tfopt.report.formatting import SCORE_LABELS, score_label
from tfopt.reporting.figures.drawing import (
    MUTED,
    SERIES,
    Line,
    Plot,
    draw_line,
    in_words,
    known_values,
    make_axes,
    short_name,
    to_svg,
    with_unique_ids,
)

# If the ratio of the largest to the smallest loss is higher, the axis is logarithmic: one and a half decades.
LOGARITHMIC_FROM = 10**1.5


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
        values = [value for phase in phases for value in _padded(phase, name)]
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
    if "loss" in metric and _spans_decades(legend):
        _set_logarithmic(axes)
        title = f"{title}, logarithmic"
    if named:
        _mark_phases(axes, phases, start)
    ends = [f"{line.label} from {known_values(line.values)[0]:.4g} to {line.note}" for line in legend]
    where = f"epochs {start + 1} to {start + epochs}" if start else f"{epochs} epochs"
    return Plot(title=title, summary=f"{title} over {where}: {', '.join(ends)}", legend=legend, svg=to_svg(figure))


def _spans_decades(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in known_values(line.values)]
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


def _padded(phase: Phase, name: str) -> list[float]:
    values = [value if math.isfinite(value) else math.nan for value in phase.history.get(name, ())]
    return values + [math.nan] * (_epochs(phase) - len(values))
