"""The result of a pass: what it changed, and what it skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfopt import notebook
from tfopt.errors import warn
from tfopt.number_text import short_count
from tfopt.report.record import Change, Record, Skip

RANGE = "range"  # the kind of notes that only give figures, and tell of nothing wrong


@dataclass(frozen=True, kw_only=True)
class PassReport(Record):
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

    def _repr_html_(self) -> str:
        rows = [("step", each.name, each.kind, each.detail) for each in self.steps]
        rows += [("changed", each.name, each.kind, each.detail) for each in self.changed]
        rows += [("skipped", each.name, each.kind, each.reason) for each in self.skipped]
        rows += [("note", each.name, each.kind, each.detail) for each in self.notes]
        return notebook.block(self.headline, notebook.table(rows))

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  step     {step.name} ({step.kind}): {step.detail}" for step in self.steps]
        lines += [f"  changed  {change.name} ({change.kind}): {change.detail}" for change in self.changed]
        lines += [f"  skipped  {skip.name} ({skip.kind}): {skip.reason}" for skip in self.skipped]
        lines += [f"  note     {note.name} ({note.kind}): {note.detail}" for note in self.notes]
        return "\n".join(lines)

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
