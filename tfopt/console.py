"""What the terminal shows of plans, passes and receipts, as rich renderables.

Names and reasons go in as `Text`, never as plain strings: rich would take "[conv1]" for markup and swallow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from rich import box
from rich.table import Table
from rich.text import Text

from tfopt.report import Decision, PassReport, Receipt


def plan_table(decisions: Sequence[Decision]) -> Table:
    """Returns the settings of a plan, each with its value and the reason for it.

    Example:
        >>> from rich.console import Console
        >>> table = plan_table([Decision(setting="precision", value="float32", reason="no GPU")])
        >>> Console(width=40, color_system=None).print(table)
         setting     value     reason
        ──────────────────────────────
         precision   float32   no GPU
    """
    table = Table("setting", "value", "reason", box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    for decision in decisions:
        table.add_row(Text(decision.setting), Text(decision.value, style="bold"), Text(decision.reason, style="dim"))
    return table


def receipts_table(receipts: Mapping[str, Receipt]) -> Table:
    """Returns the receipts side by side, sizes and accuracy also as compared with the first.

    Speed is compared by `Receipt.speedup` only, which is measured alternately with the artifact's own baseline.
    The latencies were measured each at its own time, so their ratio would say less.

    Args:
        receipts: Artifact name to receipt; the first is what the others are compared with.

    Example:
        >>> receipts_table({}).row_count
        9
    """
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    names = list(receipts)
    for name in names:
        table.add_column(Text(name), justify="right")
        if name != names[0]:
            table.add_column(Text(f"vs {names[0]}"), justify="right", style="dim")

    for label, (show, compare) in _RECEIPT_ROWS.items():
        cells = []
        for name in names:
            cells.append(show(receipts[name]))
            if name != names[0]:
                cells.append(compare(receipts[name], receipts[names[0]]))
        table.add_row(Text(label, style="dim"), *map(_receipt_cell, cells))
    return table


def pass_summary(report: PassReport) -> Text:
    """Returns what a pass did in a few lines: the changed by kind, the skipped by reason.

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
    text.append("".join(f", {name} {value:.4g}" for name, value in report.metrics.items()))
    if report.changed:
        kinds = Counter(change.kind for change in report.changed)
        text.append("\n  changed  ", style="dim")
        text.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    by_reason: dict[str, list[str]] = {}
    for skip in report.skipped:
        by_reason.setdefault(skip.reason, []).append(skip.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text.append("\n  skipped  ", style="dim")
        text.append(f"{shown}: {reason}")
    return text


def _receipt_cell(words: str) -> Text:
    if words == "slower":
        return Text(words, style="yellow")
    return Text(words, style="dim" if words.startswith("unavailable") else "")


def _speed(receipt: Receipt) -> str:
    return receipt.show("speedup", "{:.2f}x") if receipt.baseline else ""


def _verdict(receipt: Receipt, first: Receipt) -> str:
    return receipt.verdict


def _accuracy_change(receipt: Receipt, first: Receipt) -> str:
    if receipt.accuracy is None or first.accuracy is None:
        return ""
    return f"{100 * (receipt.accuracy - first.accuracy):+.2f} pt"


def _ratio(value: int, first: int) -> str:
    return f"{value / first:.2f}x" if first else ""


def _nothing(receipt: Receipt, first: Receipt) -> str:
    return ""


# Row label to what stands below the artifact and what stands in the column that compares it with the first.
_RECEIPT_ROWS: Mapping[str, tuple[Callable[[Receipt], str], Callable[[Receipt, Receipt], str]]] = {
    "accuracy": (lambda receipt: receipt.show("accuracy", "{:.2%}"), _accuracy_change),
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
    "  against": (lambda receipt: PurePath(receipt.baseline).name if receipt.baseline else "", _nothing),
}
