"""One HTML page about a run. It needs no network and no script, so it can be mailed and archived."""

from __future__ import annotations

from pathlib import Path

import jinja2

from tfopt.atomic.files import write_text
from tfopt.report import RunReport
from tfopt.reporting import figures
from tfopt.reporting.receipt_table import key_figures, receipt_table

TEMPLATE = "html_page.html.jinja"


def write_html(report: RunReport, path: Path) -> Path:
    """Writes a run's report as one HTML page that opens offline, and returns its path.

    The page shows the plan with its reasons, the training curves, the load of the machine, the changes of each pass,
    and the receipts of the artifacts side by side. The file appears whole or not at all.

    Args:
        report: Results and measurements of the run. A stage that did not run is left out of the page.
        path: File to write, in an existing directory. An existing file is replaced.

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
        table=receipt_table(report.receipts, path.parent),
        source=_source(report),
        kernels=sorted({kernel for receipt in report.receipts.values() for kernel in receipt.kernels}),
    )
    write_text(path, page)
    return path


def _source(report: RunReport) -> str:
    """Returns the source of the utilization. Without a GPU, the reason of NVML is left out."""
    source = report.utilization.source if report.utilization else ""
    if source.startswith("psutil") and report.environment.get("GPU") == "none":
        return "psutil (no GPU)"
    return source
