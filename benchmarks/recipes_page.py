"""Writes the table of docs/recipes.md from the results of recipes.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import tfopt
from tfopt.atomic.files import write_text
from tfopt.report.formatting import score_label, show_score

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "recipes.md"
SECTION = re.compile(r"(<!-- table of recipes[^>]*-->\n).*?(<!-- end of table -->)", re.DOTALL)


def write_page() -> None:
    write_text(PAGE, page(PAGE.read_text(encoding="utf-8")))


def page(text: str) -> str:
    """Returns docs/recipes.md with the table of the recorded results."""
    rows = [row(name, json.loads((RESULTS / f"{name}.json").read_text())) for name in tfopt.recipes.RECIPES]
    head = ["recipe", "score", "float32", "pruned or shrunk", "int8", "zeros", "int8 size"]
    head += ["float32 speed", "int8 speed", "int8 against float32", "time"]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return SECTION.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)


def row(name: str, record: dict[str, Any]) -> list[str]:
    receipts, score = record["receipts"], record["score"]
    seeds = len(next(iter(record["scores"].values())))
    label = score_label(score).lower() + (f", median of {seeds}" if seeds > 1 else "")
    shown = {artifact: show_score(score, value) for artifact, value in record["median_scores"].items()}
    pruned, int8 = receipts.get("pruned"), receipts.get("int8")
    zeros = f"{pruned['zero_count'] / pruned['weight_count']:.0%}" if pruned else ""
    smaller = f"{record['share_of_keras_bytes']['int8']}x" if int8 else ""
    return [
        f"`{name}`",
        label,
        shown["float32"],
        shown.get("pruned", shown.get("shrunk", "")),
        shown.get("int8", ""),
        zeros,
        smaller,
        *(speeds(record["faster_than_keras"], artifact) for artifact in ("float32", "int8")),
        verdicts(record) if int8 else "",
        f"{record['seconds']:.0f} s",
    ]


def speeds(ratios: dict[str, dict[str, float]], artifact: str) -> str:
    """Returns how many times as fast as Keras' export an artifact is, for each batch size."""
    return " / ".join(f"{ratio[artifact]}x" for ratio in ratios.values() if artifact in ratio)


def verdicts(record: dict[str, Any]) -> str:
    """Returns the speed of int8 against float32 for each batch size, in words where it is within the noise."""
    receipt = tfopt.Receipt(**record["receipts"]["int8"])
    timed = [replace(receipt, **each) for each in record["int8_against_float32"].values()]
    return " / ".join(each.verdict if each.verdict == "about even" else f"{each.speedup:.2f}x" for each in timed)


if __name__ == "__main__":
    write_page()
