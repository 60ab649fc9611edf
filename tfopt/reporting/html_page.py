"""One self-contained HTML page about a run: it needs no network and no script, so it can be mailed and kept."""

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
        table=receipt_table(report.receipts, path.parent),
        source=_source(report),
        kernels=sorted({kernel for receipt in report.receipts.values() for kernel in receipt.kernels}),
    )
    write_text(path, page)
    return path


def _source(report: RunReport) -> str:
    """Returns where the utilization comes from. Why NVML cannot be read is of no use where there is no GPU."""
    source = report.utilization.source if report.utilization else ""
    if source.startswith("psutil") and report.environment.get("GPU") == "none":
        return "psutil (no GPU)"
    return source
