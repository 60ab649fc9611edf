"""The timelines of several workers, put together from a directory that they share."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tfopt.atomic.files import write_text
from tfopt.errors import ArtifactError
from tfopt.report import Utilization

PREFIX = "utilization-"


def write_worker(directory: Path, utilization: Utilization) -> Path:
    """Writes the timeline of this worker, and returns its file.

    Args:
        directory: Directory that all workers share. It is made if it is missing.
        utilization: The timeline.
    Raises:
        ExportError: The file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{PREFIX}{_worker()}.json"
    write_text(path, utilization.to_json())
    return path


def merge_workers(directory: str | Path) -> Utilization:
    """Returns one timeline of all workers. The name of a series begins with the worker, as in "worker1_gpu0_...".

    The times of a worker count from the start of its own training. A worker has no value between its samples.

    Args:
        directory: The directory given to each worker's GpuMonitor.
    Raises:
        ArtifactError: The directory has no timeline, or a file is damaged.
    Example:
        >>> import tempfile
        >>> shared = Path(tempfile.mkdtemp())
        >>> one = Utilization(source="NVML (A100)", seconds=[0.0], series={"gpu0_power_watts": [9.0]})
        >>> _ = write_worker(shared, one)
        >>> list(merge_workers(shared).series)[0].endswith("_gpu0_power_watts")
        True
    """
    files = sorted(Path(directory).glob(f"{PREFIX}*.json"))
    if not files:
        raise ArtifactError(
            f"The directory must hold timelines of GpuMonitor. Received: {directory}, which has none. "
            "Pass directory=... to the GpuMonitor of each worker."
        )
    samples: list[tuple[float, dict[str, float | None]]] = []
    names: dict[str, None] = {}
    sources = []
    for file in files:
        worker = file.stem.removeprefix(PREFIX)
        try:
            read = json.loads(file.read_text())
            sources.append(f"{worker}: {read['source']}")
            columns = {f"{worker}_{name}": values for name, values in read["series"].items()}
            rows = [{name: values[place] for name, values in columns.items()} for place in range(len(read["seconds"]))]
            samples += zip(read["seconds"], rows, strict=True)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ArtifactError(f"A timeline is damaged. Received: {file} ({error}). Remove it.") from error
        names |= dict.fromkeys(columns)
    samples.sort(key=lambda sample: sample[0])
    return Utilization(
        source="; ".join(sources),
        seconds=[seconds for seconds, _ in samples],
        series={name: [row.get(name) for _, row in samples] for name in names},
    )


def _worker() -> str:
    """Returns "worker1" from TF_CONFIG, or the name of the host."""
    try:
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    except ValueError:
        task = {}
    return f"{task['type']}{task['index']}" if "type" in task and "index" in task else socket.gethostname()
