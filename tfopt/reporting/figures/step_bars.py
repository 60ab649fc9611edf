"""The time of a step as one stacked bar: input, host, compute, communication. Several steps stand one below another."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from tfopt.report import StepBreakdown
from tfopt.reporting.figures.drawing import INK, SERIES, Line, Plot, bar_axes, to_svg, with_unique_ids

# Waiting is drawn in warm colours, work in cool ones.
COLOURS = {"input": SERIES[1], "host": SERIES[5], "compute": SERIES[0], "communication": SERIES[3]}


def step_stack(breakdowns: Mapping[str, StepBreakdown]) -> list[Plot]:
    """Draws a bar for each step by its name. The list is empty if there is none, so that it fits a gallery.

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
