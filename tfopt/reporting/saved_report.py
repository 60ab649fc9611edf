"""Reports on disk: a run, a diagnosis or a timeline as JSON in its directory, and back as the same record.

A file of an older or newer tfopt is read too: a value that it lacks has its default, and one that is unknown is left
out.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from tfopt.atomic.checked_json import EDITED, is_as_written, with_checksum
from tfopt.atomic.own_files import write_own
from tfopt.errors import ArtifactError
from tfopt.report import DiagnosisReport, Record, RunReport, Utilization
from tfopt.report.run_report import run_of

FILES: dict[type[Record], str] = {
    RunReport: "report.json",
    DiagnosisReport: "diagnosis.json",
    Utilization: "utilization.json",
}

END_OF_PAGE = b"<footer>Written by tfopt.</footer>\n</main>\n</body>\n</html>"  # of page.html.jinja

Found = TypeVar("Found", bound=Record)


def save_report(report: RunReport | DiagnosisReport | Utilization, directory: str | Path) -> Path:
    """Writes a report as JSON into a directory, and returns the path of the file.

    A run is report.json, a diagnosis diagnosis.json, the timeline of a monitor utilization.json.

    Raises:
        ConfigError: The file is there, and tfopt did not write it.
        ExportError: The file cannot be written.
    """
    path = Path(directory) / FILES[type(report)]
    write_own(path, json.dumps(with_checksum(report.to_dict()), indent=2), type(report).is_own)
    return path


def is_page(content: bytes) -> bool:
    """Whether a file is a page that tfopt wrote, of any version; see tfopt.atomic.own_files."""
    return content.rstrip().endswith(END_OF_PAGE)


def load_report(directory: str | Path) -> RunReport:
    """Returns the report that a directory holds.

    Of a directory with a diagnosis or a timeline only, the report of a run that has nothing else. A diagnosis beside a
    run without one belongs to the run.

    Raises:
        ArtifactError: There is no report, or it is broken.
    Example:
        >>> import tempfile
        >>> from tfopt.report import StepBreakdown
        >>> breakdown = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save_report(DiagnosisReport(name="mlp", breakdown=breakdown), directory)
        ...     load_report(directory).diagnosis.breakdown == breakdown
        True
    """
    found = {kind: Path(directory) / name for kind, name in FILES.items() if (Path(directory) / name).is_file()}
    if not found:
        raise ArtifactError(
            f"A report needs a directory with {', '.join(list(FILES.values())[:-1])} or {FILES[Utilization]}. "
            f"Received: {directory}. Give the export directory of `tfopt run`, or the directory of another report."
        )
    run = _read(found[RunReport], RunReport) if RunReport in found else None
    diagnosis = _read(found[DiagnosisReport], DiagnosisReport) if DiagnosisReport in found else None
    utilization = _read(found[Utilization], Utilization) if Utilization in found else None
    if run is None:
        written = datetime.datetime.fromtimestamp(next(iter(found.values())).stat().st_mtime).astimezone()
        name = Path(directory).resolve().name
        run = run_of(None, name=name, created=written.isoformat(timespec="seconds"))
    return replace(
        run,
        recipe=diagnosis.name if diagnosis and RunReport not in found else run.recipe,
        diagnosis=run.diagnosis or diagnosis,
        utilization=run.utilization or utilization,
    )


def _read(file: Path, kind: type[Found]) -> Found:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if not is_as_written(document):
            raise _broken(file, EDITED)
        values = _with_tuples(document)
        parts = _records_of_other_packages(values, kind)
        found = pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise _broken(file, f"{place}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(file, str(error)) from error
    return _with_parts(found, parts)


def _with_tuples(value: Any) -> Any:
    """Returns JSON with tuples for lists: the sequences of a record do not change."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _records_of_other_packages(values: Any, kind: type[Record]) -> dict[str, Record]:
    """Takes out the values whose fields only say `Record`, and returns them as records of their packages."""
    parts: dict[str, Record] = {}
    if not isinstance(values, dict):
        return parts
    if kind is RunReport and isinstance(values.get("input"), Mapping):
        from tfopt.data.measurement.report import InputReport

        parts["input"] = pydantic.TypeAdapter(InputReport).validate_python(values.pop("input"))
    of_diagnosis = values.get("diagnosis") if kind is RunReport else values
    if isinstance(of_diagnosis, dict) and isinstance(of_diagnosis.get("efficiency"), Mapping):
        from tfopt.profiling.cost import Efficiency  # here, because it imports TensorFlow

        parts["efficiency"] = pydantic.TypeAdapter(Efficiency).validate_python(of_diagnosis.pop("efficiency"))
    return parts


def _with_parts(found: Found, parts: Mapping[str, Record]) -> Found:
    if isinstance(found, RunReport):
        diagnosis = found.diagnosis and _with_parts(found.diagnosis, parts)
        return replace(found, input=parts.get("input"), diagnosis=diagnosis)
    if isinstance(found, DiagnosisReport):
        return replace(found, efficiency=parts.get("efficiency"))
    return found


def _broken(file: Path, reason: str) -> ArtifactError:
    return ArtifactError(f"A saved report must be whole. Received: {file} ({reason}). Make it again with its command.")
