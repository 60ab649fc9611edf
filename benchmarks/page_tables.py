"""Measured tables in README and docs: each stands between two comments, and is written from the recorded results."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Table = list[list[str]]
Part = Callable[[], Table | str]  # a string is prose with figures


@functools.cache
def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def processor(device: str) -> str:
    """Returns the kind of the processor in a device's name, with its instructions if the name has them."""
    kind = next((kind for kind in ("AMD EPYC", "Intel Xeon") if kind.split()[1] in device), None)
    instructions = re.search(r" with \w+", device)
    return device if kind is None else kind + (instructions[0] if instructions else "")


def measured_on(found: Mapping[str, Any]) -> str:
    """Returns the kind of the processor of a measurement, and the newest of its instructions."""
    kind = processor(found["device"])
    return kind if " with " in kind else f"{kind} with {found['cpu_features'][-1].upper()}"


def in_a_name(device: str) -> str:
    """Returns a device's name as it stands in the name of a results file."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def filled(text: str, parts: Mapping[str, Part]) -> str:
    """Returns a page with what stands between `<!-- table of NAME ... -->` and `<!-- end of table -->` as recorded."""

    def part(match: re.Match[str]) -> str:
        if match["name"] not in parts:
            return match[0]
        found = parts[match["name"]]()
        shown = found if isinstance(found, str) else markdown(found)
        return f"{match['begin']}\n{shown}\n\n{match['end']}"

    pattern = r"(?P<begin><!-- table of (?P<name>[^,>]+?)(?:,[^>]*)? -->\n).*?(?P<end><!-- end of table -->)"
    return re.sub(pattern, part, text, flags=re.DOTALL)


def markdown(table: Table) -> str:
    """Returns a table whose columns of figures are aligned to the right."""
    head, *rows = table
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    words = [any(cell and not re.match(r"[-+\d]", cell) for cell in column) for column in columns]
    words[0] = True
    rule = ["---" if is_words else "---:" for is_words in words]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
