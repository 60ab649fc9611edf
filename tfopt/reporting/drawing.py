"""What all figures share: axes, lines, colours and SVG.

Only lines, bars and ticks are drawn. The page writes titles and legends, which it escapes, wraps and sets in its own
font. Text stays text. Lines are drawn in placeholder colours, which CSS variables of the page replace, so that its
light and dark themes also apply to the figures.

The `Figure` class is used without pyplot, so that no backend is chosen and no figure stays in memory.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE, ALARM = "#101112", "#606162", "#d0d1d2", "#a0a1a2"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", ALARM: "var(--alarm)"}
# Eight colours, because a machine usually has at most eight GPUs. All are readable on white and on black.
SERIES = ("#3b7dd8", "#d2691e", "#2e9367", "#a05fc0", "#c24b6a", "#8a7a2f", "#2b95a8", "#7a7f87")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot: its label in the legend, its colour, a summary figure, and its values, NaN if unknown."""

    label: str
    colour: str
    note: str
    values: Sequence[float]
    is_block: bool = False  # in the legend, a square instead of a stroke


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure. A screen reader reads `summary`; `svg` is markup that is safe inside a page."""

    title: str
    summary: str
    legend: Sequence[Line] = ()
    svg: str


def bar_axes(names: Iterable[str]) -> tuple[Figure, Axes]:
    names = list(names)
    figure, axes = make_axes("", height=0.1 + 0.36 * len(names))
    axes.set_yticks(range(len(names)), labels=map(short_name, names), color=INK, fontsize=10, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return figure, axes


def make_axes(xlabel: str, height: float = 2.7) -> tuple[Figure, Axes]:
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


def draw_line(axes: Axes, x: Sequence[float], line: Line) -> None:
    """Draws a line that breaks at NaN. A single value, or a value between two gaps, is drawn as a dot."""
    padded = [math.nan, *line.values, math.nan]
    lone = [
        index
        for index, (before, value, after) in enumerate(zip(padded, line.values, padded[2:], strict=False))
        if math.isfinite(value) and not math.isfinite(before) and not math.isfinite(after)
    ]
    axes.plot(x, line.values, color=line.colour, linewidth=1.7)
    axes.plot([x[i] for i in lone], [line.values[i] for i in lone], "o", color=line.colour, markersize=3.5)


def to_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Only rcParams can keep text as text. The context restores them.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tfopt"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    markup = buffer.getvalue()
    markup = markup[markup.index("<svg") :]  # HTML must not contain an XML declaration or a DTD
    markup = re.sub(r' xmlns(:\w+)?="[^"]*"', "", markup)
    return re.sub("|".join(THEME), lambda match: THEME[match[0]], markup)


def with_unique_ids(prefix: str, plots: Sequence[Plot]) -> list[Plot]:
    """Adds a prefix to the ids in each SVG and to their references, because ids must be unique on a page."""
    return [
        replace(plot, svg=re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-{index}-", plot.svg))
        for index, plot in enumerate(plots)
    ]


def known_values(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def short_name(name: str) -> str:
    """Returns a name that is short enough for the drawing. The tables show the full name."""
    return name if len(name) <= 20 else f"{name[:19]}…"


def in_words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Value"


def in_pairs(names: Iterable[str], texts: Iterable[str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
