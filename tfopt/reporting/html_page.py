"""One HTML page about a run. It needs no network and no script, so it can be mailed and archived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from tfopt.atomic.own_files import write_own
from tfopt.report import DiagnosisReport, RunReport
from tfopt.report.run_report import run_of
from tfopt.reporting.figures import bars, curves, step_stack, utilization
from tfopt.reporting.receipts import UNKNOWN, key_figures, receipt_table
from tfopt.reporting.saved_report import is_page
from tfopt.terminal import printable

TEMPLATES = Path(__file__).parent / "templates"


def write_html(report: RunReport, path: Path) -> Path:
    """Writes a run's report as one HTML page that opens offline, and returns its path.

    The page shows the plan with its reasons, the training curves, where the time of a step goes and what to change,
    the load of the machine, the changes of each pass, and the receipts of the artifacts side by side. The file appears
    whole or not at all.

    Args:
        report: Results and measurements of the run. A stage that did not run is left out of the page.
        path: File to write, in an existing directory. An earlier page of tfopt is replaced.
    Raises:
        ConfigError: The file is there, and tfopt did not write it.
        ExportError: The file cannot be written.
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
    return _write(report, None, path)


def write_diagnosis_html(report: DiagnosisReport, path: Path, *, after: DiagnosisReport | None = None) -> Path:
    """Writes a diagnosis as one HTML page that opens offline, and returns its path.

    With the diagnosis after the advice was applied, the page shows both steps, and what is left to change.

    Example:
        >>> import tempfile
        >>> from tfopt.report import StepBreakdown
        >>> breakdown = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     report = DiagnosisReport(name="mlp", breakdown=breakdown)
        ...     "input 6 ms (60%)" in write_diagnosis_html(report, Path(directory) / "report.html").read_text()
        True
    """
    return _write(run_of(after or report, name=report.name), report if after else None, path)


def render(template: str, **values: Any) -> str:
    """Returns a page made of a template. A value that the template uses and that is not given is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # Markup is ours
    )
    return templates.get_template(template).render(**values)


def _write(report: RunReport, before: DiagnosisReport | None, path: Path) -> Path:
    diagnosis = report.diagnosis
    measured = {"before": before, "after": diagnosis} if before else {"step": diagnosis}
    breakdowns = {name: each.breakdown for name, each in measured.items() if each}
    page = render(
        "run.html.jinja",
        title=report.recipe,
        report=report,
        key_figures=key_figures(report.receipts),
        problems=[(name, problem) for name, receipt in report.receipts.items() for problem in receipt.problems],
        curves=curves(report.phases),
        usage=utilization(report.utilization) if report.utilization else (),
        bars=bars(report.receipts),
        steps=step_stack(breakdowns),
        step_note=_step_note(diagnosis) if diagnosis else "",
        efficiency=_efficiency(diagnosis),
        trace=diagnosis.trace if diagnosis else None,
        table=receipt_table(report.receipts, path.parent),
        source=_source(report),
        kernels=sorted({kernel for receipt in report.receipts.values() for kernel in receipt.kernels}),
        dash=UNKNOWN,
    )
    write_own(path, page, is_page)
    return path


def _step_note(diagnosis: DiagnosisReport) -> str:
    found = diagnosis.breakdown
    words = [f"Mean of {found.steps} steps with {found.batch_size} examples each."]
    if found.input_alone_ms is not None:
        words.append(f"The input pipeline alone makes a batch in {found.input_alone_ms:.3g} ms.")
    if found.callbacks_ms:
        words.append(f"Of the host's time, {found.callbacks_ms:.3g} ms are in callbacks.")
    if found.traces:
        words.append(f"The step was traced {found.traces} times again, {found.build_ms:.3g} ms per step.")
    if len(found.replica_ms) > 1:
        words.append(f"The replicas compute in {', '.join(f'{ms:.3g}' for ms in found.replica_ms)} ms.")
    if found.doubt:
        words.append(found.doubt)
    return " ".join(words)


def _efficiency(diagnosis: DiagnosisReport | None) -> dict[str, str]:
    """Returns the figures of tfopt.profiling.cost.Efficiency as text. This module knows no more of that record."""
    rows = getattr(diagnosis.efficiency if diagnosis else None, "rows", None)
    return {name[0].upper() + name[1:]: str(value) for name, value in rows().items()} if rows else {}


def _source(report: RunReport) -> str:
    """Returns the source of the utilization, with remarks. Without a GPU, the reason of NVML is left out."""
    if report.utilization is None:
        return ""
    source = report.utilization.source
    if source.startswith("psutil") and report.environment.get("GPU") == "none":
        source = "psutil (no GPU)"
    return "; ".join([source, *report.utilization.notes])
