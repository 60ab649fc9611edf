"""The measured table of distillation: what each student gained from its teacher."""

from __future__ import annotations

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


def gains() -> Table:
    rows = read("distillation")["rows"]
    head = ["student", "parameters of the teacher's", "teacher", "student alone", "with the teacher"]
    head += ["gain, median", "gain, least and most", "seeds", "processor"]
    return [head, *(_row(title, rows[name]) for name, title in TITLES.items() if name in rows)]


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
