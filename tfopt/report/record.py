"""The base of all records, and the small records that others are made of."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tfopt.atomic.own_files import has_names, json_in


@dataclass(frozen=True, kw_only=True)
class Record:
    """The base of all records: it becomes a dict of plain values, or JSON."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def is_own(cls, content: bytes) -> bool:
        """Whether a file holds this record as JSON, of any version of tfopt; see tfopt.atomic.own_files."""
        return cls.is_shape_of(json_in(content))

    @classmethod
    def is_shape_of(cls, values: Any) -> bool:
        """Whether values are an object with each field that has no default."""
        no_default = dataclasses.MISSING
        return has_names(
            values,
            [
                field.name
                for field in dataclasses.fields(cls)
                if field.default is no_default and field.default_factory is no_default
            ],
        )


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
