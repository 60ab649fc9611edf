"""Writes the tables of docs/profiling.md from the rules and from the results of breakdown.py and diagnosis.py.

    python benchmarks/profiling_page.py

With `--check` it writes nothing, and fails if the page is not what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tfopt.diagnosis.rules import RULES

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "profiling.md", Path(__file__).parent / "results"


def rules() -> str:
    """Returns the table of the rules."""
    lines = ["| cause | threshold | remedy | source |", "| --- | --- | --- | --- |"]
    for rule in RULES:
        source = f"[{rule.source.split('/')[2]}]({rule.source})" if rule.source.startswith("http") else rule.source
        lines.append(f"| `{rule.cause}` | {rule.threshold} | {rule.remedy} | {source} |")
    return "\n".join(lines)


def breakdown(found: dict[str, Any]) -> str:
    """Returns the table of the six runs with known waits."""
    lines = [
        f"Six runs with known waits on {found['device']} (benchmarks/breakdown.py), in milliseconds per step:",
        "",
        "| run | known | step | input | host | compute | communication | sum / step |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in found["runs"].items():
        known = ", ".join(f"{part} {ms:g}" for part, ms in run["known_ms"].items()) or "nothing"
        parts = " | ".join(f"{ms:.2f}" for ms in run["parts"].values())
        lines.append(f"| {name} | {known} | {run['step_ms']:.2f} | {parts} | {run['sum_over_step']:.2f} |")
    return "\n".join(lines)


def diagnosis(found: dict[str, Any]) -> str:
    """Returns the table of the planted causes."""
    within = [run for run in found["planted"].values() if run.get("within") is not None]
    lines = [
        f"Sixteen runs with one planted cause each, and four without, on {found['device']} (benchmarks/diagnosis.py). The",
        f"planted cause is ranked first in {found['first']} of {len(found['planted'])} runs. Of the {len(found['healthy'])} "
        f"healthy runs, {found['healthy_without_a_planted_cause_first']} have no planted cause",
        f"first. The estimated gain is within 30% of the measured one in {sum(run['within'] for run in within)} of "
        f"{len(within)} runs; the others' causes do not show on a processor.",
        "",
        "| planted | first | estimated gain | measured gain |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, run in found["planted"].items():
        gain = run["gains"].get(name)
        estimated = "unknown" if gain is None else f"{gain:.0%}"
        measured = "not on a processor" if run["measured_gain"] is None else f"{run['measured_gain']:.0%}"
        lines.append(f"| {name} | {run['first']} | {estimated} | {measured} |")
    return "\n".join(lines)


def page() -> str:
    """Returns the page with its tables."""
    tables = {
        "rules": rules(),
        "breakdown": breakdown(json.loads((RESULTS / "breakdown.json").read_text())),
        "diagnosis": diagnosis(json.loads((RESULTS / "diagnosis.json").read_text())),
    }
    text = PAGE.read_text()
    for name, table in tables.items():
        text = re.sub(
            rf"<!-- {name} -->\n.*?(?=\n\n[A-Z#]|\Z)"
            if f"<!-- {name} -->\n\n|" not in text
            else rf"<!-- {name} -->.*?<!-- end -->",
            f"<!-- {name} -->\n\n{table}\n\n<!-- end -->",
            text,
            count=1,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if page() == PAGE.read_text() else "docs/profiling.md is not what profiling_page.py writes")
    PAGE.write_text(page())
