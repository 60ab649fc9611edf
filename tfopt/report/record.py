"""The base of all records, the small records that others are made of, and the result of a pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic

from tfopt.atomic.own_files import has_names, json_in
from tfopt.errors import ConfigError, warn
from tfopt.report.formatting import short_count
from tfopt.report.sheet import Sheet, Shown, Table

T = TypeVar("T", bound="Record")
RANGE = "range"  # the kind of notes that only give figures, and tell of nothing wrong


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
        no_default = (dataclasses.MISSING, dataclasses.MISSING)
        fields = dataclasses.fields(cls)
        return has_names(values, [each.name for each in fields if (each.default, each.default_factory) == no_default])


def record_of(kind: type[T], text: str | bytes) -> T:
    """Returns the record that `to_json` wrote.

    Raises:
        ConfigError: The text is no such record.
    Example:
        >>> record_of(Skip, Skip(name="a", kind="b", reason="c").to_json()).reason
        'c'
    """
    try:
        found: T = pydantic.TypeAdapter(kind).validate_json(text)
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"text must be the JSON of a {kind.__name__}. Received: {error.errors()[0]['msg']}. Pass what to_json "
            "returned."
        ) from error
    return found


def shown_or_reason(record: Any, attribute: str, form: str) -> str:
    """Returns an attribute of a record as text, or "unavailable (reason)" if its value is unknown."""
    value = getattr(record, attribute)
    if value is None:
        return f"unavailable ({record.unavailable.get(attribute, 'not measured')})"
    return form.format(value)


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One setting of a plan: its value, and the reason for it."""

    setting: str
    value: str
    reason: str


def decision_table(decisions: Sequence[Decision], folded: str = "") -> Table:
    rows = [(each.setting, each.value, each.reason) for each in decisions]
    return Table(head=("setting", "value", "reason"), rows=rows, folded=folded)


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


@dataclass(frozen=True, kw_only=True)
class PassReport(Record, Shown):
    """The result of a pass.

    Attributes:
        name: Name of the pass, for example "prune".
        changed: The changed layers or nodes.
        skipped: The unchanged layers or nodes, each with the reason.
        metrics: Figures of the whole pass, for example {"sparsity": 0.75}.
        steps: The steps of the pass, in order.
        notes: What else is worth knowing, each by its tensor: how the calibration data use its range, or that its
            weights became 0.
    Example:
        >>> print(PassReport(name="prune", changed=(Change(name="conv", kind="Conv2D", detail="75.0% zeros"),)))
        prune: 1 changed, 0 skipped
          changed  conv (Conv2D): 75.0% zeros
    """

    name: str
    changed: Sequence[Change] = ()
    skipped: Sequence[Skip] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[Change] = ()
    notes: Sequence[Change] = ()

    @property
    def headline(self) -> str:
        """The numbers of changes and skips, and the figures, in one line."""
        figures = "".join(f", {figure}" for figure in self.figures)
        return f"{self.name}: {len(self.changed)} changed, {len(self.skipped)} skipped{figures}"

    @property
    def figures(self) -> list[str]:
        """The metrics as text, "size" together with "size_before"."""
        return list(self._figures())

    def _figures(self) -> Iterator[str]:
        for name, value in self.metrics.items():
            before = self.metrics.get(f"{name}_before")
            words = name.replace("_", " ")
            if before is not None:
                yield f"{words} {_figure(before)} -> {_figure(value)}"
            elif not name.endswith("_before"):
                yield f"{words} {_figure(value)}"

    def _sheet(self) -> Sheet:
        return Sheet(title=self.headline, tables=[Table(rows=self._rows())])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [("step", each.name, each.kind, each.detail) for each in self.steps]
        rows += [("changed", each.name, each.kind, each.detail) for each in self.changed]
        rows += [("skipped", each.name, each.kind, each.reason) for each in self.skipped]
        return rows + [("note", each.name, each.kind, each.detail) for each in self.notes]

    def __str__(self) -> str:
        rows = (f"  {word:8} {name} ({kind}): {text}" for word, name, kind, text in self._rows())
        return "\n".join([self.headline, *rows])

    def warn_if_unchanged(self, verdict: str = "") -> None:
        """Warns if the pass changed nothing, because its caller expected a change.

        Args:
            verdict: The reason, if there is one for the whole pass. Otherwise the reasons of the skips are given.
        """
        if self.changed:
            return
        each = "; ".join(sorted({skip.reason for skip in self.skipped}))
        reasons = verdict or each or "the model has no layer or node that it can change"
        warn(f"{self.name} changed nothing: {reasons}.")


def _figure(value: float) -> str:
    return short_count(value) if abs(value) >= 1000 else f"{value:.4g}"
