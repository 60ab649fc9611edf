"""The tables of docs/gpu.md: what is known of the recipes' full forms on a card, and of the cards, without one."""

from __future__ import annotations

from page_tables import Table, read

from tfopt.report import Audit
from tfopt.report.formatting import memory_size

WORDS = {"native": "machine code", "ptx": "PTX, compiled at the first start", "none": "none", None: "unknown"}


def recipes() -> Table:
    rows = []
    for name, values in read("gpu_audit")["recipes"].items():
        found = Audit.from_dict(values)
        host = ", ".join(f"{each.count} {each.kind}" for each in found.on_host)
        share = found.tensor_core_share
        rows.append(
            [
                f"`{name}`",
                found.precision,
                f"{found.batch_size:,}",
                f"{found.operations:,}",
                host or "none",
                "lowered" if found.lowers else "off" if found.lowers is None else "refused",
                memory_size(found.memory_bytes or 0),
                "" if share is None else f"{share:.1%}",
            ]
        )
    head = ["recipe", "precision", "examples", "operations", "on the host", "XLA", "memory", "tensor cores"]
    return [head, *rows]


def cards() -> Table:
    rows = [[name, WORDS[code["kind"]]] for name, code in read("gpu_audit")["machine_code"].items()]
    return [["GPU", "this TensorFlow has"], *rows]


TABLES = {"audits": recipes, "machine code": cards}
