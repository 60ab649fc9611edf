"""The measured table of distillation: what each student gained from its teacher."""

from __future__ import annotations

import statistics
from typing import Any

from page_tables import Table, processor, read

TITLES = {
    "small": "digits, small CNN",
    "tiny": "digits, tiny CNN",
    "few labels": "digits, 100 labels",
    "healed": "`resnet_cifar`, a quarter of its multiply-adds",
    "text": "standard library, packages of its files",
    "gpt": "standard library, byte by byte",
}
RECIPES = ("resnet_distilled", "vit_distilled")


def gains() -> Table:
    rows = read("distillation")["rows"]
    head = ["student", "parameters of the teacher's", "teacher", "student alone", "with the teacher"]
    head += ["gain, median", "gain, least and most", "seeds", "processor"]
    measured = [_row(title, rows[name]) for name, title in TITLES.items() if name in rows]
    return [head, *measured, *(_row(f"recipe `{name}`", _of_recipe(read(name))) for name in RECIPES)]


def _of_recipe(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a recipe, whose student is its float32 artifact, for the seeds that trained it alone too."""
    artifacts = {"teacher": "teacher", "alone": "alone", "taught": "float32"}
    seeds = len(record["scores"]["alone"])
    scores = {kind: record["scores"][artifact][:seeds] for kind, artifact in artifacts.items()}
    gains = [100 * (taught - alone) for taught, alone in zip(scores["taught"], scores["alone"], strict=True)]
    teacher, student = (record["receipts"][artifact]["weight_count"] for artifact in ("teacher", "float32"))
    return {
        "score": record["score"],
        "share_of_parameters": student / teacher,
        "medians": {kind: statistics.median(each) for kind, each in scores.items()},
        "gain": {name: of(gains) for name, of in (("median", statistics.median), ("least", min), ("most", max))},
        "seeds": seeds,
        "device": record["environment"]["processor"],
    }


def _row(title: str, row: dict[str, Any]) -> list[str]:
    in_points = row["score"] == "accuracy"
    scores = [f"{row['medians'][kind]:{'.2%' if in_points else '.3f'}}" for kind in ("teacher", "alone", "taught")]
    median, least, most = (
        f"{row['gain'][kind]:{'.2f' if in_points else '.3f'}}" for kind in ("median", "least", "most")
    )
    unit = "points" if in_points else "bits per byte"
    gain = [f"{median} {unit}", f"{least}, {most}"]
    return [title, f"{row['share_of_parameters']:.1%}", *scores, *gain, str(row["seeds"]), processor(row["device"])]


TABLES = {"gains of distillation": gains}
