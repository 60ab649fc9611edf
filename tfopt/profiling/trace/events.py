"""The files of a trace, and its events as plain values, without the tables of names that an XSpace stores apart.

A trace is a directory named after the time, with one `.xplane.pb` for each host, which holds an XSpace.
An XSpace holds planes: one for the host, one for each GPU. A plane holds lines: threads of the host, streams of a GPU.
A line holds events. Its time stamp is in nanoseconds, and the offset and duration of an event are in picoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tfopt.errors import ArtifactError

PROFILES = Path("plugins", "profile")
ENDING = ".xplane.pb"
GPU_PLANE = "/device:GPU:"
HOST_PLANE = "/host:CPU"
# XProf adds these lines to the plane of a GPU. They show the events of the streams a second time, in groups.
DERIVED_LINES = frozenset(
    {
        *("Steps", "XLA Modules", "XLA Ops", "Async XLA Ops", "XLA TraceMe", "TensorFlow Ops"),
        *("TensorFlow Name Scope", "Framework Ops", "Framework Name Scope", "Source code", "Source"),
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its times in picoseconds, and its stats by their names.

    `kind` is the type of operator that the host's event names, for example "MatMul"; empty for another event.
    """

    name: str
    kind: str
    start_ps: int
    end_ps: int
    stats: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One thread of a host or one stream of a GPU, with its events in the order of their start."""

    host: str
    plane: str
    name: str
    events: list[Event]

    @property
    def is_gpu(self) -> bool:
        return self.plane.startswith(GPU_PLANE)


def newest_trace(directory: str | Path) -> Path:
    """Returns the directory of the newest trace below a directory that `record_trace` or TensorBoard wrote.

    Raises:
        ArtifactError: There is none.
    """
    # Names are times, but those of equal seconds have no order.
    found = {file.parent: file.stat().st_mtime for file in Path(directory).glob(f"{PROFILES}/*/*{ENDING}")}
    if not found:
        raise ArtifactError(
            f"A trace must contain {PROFILES}/TIME/HOST{ENDING}. Received: {directory}. "
            "Record a trace there with tfopt.profiling.trace.record_trace."
        )
    return max(found, key=lambda path: (found[path], path.name))


def read_spaces(trace: Path) -> Mapping[str, Any]:
    """Returns the XSpace of each host.

    Raises:
        ArtifactError: A file is broken.
    """
    from tfopt.compat.tensorflow import empty_xspace  # it imports TensorFlow, which the names of files do not need

    spaces = {}
    for file in sorted(trace.glob(f"*{ENDING}")):
        space = empty_xspace()
        try:
            space.ParseFromString(file.read_bytes())
        except (DecodeError, OSError) as error:
            raise ArtifactError(
                f"A trace must be a whole XSpace protobuf. Received: {file} ({error}). Record it again."
            ) from error
        spaces[file.name.removesuffix(ENDING)] = space
    return spaces


def read_lines(spaces: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the lines of all planes, without those that only repeat others."""
    for host, space in spaces.items():
        for plane in space.planes:
            stat_names = {key: value.name for key, value in plane.stat_metadata.items()}
            for line in plane.lines:
                if plane.name.startswith(GPU_PLANE) and line.name in DERIVED_LINES:
                    continue
                events = [_event(event, line, plane, stat_names) for event in line.events]
                # An event that contains others begins with the first of them, and comes before it.
                events.sort(key=lambda event: (event.start_ps, -event.end_ps))
                yield Line(host=host, plane=plane.name, name=line.display_name or line.name, events=events)


def _event(event: Any, line: Any, plane: Any, stat_names: Mapping[int, str]) -> Event:
    metadata = plane.event_metadata[event.metadata_id]
    start = line.timestamp_ns * 1000 + event.offset_ps
    name, colon, kind = metadata.name.rpartition(":")
    is_operator = bool(colon and name) and kind == metadata.display_name  # TensorFlow writes NAME:TYPE
    return Event(
        name=name if is_operator else metadata.name,
        kind=kind if is_operator else "",
        start_ps=start,
        end_ps=start + event.duration_ps,
        stats={stat_names.get(stat.metadata_id, ""): _value(stat, stat_names) for stat in event.stats},
    )


def _value(stat: Any, stat_names: Mapping[int, str]) -> Any:
    field = stat.WhichOneof("value")
    if field is None:
        return None
    # A text that occurs often is stored once, in the table of names.
    return stat_names.get(stat.ref_value, "") if field == "ref_value" else getattr(stat, field)
