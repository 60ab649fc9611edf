"""One self-contained HTML page about a run: it needs no network and no script, so it can be mailed and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from tfopt.profiling import figures
from tfopt.profiling.figures import show_bytes
from tfopt.report import Receipt, RunReport, write_text

TEMPLATE = "report.html.jinja"

RECEIPT_ROWS: Mapping[str, Callable[[Receipt], str]] = {
    "Precision": lambda receipt: receipt.precision,
    "Accuracy": lambda receipt: receipt.show("accuracy", "{:.2%}"),
    "Accuracy of its baseline": lambda receipt: receipt.show("baseline_accuracy", "{:.2%}"),
    "Agreement with its baseline": lambda receipt: receipt.show("agreement", "{:.2%}"),
    "Parity, largest absolute error": lambda receipt: receipt.show("parity_max_abs_error", "{:.2e}"),
    "Parity, relative error": lambda receipt: receipt.show("parity_relative_error", "{:.2e}"),
    "Bytes on disk": lambda receipt: f"{receipt.bytes_on_disk:,}",
    "Bytes as .tar.gz": lambda receipt: f"{receipt.gzip_bytes:,}",
    "Weights": lambda receipt: f"{receipt.weight_count:,}",
    "Weights that are exactly zero": lambda receipt: f"{receipt.zero_count:,} ({receipt.sparsity:.1%})",
    "Latency, median": lambda receipt: f"{receipt.latency_ms_median:.3f} ms",
    "Latency, 99th percentile": lambda receipt: f"{receipt.latency_ms_p99:.3f} ms",
    "Batch size of the timed calls": lambda receipt: f"{receipt.batch_size}",
    "Speed against its baseline": lambda receipt: receipt.speed,
    "Baseline": lambda receipt: receipt.show("baseline", "{}"),
    "TensorFlow": lambda receipt: receipt.tensorflow_version,
    "Device": lambda receipt: receipt.device,
    "Artifact": lambda receipt: receipt.artifact,
}


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One figure of the headline row: what it is, its value in a word or two, and what it was made from."""

    label: str
    value: str
    note: str


def write_html(report: RunReport, path: Path) -> Path:
    """Writes a run's report as one HTML page that opens offline, and returns its path.

    The page shows the plan with its reasons, the training curves, what the machine did meanwhile, what each pass
    changed, and the receipts of the artifacts side by side. The file appears whole or not at all.

    Args:
        report: What the run did and measured; stages that did not run are left out of the page.
        path: The file to write, in a directory that exists. A file that is there is replaced.

    Example:
        >>> import tempfile
        >>> report = RunReport(
        ...     recipe="digits_cnn", description="Handwritten digits.", created="2026-01-31 12:00", environment={},
        ...     plan=(), phases=(), utilization=None, passes=(), receipts={},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     "Handwritten digits." in write_html(report, Path(directory) / "report.html").read_text()
        True
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template(TEMPLATE).render(
        report=report,
        key_figures=key_figures(report.receipts),
        problems=[(name, problem) for name, receipt in report.receipts.items() for problem in receipt.problems],
        curves=figures.curves(report.phases),
        usage=figures.utilization(report.utilization) if report.utilization else (),
        bars=figures.bars(report.receipts),
        receipt_rows={
            label: [show(receipt) for receipt in report.receipts.values()] for label, show in RECEIPT_ROWS.items()
        },
        kernels=sorted({kernel for receipt in report.receipts.values() for kernel in receipt.kernels}),
    )
    write_text(path, page)
    return path


def key_figures(receipts: Mapping[str, Receipt]) -> list[KeyFigure]:
    """Returns the headline: the last artifact, which is what the run was for, against the first, its float parent."""
    if not receipts:
        return []
    first, *_, last = (*receipts.values(), *receipts.values())
    return [
        _accuracy(receipts, last),
        _shrinkage("Size on disk", first.bytes_on_disk, last.bytes_on_disk),
        _shrinkage("Size as .tar.gz", first.gzip_bytes, last.gzip_bytes),
        _latency(last),
    ]


def _accuracy(receipts: Mapping[str, Receipt], last: Receipt) -> KeyFigure:
    if last.accuracy is None:
        return KeyFigure(label="Accuracy", value="unavailable", note=last.unavailable.get("accuracy", "not measured"))
    steps = [f"{name} {receipt.show('accuracy', '{:.2%}')}" for name, receipt in receipts.items()]
    return KeyFigure(label="Accuracy", value=f"{last.accuracy:.2%}", note=" → ".join(steps))


def _shrinkage(label: str, before: int, after: int) -> KeyFigure:
    if before == after:
        return KeyFigure(label=label, value=show_bytes(after), note=f"{after:,} bytes")
    value = f"{before / after:.1f}x smaller" if after < before else f"{after / before:.2f}x larger"
    return KeyFigure(label=label, value=value, note=f"{show_bytes(before)} → {show_bytes(after)}")


def _latency(last: Receipt) -> KeyFigure:
    latency = f"{last.latency_ms_median:.3g} ms"
    note = f"median, batch {last.batch_size}"
    if last.speedup is None:
        return KeyFigure(label="Latency", value=latency, note=note)
    return KeyFigure(label="Speed", value=last.show("speedup", "{:.2f}x"), note=f"{last.verdict}, {latency} {note}")
