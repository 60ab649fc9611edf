"""The stored costs of models and recipes: costs.json, which benchmarks/costs.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tfopt.number_text import short_bytes, short_count


def stored_costs() -> dict[str, Any]:
    """Returns the stored costs: "models" and "recipes" by name, the settings "memory_of", and "memory_error".

    Example:
        >>> stored_costs()["models"]["lenet5"]["parameters"]
        61706
    """
    return dict(json.loads(files("tfopt.cli.lists").joinpath("costs.json").read_text(encoding="utf-8")))


COLUMNS = ("task", "parameters", "multiply-adds", "to train")


def cost_texts(costs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a head and one line for each cost, with the figures below each other.

    Example:
        >>> cost = {"task": "any", "parameters": 10, "multiply_adds": 8, "memory_bytes": 2000}
        >>> for line in cost_texts({"small": cost}):
        ...     print(line)
        task  parameters  multiply-adds  to train
        any           10              8   2.00 kB
    """
    cells = [COLUMNS] + [
        (
            str(cost["task"]),
            short_count(cost["parameters"]),
            short_count(cost["multiply_adds"]),
            short_bytes(cost["memory_bytes"]),
        )
        for cost in costs.values()
    ]
    widths = [max(len(row[place]) for row in cells) for place in range(len(COLUMNS))]
    lines = []
    for task, *figures in cells:
        right = (figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True))
        lines.append("  ".join([task.ljust(widths[0]), *right]))
    return lines


def memory_note(costs: Mapping[str, Any]) -> str:
    """Returns how far the estimated memory is from measured peaks.

    Example:
        >>> memory_note({"memory_error": {"median": 0.08, "largest": 0.23}})
        'Training memory is estimated: against measured peaks the error is 8% (median), 23% (largest).'
    """
    error = costs["memory_error"]
    return (
        "Training memory is estimated: against measured peaks the error is "
        f"{error['median']:.0%} (median), {error['largest']:.0%} (largest)."
    )
