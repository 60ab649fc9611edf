"""The receipts of a run for the HTML report: four key figures, and a table with footnotes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tfopt.report import Receipt, lost_score, score_change, score_names
from tfopt.report.formatting import score_label, show_score
from tfopt.reporting.figures import show_bytes

UNKNOWN = "\N{EN DASH}"


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One key figure: its label, its value in one or two words, and a note on its source."""

    label: str
    value: str
    note: str
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value of the table. If the value is unknown, `footnote` is the number of the reason."""

    text: str
    footnote: int | None = None
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class ReceiptTable:
    """Artifacts side by side.

    Attributes:
        rows: One cell for each artifact, by the label of the row.
        shared: Values that are the same for all artifacts, by label.
        footnotes: Reasons for unknown values. The footnote of a cell counts from 1.
    """

    rows: Mapping[str, Sequence[Cell]]
    shared: Mapping[str, str]
    footnotes: Sequence[str]


@dataclass(frozen=True)
class _Row:
    attribute: str  # of a receipt, or the name of a score
    form: str = "{}"
    is_score: bool = False
    compares: bool = False  # whether the row compares with a baseline
    describes: bool = False  # whether it describes the measurement; shown once if it is the same for all


_FIRST_ROWS = {"Precision": _Row("computes")}
_ROWS = {
    "Agreement with {}": _Row("agreement", "{:.2%}", compares=True),
    "Parity, largest absolute error": _Row("parity_max_abs_error", "{:.2e}"),
    "Parity, error as a share of the outputs' scale": _Row("parity_relative_error", "{:.2%}"),
    "Bytes on disk": _Row("bytes_on_disk", "{:,}"),
    "Bytes as .tar.gz": _Row("gzip_bytes", "{:,}"),
    "Weights": _Row("weight_count", "{:,}", describes=True),
    "Weights that are exactly zero": _Row("zero_count", "{:,}"),
    "Share of zeros": _Row("sparsity", "{:.1%}"),
    "Latency, median": _Row("latency_ms_median", "{:.3f} ms"),
    "Latency, 99th percentile": _Row("latency_ms_p99", "{:.3f} ms"),
    "Speed against {}": _Row("speedup", "{:.2f}x", compares=True),
    "Faster or slower than {}": _Row("verdict", compares=True),
    "Baseline": _Row("baseline", compares=True),
    "Batch size of the timed calls": _Row("batch_size", describes=True),
    "TensorFlow": _Row("tensorflow_version", describes=True),
    "Device": _Row("device", describes=True),
    "Artifact": _Row("artifact"),
}


def receipt_table(receipts: Mapping[str, Receipt], directory: Path) -> ReceiptTable:
    """Returns the table of all figures.

    Args:
        receipts: The receipt of each artifact by name. The others are compared with the first.
        directory: Directory of the page. Paths are shown relative to it.

    Example:
        >>> receipt_table({}, Path("out")).footnotes
        []
    """
    measured = list(receipts.values())
    baselines = {receipt.baseline for receipt in measured if receipt.baseline}
    one_of_these = baselines <= {receipt.artifact for receipt in measured}
    rows: dict[str, list[Cell]] = {}
    shared: dict[str, str] = {}
    reasons: list[str] = []
    for label, row in {**_FIRST_ROWS, **_score_rows(measured), **_ROWS}.items():
        if row.compares and not baselines:
            continue
        if row.is_score and row.compares and one_of_these:  # the baseline has its own column
            continue
        if row.attribute == "baseline" and one_of_these and len(baselines) == 1:  # the other rows name the baseline
            continue
        cells = [_cell(row, receipt, directory, reasons) for receipt in measured]
        if row.attribute == "artifact" and [cell.text for cell in cells] == list(
            receipts
        ):  # the column heads show the same
            continue
        if row.describes and len(cells) > 1 and len(set(cells)) == 1:
            shared[label] = cells[0].text
        else:
            rows[label.format(_name_of(baselines, receipts))] = cells
    for name in score_names(measured):
        if score_label(name) in rows:
            rows[score_label(name)] = _with_losses_marked(name, rows[score_label(name)], measured)
    return ReceiptTable(rows=rows, shared=shared, footnotes=reasons)


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


def _score_rows(receipts: Sequence[Receipt]) -> dict[str, _Row]:
    rows = {}
    for name in score_names(receipts):
        rows[score_label(name)] = _Row(name, is_score=True)
        rows[score_label(name) + " of {}"] = _Row(name, is_score=True, compares=True)
    return rows


def _cell(row: _Row, receipt: Receipt, directory: Path, reasons: list[str]) -> Cell:
    value: Any
    if row.is_score:
        value = receipt.baseline_score(row.attribute) if row.compares else receipt.score(row.attribute)
        attribute = "baseline_accuracy" if row.compares else "accuracy"
    else:
        value = getattr(receipt, row.attribute)
        attribute = "speedup" if row.attribute == "verdict" else row.attribute
    if value is None or value == "":
        reason = receipt.unavailable.get(attribute, "not measured")
        if reason not in reasons:
            reasons.append(reason)
        return Cell(text=UNKNOWN, footnote=reasons.index(reason) + 1)
    if row.is_score:
        return Cell(text=show_score(row.attribute, value))
    if row.attribute in ("artifact", "baseline"):
        value = os.path.relpath(value, directory)
    return Cell(text=row.form.format(value))


def _with_losses_marked(name: str, cells: Sequence[Cell], receipts: Sequence[Receipt]) -> list[Cell]:
    pairs = zip(cells, receipts, strict=True)
    return [
        Cell(text=cell.text, footnote=cell.footnote, marked=lost_score(name, receipts[0], receipt))
        for cell, receipt in pairs
    ]


def _name_of(baselines: set[str], receipts: Mapping[str, Receipt]) -> str:
    """Returns the name of the baseline: the name of its column, if all artifacts have the same baseline."""
    if len(baselines) != 1:
        return "its baseline"
    names = [name for name, receipt in receipts.items() if receipt.artifact in baselines]
    return names[0] if names else PurePath(*baselines).name


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
        return KeyFigure(label=label, value=show_bytes(after), note=f"{after:,} bytes")
    value = f"{before / after:.1f}x smaller" if after < before else f"{after / before:.2f}x larger"
    return KeyFigure(label=label, value=value, note=f"{show_bytes(before)} → {show_bytes(after)}")


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
