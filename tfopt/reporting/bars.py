"""Bars: the scores, sizes and latency of the artifacts of a run, and the time of a step, one below another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import accumulate

from tfopt.report import Receipt, StepBreakdown, score_names
from tfopt.report.formatting import is_share, score_label, short_bytes, show_score
from tfopt.reporting.drawing import INK, MUTED, SERIES, Line, Plot, bar_axes, in_pairs, to_svg, with_unique_ids

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
