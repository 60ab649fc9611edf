"""What the campaign found, as results/fault_campaign.json holds it: a run of one kind replaces that kind alone.

A run of a part of a kind replaces the outcomes of its faults, by kind, part and how. The share of the drawn faults is
recorded per kind, so a part can be tried again only with the share of the rest.
"""

from __future__ import annotations

import collections
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaign.fault import Row
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

Content = dict[str, Any]


def content_of(rows: Sequence[Row], shares: Mapping[str, float]) -> Content:
    """Returns the outcomes of a run as a file of results holds them."""
    device = detect().processor
    kinds = {kind: {"share": shares[kind], "device": device} for kind in dict.fromkeys(row.kind for row in rows)}
    return _counted(kinds, [_published(row) for row in rows])


def merged(earlier: Content, found: Content, *, whole: Iterable[str]) -> Content:
    """Returns earlier results with the outcomes of a run in their place.

    Args:
        earlier: What a file of results holds, or {}.
        found: What `content_of` returned, or another file of results.
        whole: The kinds that were tried in whole. Faults of theirs that the run did not try are gone.
    Raises:
        SystemExit: A part of a kind was tried with another share than the rest.
    """
    whole = set(whole)
    kinds = {kind: value for kind, value in earlier.get("kinds", {}).items() if kind not in whole}
    for kind in kinds.keys() & found["kinds"].keys():
        if (before := kinds[kind]["share"]) != (share := found["kinds"][kind]["share"]):
            raise SystemExit(f"A part of {kind!r} needs the share of the rest: --share {before}. Received: {share}.")
    rows = {_key(row): row for row in earlier.get("faults", []) if row["kind"] in kinds}
    rows |= {_key(row): row for row in found["faults"]}
    order = list(dict.fromkeys([*earlier.get("kinds", {}), *found["kinds"]]))
    kinds = dict(sorted({**kinds, **found["kinds"]}.items(), key=lambda each: order.index(each[0])))
    return _counted(kinds, sorted(rows.values(), key=lambda row: order.index(row["kind"])))


def joined(parts: Iterable[Content]) -> Content:
    """Returns the results of runs of parts of the same kinds as one."""
    return functools.reduce(lambda earlier, found: merged(earlier, found, whole=()), parts, {})


def of_kinds(kinds: Iterable[str], content: Content) -> Content:
    """Returns the results of some kinds alone."""
    kept = {kind: about for kind, about in content["kinds"].items() if kind in set(kinds)}
    return _counted(kept, [row for row in content["faults"] if row["kind"] in kept])


def read(file: Path) -> Content:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write(content: Content, file: Path) -> None:
    write_text(file, json.dumps(content, indent=0) + "\n")


def _counted(kinds: Mapping[str, Mapping[str, Any]], faults: Sequence[dict[str, str]]) -> Content:
    """Counts the outcomes. A row holds the words of its outcome only where that is not a good one."""
    outcomes = collections.Counter((row["kind"], row["outcome"]) for row in faults)
    return {
        "rows": len(faults),
        "bad": sum("detail" in row for row in faults),
        "kinds": {
            kind: {
                "share": about["share"],
                "device": about["device"],
                "outcomes": {outcome: number for (of, outcome), number in outcomes.items() if of == kind},
            }
            for kind, about in kinds.items()
            if any(row["kind"] == kind for row in faults)
        },
        "faults": list(faults),
    }


def _key(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["kind"], row["part"], row["how"]


def _published(row: Row) -> dict[str, str]:
    """Returns a row without the paths of this machine; the words of an outcome only where it is not a good one."""
    shown = asdict(row)
    if row.is_good:
        del shown["detail"]
    else:
        shown["detail"] = re.sub(r"/[^\s'\"]*/", "", row.detail) or row.outcome
    return shown
