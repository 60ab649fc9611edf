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
    """Returns the row of a recipe, whose student is its float32 artifact."""
    medians, taught, alone = record["median_scores"], record["scores"]["float32"], record["scores"]["alone"]
    teacher, student = (record["receipts"][artifact]["weight_count"] for artifact in ("teacher", "float32"))
    gains = [100 * (with_teacher - without) for with_teacher, without in zip(taught, alone, strict=True)]
    return {
        "score": record["score"],
        "share_of_parameters": student / teacher,
        "medians": {**medians, "taught": medians["float32"]},
        "gain": {name: of(gains) for name, of in (("median", statistics.median), ("least", min), ("most", max))},
        "seeds": len(gains),
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
