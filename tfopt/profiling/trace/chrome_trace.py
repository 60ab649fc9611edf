"""A trace in Chrome's JSON format, which Perfetto opens without XProf."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfopt.atomic.own_files import write_own
from tfopt.profiling.trace.events import Line, read_lines

CHROME_TRACE = "trace.json.gz"
PS_PER_US = 1e6
# Other programs write files of the same name and form. The format leaves "otherData" to whoever writes.
BEGIN: dict[str, Any] = {"displayTimeUnit": "ms", "otherData": {"writer": "tfopt"}}


def write_chrome_trace(spaces: Mapping[str, Any], path: Path) -> Path:
    """Writes all events that take time as compressed JSON, and returns the path.

    A host's threads and a GPU's streams are the rows. Times count from the first event.

    Raises:
        ConfigError: The file is there, and tfopt did not write it.
        ExportError: The file cannot be written.
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
