"""The base of all records, and the small records that others are made of."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    """The base of all records: it becomes a dict of plain values, or JSON."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One setting of a plan: its value, and the reason for it."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """A layer (by its path) or a graph node (by its name) that a pass changed."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Skip(Record):
    """A layer or a graph node that a pass did not change, with the reason."""

    name: str
    kind: str
    reason: str
