"""The tables of docs/reliability.md: how the faults of the campaign ended, and which guards it misses if removed."""

from __future__ import annotations

from page_tables import Table, read

OUTCOMES = ("equal bits", "clear word", "as it stands", "silent", "lost", "hang", "traceback", "crash")


def outcomes() -> Table:
    kinds = read("fault_campaign")["kinds"]
    counts = {kind: found["outcomes"] for kind, found in kinds.items()}
    rows = [
        [kind, f"{kinds[kind]['share']:g}", str(sum(found.values())), *(str(found.get(each, 0)) for each in OUTCOMES)]
        for kind, found in counts.items()
    ]
    total = [str(sum(found.get(each, 0) for found in counts.values())) for each in OUTCOMES]
    return [["kind", "share", "faults", *OUTCOMES], *rows, ["all", "", str(read("fault_campaign")["rows"]), *total]]


def removed_guards() -> Table:
    guards = read("planted_guards")["guards"]
    rows = [
        [each["guard"], each["part"], f"{each['found']} of {each['faults']}", ", ".join(each["as"])] for each in guards
    ]
    return [["guard", "part of the campaign", "faults that end badly", "as"], *rows]


TABLES = {"outcomes of faults": outcomes, "removed guards": removed_guards}
