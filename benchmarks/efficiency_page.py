"""Writes the tables of docs/efficiency.md from results/advisor.json and results/scaling.json.

python benchmarks/efficiency_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfopt.atomic.files import write_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "efficiency.md"
RESULTS = ROOT / "benchmarks" / "results"


def page(text: str) -> str:
    """Returns the page with its tables as the results are now."""
    advisor, scaling = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("advisor", "scaling"))
    parts = {
        "published": published(advisor),
        "here": here(advisor),
        "shared_cores": shared_cores(scaling),
        "scaling": several(scaling),
        "ethernet": ethernet(scaling),
    }
    for name, part in parts.items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        text = re.sub(pattern, lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text, flags=re.DOTALL)
    return text


def published(results: dict[str, Any]) -> str:
    rows = [
        (
            run["model"],
            run["card"],
            run["precision"],
            run["batch"],
            f"{run['published_examples_per_s']:,g}",
            f"{run['estimated_examples_per_s']:,g}",
            f"{run['error']:+.0%}",
        )
        for run in results["published"]
    ]
    head = ("model", "GPU", "precision", "batch", "published examples/s", "estimated", "error")
    error = errors("The error", results["published_error"])
    return f"{table(head, rows, 4)}\n\n{error} Source: NVIDIA DeepLearningExamples."


def here(results: dict[str, Any]) -> str:
    rows = [
        (name, f"{cell['measured_ms']:.3g} ms", f"{cell['estimated_ms']:.3g} ms", f"{cell['error']:+.0%}")
        for name, cell in results["here"].items()
    ]
    text = table(("recipe", "measured", "estimated", "error"), rows, 3)
    device = results["device"]
    return f"{text}\n\n{errors(f'The error on {device}', results['here_error'])}"


def shared_cores(results: dict[str, Any]) -> str:
    rows = [
        (
            cell["model"],
            f"{cell['replicas']} {cell['how']}",
            f"{cell['one_device_ms']:.3g} ms",
            f"{cell['measured_ms']:.3g} ms",
            f"{cell['predicted_ms']:.3g} ms",
            f"{cell['error']:+.0%}",
        )
        for cell in results["here"]
    ]
    text = table(("model", "replicas", "one device", "measured", "predicted", "error"), rows, 4)
    return f"{text}\n\n{errors('The error', results['here_error'])}"


def several(results: dict[str, Any]) -> str:
    rows = [
        (
            run["model"],
            f"{run['gpus']} x {run['card']}",
            f"{run['published_examples_per_s']:,g}",
            f"{run['predicted_examples_per_s']:,g}",
            f"{run['published_efficiency']:.1%}",
            f"{run['predicted_efficiency']:.1%}",
            f"{run['error']:+.1%}" + (" (fitted)" if run["fitted"] else ""),
        )
        for run in results["published"]
    ]
    head = ("model", "GPUs", "published examples/s", "predicted", "published efficiency", "predicted", "error")
    text = table(head, rows, 5)
    fitted, other = errors("The error of the fitted rows", results["fitted_error"]), results["other_error"]
    return f"{text}\n\n{fitted} {errors('The error of the others', other)}"


def ethernet(results: dict[str, Any]) -> str:
    found = results["ethernet"]
    none, full = found["overlap_0%"], found["overlap_100%"]
    return (
        "Over Ethernet, Goyal et al. 2017 scale ResNet-50 from 8 to 256 P100 over 50 Gbit/s with an efficiency of\n"
        f"{found['published_efficiency']:.1%}. The model predicts {none['efficiency']:.1%} without overlap (error "
        f"{none['error']:+.1%}) and\n{full['efficiency']:.1%} with full overlap (error {full['error']:+.1%}). "
        "Their hours are rounded to whole hours."
    )


def errors(what: str, found: dict[str, float]) -> str:
    return f"{what} is {found['median']:.0%} (median) and {found['largest']:.0%} (largest)."


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], figures: int) -> str:
    rule = ["---"] * (len(head) - figures) + ["---:"] * figures
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
