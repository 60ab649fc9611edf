"""Plans, passes and receipts for the terminal, as rich renderables.

Names and reasons must be `Text` and not strings, because rich would read "[conv1]" as markup and not print it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfopt.report import Decision, PassReport, Receipt, lost_score, score_change, score_names
from tfopt.report.formatting import score_label
from tfopt.report.record import RANGE

# On a narrower terminal, the column of reasons would be too narrow to read.
WIDTH_FOR_REASONS = 70
MARK = "▼ "
UNBOUNDED = 10_000
# The text for an artifact, and the text that compares it with the first artifact.
_Row = tuple[Callable[[Receipt], str], Callable[[Receipt, Receipt], str]]


@dataclass(frozen=True)
class PlanTable:
    """The settings of a plan, each with its value and the reason. A narrow terminal shows the reason below the value.

    Example:
        >>> table = PlanTable([Decision(setting="precision", value="float32", reason="no GPU")])
        >>> Console(width=80, color_system=None).print(table)
         setting     value     reason
        ──────────────────────────────
         precision   float32   no GPU
        >>> Console(width=40, color_system=None).print(table)
        precision  float32
          no GPU
    """

    decisions: Sequence[Decision]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < WIDTH_FOR_REASONS:
            yield from self._blocks()
            return
        table = Table("setting", "value", "reason", box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
        for decision in self.decisions:
            value, reason = Text(decision.value, style="bold"), Text(decision.reason, style="dim")
            table.add_row(Text(decision.setting), value, reason)
        yield table

    def _blocks(self) -> RenderResult:
        width = max((len(decision.setting) for decision in self.decisions), default=0)
        for decision in self.decisions:
            yield Text.assemble(f"{decision.setting:{width}}  ", (decision.value, "bold"))
            yield Padding(Text(decision.reason, style="dim"), (0, 0, 0, 2))


@dataclass(frozen=True)
class ReceiptsTable:
    """The receipts side by side, with sizes and scores compared with the first receipt.

    Speeds are compared only by `Receipt.speedup`, which is measured alternately with the baseline of the artifact. An
    empty row is left out, and also the row of baselines if all are the first artifact. A score that is more than a
    point, or 1%, worse than the first is marked. On a terminal that is too narrow for columns of comparisons, the
    comparisons are below the figures.

    Attributes:
        receipts: The receipt of each artifact by name. The others are compared with the first.

    Example:
        >>> ReceiptsTable({}).receipts
        {}
    """

    receipts: Mapping[str, Receipt]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(stacked=False)
        fits = Measurement.get(console, options.update(max_width=UNBOUNDED), table).maximum <= options.max_width
        yield table if fits else self._table(stacked=True)

    def _table(self, *, stacked: bool) -> Table:
        table = Table("", box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
        names = list(self.receipts)
        for name in names:
            heads = [Text(name), *([Text(f"vs {names[0]}", style="dim")] if name != names[0] else [])]
            for head in _joined(heads, stacked):
                table.add_column(head, justify="right")
        for label, (show, compare) in {**_score_rows(self.receipts), **_RECEIPT_ROWS}.items():
            cells = [_cells(name, self.receipts, show, compare) for name in names]
            texts = [cell.plain for column in cells for cell in column]
            alone = {AGAINST: {"", names[0]}, COMPUTES: {"", "float32", "int8"}}  # what the column heads say
            if not any(texts) or set(texts) <= alone.get(label, set()):
                continue
            table.add_row(Text(label, style="dim"), *(cell for column in cells for cell in _joined(column, stacked)))
        return table


FIGURES = re.compile(r": [\d.]+ .*")  # the times in the reason of one node, which no other node has


def pass_summary(report: PassReport) -> Text:
    """Returns the result of a pass in a few lines: changes and steps by kind, and skips by reason.

    Example:
        >>> from tfopt.report import Change, Skip
        >>> changed = [Change(name=name, kind="Dense", detail="75.0% zeros") for name in ("hidden1", "hidden2")]
        >>> skipped = [Skip(name="logits", kind="Dense", reason="the output layer is left dense")]
        >>> print(pass_summary(PassReport(name="prune", changed=changed, skipped=skipped, metrics={"sparsity": 0.7})))
        prune: 2 changed, 1 skipped, sparsity 0.7
          changed  2 Dense
          skipped  logits: the output layer is left dense
    """
    text = Text()
    text.append(report.name, style="bold")
    text.append(f": {len(report.changed)} changed, {len(report.skipped)} skipped")
    text.append("".join(f", {figure}" for figure in report.figures))
    if report.changed:
        kinds = Counter(change.kind for change in report.changed)
        text.append("\n  changed  ", style="dim")
        text.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    by_kind: dict[str, list[str]] = {}
    for step in report.steps:
        by_kind.setdefault(step.kind, []).append(step.detail)
    for kind, details in by_kind.items():
        text.append("\n  step     ", style="dim")
        text.append(details[0] if len(details) == 1 else f"{len(details)} {kind}")
    by_reason: dict[str, list[str]] = {}
    for skip in report.skipped:
        by_reason.setdefault(FIGURES.sub("", skip.reason), []).append(skip.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text.append("\n  skipped  ", style="dim")
        text.append(f"{shown}: {reason}")
    for note in report.notes:
        if note.kind != RANGE:  # the page has these
            text.append("\n  note     ", style="dim")
            text.append(f"{note.name}: {note.detail}")
    return text


def _cells(
    name: str,
    receipts: Mapping[str, Receipt],
    show: Callable[[Receipt], str],
    compare: Callable[[Receipt, Receipt], str],
) -> list[Text]:
    """Returns the figure of an artifact and, except for the first, its comparison with the first."""
    first, receipt = next(iter(receipts)), receipts[name]
    figure = _receipt_cell(show(receipt))
    return [figure] if name == first else [figure, _receipt_cell(compare(receipt, receipts[first]), style="dim")]


def _joined(cells: Sequence[Text], stacked: bool) -> list[Text]:
    return [Text("\n").join(cell for cell in cells if cell)] if stacked else list(cells)


def _receipt_cell(words: str, style: str = "") -> Text:
    if words == "slower":
        return Text(words, style="yellow")
    if words.startswith(MARK):
        return Text(words, style="bold red")
    return Text(words, style="dim" if words.startswith("unavailable") else style)


def _speed(receipt: Receipt) -> str:
    return receipt.show("speedup", "{:.2f}x") if receipt.baseline else ""


def _verdict(receipt: Receipt, first: Receipt) -> str:
    return receipt.verdict


def _score_rows(receipts: Mapping[str, Receipt]) -> dict[str, _Row]:
    return {score_label(name).lower(): _score_row(name) for name in score_names(receipts.values())}


def _score_row(name: str) -> _Row:
    def change(receipt: Receipt, first: Receipt) -> str:
        return (MARK if lost_score(name, first, receipt) else "") + score_change(name, first, receipt)

    return lambda receipt: receipt.show_score(name), change


def _ratio(value: int, first: int) -> str:
    return f"{value / first:.2f}x" if first else ""


def _nothing(receipt: Receipt, first: Receipt) -> str:
    return ""


AGAINST = "  against"
COMPUTES = "computes"
_RECEIPT_ROWS: Mapping[str, _Row] = {
    COMPUTES: (lambda receipt: receipt.computes, _nothing),
    "bytes": (
        lambda receipt: f"{receipt.bytes_on_disk:,}",
        lambda receipt, first: _ratio(receipt.bytes_on_disk, first.bytes_on_disk),
    ),
    "gzip bytes": (
        lambda receipt: f"{receipt.gzip_bytes:,}",
        lambda receipt, first: _ratio(receipt.gzip_bytes, first.gzip_bytes),
    ),
    "sparsity": (lambda receipt: f"{receipt.sparsity:.1%}", _nothing),
    "batch size": (lambda receipt: f"{receipt.batch_size}", _nothing),
    "median ms": (lambda receipt: f"{receipt.latency_ms_median:.3f}", _nothing),
    "p99 ms": (lambda receipt: f"{receipt.latency_ms_p99:.3f}", _nothing),
    "speed": (_speed, _verdict),
    AGAINST: (lambda receipt: PurePath(receipt.baseline).name if receipt.baseline else "", _nothing),
}
