"""The files of a trace: one `.xplane.pb` for each host, in a directory named after the time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tfopt.compat.tensorflow import empty_xspace
from tfopt.errors import ArtifactError

PROFILES = Path("plugins", "profile")
ENDING = ".xplane.pb"


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
