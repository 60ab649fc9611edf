"""The receipts of a run side by side, from one table of rows: in the terminal, and on a page with key figures.

Names and reasons must be `Text` and not strings in the terminal, because rich would read "[conv1]" as markup.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tfopt.report import Receipt, lost_score, score_change, score_names
from tfopt.report.formatting import score_label, short_bytes, show_score

UNKNOWN = "\N{EN DASH}"
MARK = "▼ "
UNBOUNDED = 10_000
Compare = Callable[[Receipt, Receipt], str]


@dataclass(frozen=True)
class _Row:
    """A figure of every artifact."""

    attribute: str  # an attribute of a receipt, or the name of a score
    page: str  # its label on a page
    terminal: str = ""  # its label in the terminal, which leaves the row out if this is empty
    form: str = "{}"  # the text of its value
    unit: str = ""  # what a page adds to the value; in the terminal, the label has it
    is_score: bool = False  # whether it is a score
    compares: bool = False  # whether it compares with a baseline
    # Whether it describes the measurement. A page shows it once if it is the same for all.
    describes: bool = False
    change: Compare = lambda receipt, first: ""  # how the terminal compares an artifact with the first

    def text(self, receipt: Receipt, path: Callable[[str], str]) -> str:
        """Returns the value as text, or "" if it is unknown. `path` shortens a path."""
        if self.is_score:
            value = receipt.baseline_score(self.attribute) if self.compares else receipt.score(self.attribute)
            return "" if value is None else show_score(self.attribute, value)
        found = getattr(receipt, self.attribute)
        if found is None or found == "":
            return ""
        return path(found) if self.attribute in ("artifact", "baseline") else self.form.format(found)

    def reason(self, receipt: Receipt) -> str:
        known_as = {"verdict": "speedup"}.get(self.attribute, self.attribute)
        if self.is_score:
            known_as = "baseline_accuracy" if self.compares else "accuracy"
        return receipt.unavailable.get(known_as, "not measured")


def _rows(receipts: Iterable[Receipt]) -> list[_Row]:
    def change(name: str, receipt: Receipt, first: Receipt) -> str:
        return (MARK if lost_score(name, first, receipt) else "") + score_change(name, first, receipt)

    scores = []
    for name in score_names(receipts):
        label, how = score_label(name), partial(change, name)
        scores.append(_Row(name, page=label, terminal=label.lower(), is_score=True, change=how))
        scores.append(_Row(name, page=f"{label} of {{}}", is_score=True, compares=True))
    return [_COMPUTES, *scores, *_OTHER_ROWS]


def _ratio(attribute: str) -> Compare:
    def compare(receipt: Receipt, first: Receipt) -> str:
        before = getattr(first, attribute)
        return f"{getattr(receipt, attribute) / before:.2f}x" if before else ""

    return compare


def _verdict(receipt: Receipt, first: Receipt) -> str:
    return receipt.verdict


_COMPUTES = _Row("computes", page="Precision", terminal="computes")
_OTHER_ROWS = (
    _Row("agreement", form="{:.2%}", page="Agreement with {}", compares=True),
    _Row("parity_max_abs_error", form="{:.2e}", page="Parity, largest absolute error"),
    _Row("parity_relative_error", form="{:.2%}", page="Parity, error as a share of the outputs' scale"),
    _Row("bytes_on_disk", form="{:,}", page="Bytes on disk", terminal="bytes", change=_ratio("bytes_on_disk")),
    _Row("gzip_bytes", form="{:,}", page="Bytes as .tar.gz", terminal="gzip bytes", change=_ratio("gzip_bytes")),
    _Row("weight_count", form="{:,}", page="Weights", describes=True),
    _Row("zero_count", form="{:,}", page="Weights that are exactly zero"),
    _Row("sparsity", form="{:.1%}", page="Share of zeros", terminal="sparsity"),
    _Row("batch_size", page="Batch size of the timed calls", terminal="batch size", describes=True),
    _Row("latency_ms_median", form="{:.3f}", unit=" ms", page="Latency, median", terminal="median ms"),
    _Row("latency_ms_p99", form="{:.3f}", unit=" ms", page="Latency, 99th percentile", terminal="p99 ms"),
    _Row("speedup", form="{:.2f}x", page="Speed against {}", terminal="speed", compares=True, change=_verdict),
    _Row("verdict", page="Faster or slower than {}", compares=True),
    _Row("baseline", page="Baseline", terminal="  against", compares=True),
    _Row("tensorflow_version", page="TensorFlow", describes=True),
    _Row("device", page="Device", describes=True),
    _Row("artifact", page="Artifact"),
)


@dataclass(frozen=True)
class ReceiptsTable:
    """The receipts side by side in the terminal, with sizes and scores compared with the first receipt.

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
        first = next(iter(self.receipts), "")
        for name in self.receipts:
            heads = [Text(name), *([Text(f"vs {first}", style="dim")] if name != first else [])]
            for head in _joined(heads, stacked):
                table.add_column(head, justify="right")
        said = {"baseline": {"", first}, "computes": {"", "float32", "int8"}}  # what the column heads say
        for row in _rows(self.receipts.values()):
            cells = [self._cells(row, name) for name in self.receipts]
            texts = {cell.plain for column in cells for cell in column}
            if row.terminal and not texts <= said.get(row.attribute, {""}):
                joined = (cell for column in cells for cell in _joined(column, stacked))
                table.add_row(Text(row.terminal, style="dim"), *joined)
        return table

    def _cells(self, row: _Row, name: str) -> list[Text]:
        """Returns the figure of an artifact and, except for the first, its comparison with the first."""
        (first, first_receipt), receipt = next(iter(self.receipts.items())), self.receipts[name]
        words = row.text(receipt, lambda path: PurePath(path).name)
        if not words and (receipt.baseline or not row.compares):
            words = f"unavailable ({row.reason(receipt)})"
        figure = Text(words, style="dim" if words.startswith("unavailable") else "")
        if name == first:
            return [figure]
        change = row.change(receipt, first_receipt)
        style = "yellow" if change == "slower" else "bold red" if change.startswith(MARK) else "dim"
        return [figure, Text(change, style=style)]


def _joined(cells: Sequence[Text], stacked: bool) -> list[Text]:
    return [Text("\n").join(cell for cell in cells if cell)] if stacked else list(cells)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value of a page's table."""

    text: str  # the value
    change: str = ""  # its change against the first
    footnote: int | None = None  # the number of the reason if the value is unknown
    marked: bool = False  # whether it is marked as a loss


@dataclass(frozen=True, kw_only=True)
class ReceiptTable:
    """Artifacts side by side on a page."""

    rows: Mapping[str, Sequence[Cell]]  # one cell for each artifact, by the label of the row
    shared: Mapping[str, str]  # values that are the same for all artifacts, by label
    # Reasons for unknown values. The footnote of a cell counts from 1.
    footnotes: Sequence[str]


def receipt_table(receipts: Mapping[str, Receipt], directory: Path) -> ReceiptTable:
    """Returns the table of all figures, by the name of the artifact. The others are compared with the first.

    Paths are shown relative to `directory`, that of the page.

    Example:
        >>> receipt_table({}, Path("out")).footnotes
        []
    """
    measured = list(receipts.values())
    baselines = {receipt.baseline for receipt in measured if receipt.baseline}
    have_columns = baselines <= {receipt.artifact for receipt in measured}
    rows: dict[str, list[Cell]] = {}
    shared: dict[str, str] = {}
    reasons: list[str] = []
    for row in _rows(measured):
        if row.compares and not baselines:
            continue
        if row.is_score and row.compares and have_columns:
            continue
        if row.attribute == "baseline" and have_columns and len(baselines) == 1:  # the other rows name the baseline
            continue
        cells = [_cell(row, receipt, measured[0], directory, reasons) for receipt in measured]
        if row.attribute == "artifact" and [cell.text for cell in cells] == list(receipts):  # as the column heads
            continue
        if row.describes and len(cells) > 1 and len(set(cells)) == 1:
            shared[row.page] = cells[0].text
        else:
            rows[row.page.format(_name_of(baselines, receipts))] = cells
    return ReceiptTable(rows=rows, shared=shared, footnotes=reasons)


def _cell(row: _Row, receipt: Receipt, first: Receipt, directory: Path, reasons: list[str]) -> Cell:
    marked = row.is_score and not row.compares and lost_score(row.attribute, first, receipt)
    text = row.text(receipt, lambda path: os.path.relpath(path, directory))
    if text:
        return Cell(text=text + row.unit, marked=marked)
    reason = row.reason(receipt)
    if reason not in reasons:
        reasons.append(reason)
    return Cell(text=UNKNOWN, footnote=reasons.index(reason) + 1, marked=marked)


def _name_of(baselines: set[str], receipts: Mapping[str, Receipt]) -> str:
    """Returns the name of the baseline: the name of its column, if all artifacts have the same baseline."""
    if len(baselines) != 1:
        return "its baseline"
    names = [name for name, receipt in receipts.items() if receipt.artifact in baselines]
    return names[0] if names else PurePath(*baselines).name


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One key figure: its label, its value in one or two words, and a note on its source."""

    label: str
    value: str
    note: str
    marked: bool = False


def key_figures(receipts: Mapping[str, Receipt]) -> list[KeyFigure]:
    """Returns the key figures: the last artifact, the aim of the run, compared with the first, the float artifact."""
    if not receipts:
        return []
    first, *_, last = (*receipts.values(), *receipts.values())
    return [
        _score(score_names(receipts.values())[0], receipts),
        _shrinkage("Size on disk", first.bytes_on_disk, last.bytes_on_disk),
        _shrinkage("Size as .tar.gz", first.gzip_bytes, last.gzip_bytes),
        _latency(first, last),
    ]


def _score(name: str, receipts: Mapping[str, Receipt]) -> KeyFigure:
    first, *_, last = (*receipts.values(), *receipts.values())
    label, value = score_label(name), last.score(name)
    if value is None:
        return KeyFigure(label=label, value="unavailable", note=last.unavailable.get("accuracy", "not measured"))
    note = " → ".join(f"{artifact} {receipt.show_score(name)}" for artifact, receipt in receipts.items())
    change = score_change(name, first, last).replace(" pt", " points")
    if first is not last and change:
        note = f"{change}: {note}"
    return KeyFigure(label=label, value=show_score(name, value), note=note, marked=lost_score(name, first, last))


def _shrinkage(label: str, before: int, after: int) -> KeyFigure:
    if before == after:
        return KeyFigure(label=label, value=short_bytes(after), note=f"{after:,} bytes")
    value = f"{before / after:.1f}x smaller" if after < before else f"{after / before:.2f}x larger"
    return KeyFigure(label=label, value=value, note=f"{short_bytes(before)} → {short_bytes(after)}")


def _latency(first: Receipt, last: Receipt) -> KeyFigure:
    latency = f"{last.latency_ms_median:.3g} ms"
    note = f"median, batch {last.batch_size}"
    if last.speedup is None or last.baseline is None:
        return KeyFigure(label="Latency", value=latency, note=note)
    ratio = f"{last.speedup:.2f}x"
    value = {"faster": f"{ratio} faster", "slower": f"{ratio}, slower"}.get(last.verdict, last.verdict)
    reference = "" if last.baseline == first.artifact else f" against {PurePath(last.baseline).name}"
    if last.verdict == "about even":  # the ratio is within the noise, so the words are the value
        reference = f", {ratio}{reference}"
    elif reference:
        reference = f",{reference}"
    return KeyFigure(label="Speed", value=value, note=f"{latency} {note}{reference}")
