"""The result of a run; its receipts and its report are written, and its last lines printed."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf
from rich.console import Console

from tfopt.atomic.own_files import Form, check_replaceable, json_in, write_own
from tfopt.exporting.formats import FORMATS, SAVED_MODEL
from tfopt.hardware import detect
from tfopt.report import Phase, Receipt, RunReport
from tfopt.report.formatting import score_label, show_score
from tfopt.report.record import decision_table
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table, pairs
from tfopt.reporting.receipts import ReceiptsTable, receipt_table
from tfopt.reporting.saved_report import is_page
from tfopt.training import Plan

RECEIPTS, PAGE = "receipts.json", "report.html"


def _is_receipts(content: bytes) -> bool:
    receipts = json_in(content)
    return isinstance(receipts, dict) and bool(receipts) and all(map(Receipt.is_shape_of, receipts.values()))


FORMS: dict[str, Form] = {RECEIPTS: _is_receipts, PAGE: is_page, "report.json": RunReport.is_own}


@dataclass(frozen=True, kw_only=True)
class RunResult(Shown):
    """The result of a run.

    Attributes:
        model: The trained Keras model, pruned if the recipe prunes.
        plan: The plan of the training.
        report: The results and measurements of all stages, as plain records.
        receipts: The receipt of each artifact by name, for example "float32", "pruned" or "int8_onnx"; empty without an
            export.
        export_dir: Directory of the artifacts, receipts.json, report.json and report.html; None without an
            export.
    """

    model: keras.Model
    plan: Plan
    report: RunReport
    receipts: Mapping[str, Receipt]
    export_dir: Path | None

    @property
    def ok(self) -> bool:
        """Whether every artifact was verified without a problem."""
        return all(receipt.ok for receipt in self.receipts.values())

    def __str__(self) -> str:
        lines = [f"{self.report.recipe}: {self.report.description}", *map(str, self.report.phases)]
        return "\n".join([*lines, *map(str, self.receipts.values())])

    def _sheet(self) -> Sheet:
        report, receipts = self.report, self.receipts
        shown = receipt_table(receipts, self.export_dir or Path())
        rows = [(label, *(cell.text for cell in cells)) for label, cells in shown.rows.items()]
        problems = [(PROBLEM, name, problem) for name, each in receipts.items() for problem in each.problems]
        tables = [
            Table(head=("", *receipts), rows=rows, figures=range(1, len(receipts) + 1), folded=""),
            Table(rows=problems),
            pairs(shown.shared),
            decision_table(report.plan, folded="plan"),
            Table(rows=[(phase.name, str(phase)) for phase in report.phases], folded="training"),
        ]
        return Sheet(title=report.recipe, note=report.description, tables=tables)


def artifact_name(stage: str, file_format: str) -> str:
    """Returns the name of the directory of a stage's artifact.

    Example:
        >>> artifact_name("int8", "saved_model"), artifact_name("int8", "onnx")
        ('int8', 'int8_onnx')
    """
    return stage if file_format == SAVED_MODEL else f"{stage}_{file_format}"


def check_reports(export_dir: Path) -> None:
    """Raises ConfigError if a file that tfopt did not write has the name of a report."""
    for name, is_own in FORMS.items():
        check_replaceable(export_dir / name, is_own)


def remove_reports(export_dir: Path) -> None:
    """Removes the receipts and the report of an earlier run, whose artifacts are about to be replaced."""
    check_reports(export_dir)  # others may have come there since training began
    for name in FORMS:
        (export_dir / name).unlink(missing_ok=True)


def write_reports(report: RunReport, export_dir: Path, console: Console) -> None:
    # Here, because they import matplotlib.
    from tfopt.reporting.html_page import write_html
    from tfopt.reporting.saved_report import save_report

    receipts = {name: receipt.to_dict() for name, receipt in report.receipts.items()}
    write_own(export_dir / RECEIPTS, json.dumps(receipts, indent=2), _is_receipts)
    save_report(report, export_dir)
    page = write_html(report, export_dir / PAGE)
    console.print()
    console.print(ReceiptsTable(report.receipts))
    for receipt in report.receipts.values():
        for problem in receipt.problems:
            print_line(f"{receipt.artifact}: {problem}", console, style="red")
    names = {
        artifact_name(stage, each)
        for stage in ("teacher", "float32", "shrunk", "pruned", "clustered", "int8")
        for each in FORMATS
    }
    for name in sorted(names - set(report.receipts)):
        if (export_dir / name).exists():
            print_line(f"{export_dir / name} is from an earlier run", console)
    print_line(f"\nreport: {page}", console)


def print_line(words: str, console: Console, style: str | None = None) -> None:
    """Prints a line with a path, which must not be wrapped or read as markup."""
    console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)


def environment() -> dict[str, str]:
    hardware = detect()
    return {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "Python": platform.python_version(),
        "processor": f"{hardware.processor}, {hardware.logical_cores} cores",
        "GPU": ", ".join(gpu.name for gpu in hardware.gpus) or "none",
    }


def print_score(phase: Phase, console: Console) -> None:
    """Prints the last figures of the validation: the metrics, or the loss if there are none."""
    names = [name.removeprefix("val_") for name in phase.history if name.startswith("val_")]
    metrics = [name for name in names if name != "loss" and not name.endswith("_loss")] or ["loss"]
    shown = [f"{score_label(name).lower()} {show_score(name, phase.history[f'val_{name}'][-1])}" for name in metrics]
    console.print(f"\non the validation examples: {', '.join(shown)}; nothing exported")
