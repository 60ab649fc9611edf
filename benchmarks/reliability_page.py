"""The table of docs/reliability.md: how the faults of the campaign ended."""

from __future__ import annotations

from page_tables import Table, read

OUTCOMES = ("equal bits", "clear word", "as it stands", "silent", "lost", "hang", "traceback", "crash")


def outcomes() -> Table:
    kinds = read("fault_campaign")["kinds"]
    rows = [
        [kind, str(sum(found.values())), *(str(found.get(each, 0)) for each in OUTCOMES)]
        for kind, found in kinds.items()
    ]
    total = [str(sum(found.get(each, 0) for found in kinds.values())) for each in OUTCOMES]
    return [["kind", "faults", *OUTCOMES], *rows, ["all", str(read("fault_campaign")["rows"]), *total]]


TABLES = {"outcomes of faults": outcomes}
