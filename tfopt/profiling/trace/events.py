"""The files of a trace and its events as plain values; and the same events in Chrome's JSON format, for Perfetto.

A trace is a directory named after the time, with one `.xplane.pb` for each host, which holds an XSpace.
An XSpace holds planes: one for the host, one for each GPU. A plane holds lines: threads of the host, streams of a GPU.
A line holds events. Its time stamp is in nanoseconds, and the offset and duration of an event are in picoseconds.
The names lie apart, in tables.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tfopt.atomic.files import read_stored
from tfopt.atomic.own_files import write_own
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
    """Returns the directory of the newest trace below a directory that `record_trace` or TensorBoard wrote."""
    # Names are times, but those of equal seconds have no order.
    found = {file.parent: file.stat().st_mtime for file in Path(directory).glob(f"{PROFILES}/*/*{ENDING}")}
    if not found:
        raise ArtifactError(
            f"A trace must contain {PROFILES}/TIME/HOST{ENDING}. Received: {directory}. "
            "Record a trace there with tfopt.profiling.trace.record_trace."
        )
    return max(found, key=lambda path: (found[path], path.name))


def read_spaces(trace: Path) -> Mapping[str, Any]:
    """Returns the XSpace of each host."""
    from tfopt.compat.tensorflow import empty_xspace  # it imports TensorFlow, which the names of files do not need

    spaces = {}
    for file in sorted(trace.glob(f"*{ENDING}")):
        space = empty_xspace()
        try:
            space.ParseFromString(read_stored(file))
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


CHROME_TRACE = "trace.json.gz"
PS_PER_US = 1e6
# Other programs write files of the same name and form. The format leaves "otherData" to whoever writes.
BEGIN: dict[str, Any] = {"displayTimeUnit": "ms", "otherData": {"writer": "tfopt"}}


def write_chrome_trace(spaces: Mapping[str, Any], path: Path) -> Path:
    """Writes all events that take time as compressed JSON, and returns the path.

    A host's threads and a GPU's streams are the rows. Times count from the first event.
    """
    lines = [line for line in read_lines(spaces) if line.events]
    first = min((line.events[0].start_ps for line in lines), default=0)
    trace = {**BEGIN, "traceEvents": list(_events(lines, first))}
    write_own(path, gzip.compress(json.dumps(trace).encode(), mtime=0), is_chrome_trace)
    return path


def is_chrome_trace(content: bytes) -> bool:
    """Whether a file is a trace that `write_chrome_trace` wrote; see tfopt.atomic.own_files."""
    begin = json.dumps(BEGIN).encode()[:-1]
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(content, len(begin)) == begin
    except zlib.error:
        return False


def _events(lines: list[Line], first: int) -> Iterator[dict[str, Any]]:
    planes = {plane: number for number, plane in enumerate(dict.fromkeys((line.host, line.plane) for line in lines))}
    for (host, plane), number in planes.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{host} {plane}"}}
    for row, line in enumerate(lines):
        where = {"pid": planes[line.host, line.plane], "tid": row}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": line.name}}
        for event in line.events:
            if event.end_ps > event.start_ps:
                start, duration = (event.start_ps - first) / PS_PER_US, (event.end_ps - event.start_ps) / PS_PER_US
                shown = {name: str(value) for name, value in event.stats.items() if not name.startswith("_")}
                yield {"ph": "X", "name": event.name, **where, "ts": start, "dur": duration, "args": shown}
