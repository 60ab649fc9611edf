"""Writes the tables of docs/profiling.md from the rules, and from the results of breakdown.py and diagnosis.py.

python benchmarks/profiling_page.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tfopt.atomic.files import write_text
from tfopt.diagnosis.rules.table import RULES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "profiling.md"

Table = list[list[str]]


def write_page() -> None:
    write_text(PAGE, page(PAGE.read_text(encoding="utf-8")))


def page(text: str) -> str:
    """Returns docs/profiling.md with its tables."""
    for name, table in TABLES.items():
        section = re.compile(rf"(<!-- table of {name}[^>]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
        head, *rows = table()
        lines = [head, ["---"] * len(head), *rows]
        shown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        text = section.sub(lambda match, shown=shown: f"{match[1]}\n{shown}\n\n{match[2]}", text)  # type: ignore[misc]
    return text


def rules() -> Table:
    """Every rule of the diagnosis."""
    rows = []
    for rule in RULES:
        is_page = rule.source.startswith("http")
        source = f"[{rule.source.split('/')[2]}]({rule.source})" if is_page else rule.source
        rows.append([f"`{rule.cause}`", rule.threshold, rule.remedy, source])
    return [["cause", "threshold", "remedy", "source"], *rows]


def breakdown() -> Table:
    """The six runs with known waits, in milliseconds per step."""
    rows = []
    for name, run in read("breakdown")["runs"].items():
        known = ", ".join(f"{part} {ms:g}" for part, ms in run["known_ms"].items()) or "nothing"
        parts = [f"{ms:.2f}" for ms in run["parts"].values()]
        rows.append([name.replace("_", " "), known, f"{run['step_ms']:.2f}", *parts, f"{run['sum_over_step']:.2f}"])
    return [["run", "known", "step", "input", "host", "compute", "communication", "sum / step"], *rows]


def diagnosis() -> Table:
    """The planted causes: which cause is first, and the gain against the measured one."""
    rows = []
    for name, run in read("diagnosis")["planted"].items():
        gain, measured = run["gains"].get(name), run["measured_gain"]
        shown = "not on a processor" if measured is None else f"{measured:.0%}"
        rows.append([f"`{name}`", f"`{run['first']}`", "unknown" if gain is None else f"{gain:.0%}", shown])
    for name, run in read("diagnosis")["healthy"].items():
        rows.append([name.replace("_", " "), f"`{run['first']}`", "", ""])
    return [["planted", "ranked first", "estimated gain", "measured gain"], *rows]


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


TABLES = {"rules": rules, "known waits": breakdown, "planted causes": diagnosis}

if __name__ == "__main__":
    write_page()
