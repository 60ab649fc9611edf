"""The measured tables of recipes: what each reached, and what plain methods reach on the same text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from page_tables import Table, read
from rich.console import Console

import tfopt
from tfopt.report.formatting import score_label, show_score
from tfopt.reporting.receipts import ReceiptsTable


def recipes() -> Table:
    """What each recipe reached."""
    head = ["recipe", "score", "float32", "pruned or shrunk", "int8", "zeros", "int8 size"]
    head += ["float32 speed", "int8 speed", "int8 against float32", "time"]
    return [head, *(row(name, read(name)) for name in tfopt.recipes.RECIPES)]


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


def baselines() -> Table:
    """The shares of right answers on the test files of all splits together."""
    splits = read("text_baselines")["splits"]
    counts = {"pieces": "test_pieces", "files, votes of pieces": "test_files", "files, whole": "test_files"}
    totals = {what: sum(split[key] for split in splits) for what, key in counts.items()}
    pieces, files, _ = totals.values()
    rows = [["", f"{pieces:,} pieces", f"{files} files, by votes", f"{files} whole files"]]
    titles = {"tf_idf": "TF-IDF", "float32": "`text_encoder`, float32", "int8": "`text_encoder`, int8"}
    for method, title in titles.items():
        cells = []
        for what, key in counts.items():
            right = sum(split[method].get(what, 0) * split[key] for split in splits)
            cells.append(f"{right / totals[what]:.1%}" if what in splits[0][method] else "")
        rows.append([title, *cells])
    return rows


def demo() -> str:
    """What `make demo` prints at its end."""
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(
            ReceiptsTable({name: tfopt.Receipt(**each) for name, each in read("digits_cnn")["receipts"].items()})
        )
    return "\n".join(["```text", *(line.rstrip() for line in capture.get().splitlines()), "```"])


TABLES = {"the demo": demo, "recipes": recipes, "text baselines": baselines}
