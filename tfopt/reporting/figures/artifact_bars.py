"""The artifacts of a run as bars: scores, sizes and latency."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from matplotlib.ticker import EngFormatter

from tfopt.report import Receipt, score_names
from tfopt.report.formatting import is_share, score_label, show_score
from tfopt.reporting.figures.drawing import INK, MUTED, SERIES, Plot, bar_axes, in_pairs, to_svg, with_unique_ids

# A difference that is a smaller share of the length cannot be seen in bars that start at 0.
VISIBLE_SHARE = 0.05


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
    return with_unique_ids("bar", plots)


def show_bytes(count: float) -> str:
    """Returns a size in the largest decimal unit in which it is at least 1.

    Example:
        >>> show_bytes(250_412)
        '250 kB'
    """
    return EngFormatter(unit="B", places=0 if count < 1e6 else 1)(count)


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
