"""The measured table of compression: what a search reaches, against each of its stages alone."""

from __future__ import annotations

from typing import Any

from page_tables import Table, read

SIDES = {
    "float32": "SavedModel of tfopt, float32",
    "int8": "int8 alone",
    "prune": "pruned alone, float32",
    "shrink": "shrunk alone, float32",
}


def compared() -> Table:
    rows = [["model", "artifact", "score", "size", "smaller", "ms at batch 8", "faster", "front ahead"]]
    for name, found in read("compression").items():
        rows.append([f"`{name}`", "Keras' export", *_figures(found["keras"]), ""])
        for kind, title in SIDES.items():
            if kind in found["alone"]:
                each = found["alone"][kind]
                ahead = each["points_ahead"]
                rows.append(["", title, *_figures(each), "none" if ahead is None else f"{ahead:+.2f}"])
        if found["best"]:
            rows.append(["", "**compressed, best**", *_figures(found["best"]), ""])
    return rows


def _figures(each: dict[str, Any]) -> list[str]:
    size = f"{each['bytes'] / 1e3:,.0f} kB"
    ms = f"{each['latency_ms']:.2f}"
    return [f"{each['score']:.2%}", size, f"{each['smaller']:.1f}x", ms, f"{each['faster']:.1f}x"]


TABLES = {"compressed models": compared}
