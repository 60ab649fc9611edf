"""Draws curves of sensitivity: the most sensitive layers in colour, all others in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfopt.report.formatting import is_share, score_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Readable on white, also for readers who see few colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#b5b8bc"


def draw(
    score: str,
    baseline: float,
    shares: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
) -> Figure:
    """Returns a figure with one line per layer. Without pyplot, so that no window opens and no backend is chosen."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    coloured = sorted(losses, key=lambda name: -sum(losses[name]))[: len(COLOURS)]
    others = [name for name in curves if name not in coloured]
    for number, name in enumerate(others):
        label = f"{len(others)} other{'s' if len(others) > 1 else ''}" if number == 0 else None
        axes.plot((0, *shares), (baseline, *curves[name]), color=GREY, linewidth=1, label=label, zorder=1)
    for name, colour in zip(coloured, COLOURS, strict=False):
        axes.plot(
            (0, *shares), (baseline, *curves[name]), color=colour, linewidth=2, marker="o", markersize=4, label=name
        )
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    if is_share(score):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("Pruned share of this layer alone")
    axes.set_ylabel(score_label(score))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    lines, labels = axes.get_legend_handles_labels()
    last = slice(bool(others), None)  # the others were drawn first, below
    lines, labels = [*lines[last], *lines[: last.start]], [*labels[last], *labels[: last.start]]
    axes.legend(lines, labels, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="Most sensitive first")
    return figure
