"""The stored costs of models and recipes: costs.json, which benchmarks/costs.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tfopt.report.formatting import short_bytes, short_count
from tfopt.report.sheet import Table


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
    rows = [
        (
            str(cost["task"]),
            short_count(cost["parameters"]),
            short_count(cost["multiply_adds"]),
            short_bytes(cost["memory_bytes"]),
        )
        for cost in costs.values()
    ]
    return str(Table(head=COLUMNS, rows=rows, figures=range(1, len(COLUMNS)))).splitlines()


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
