"""The schema beside the shards: what a directory of TFRecord files holds, and how it is read without its source.

schema.json                         written last: the directory is complete
unfinished.json                     the same while shards are missing, with the shards that are finished
train-00000-of-00008.tfrecord       a shard: its part, its number and the number of shards of the part
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tfopt.atomic.checked_json import CHECKSUM, EDITED, is_as_written, with_checksum
from tfopt.atomic.files import read_stored
from tfopt.atomic.own_files import json_with, write_own
from tfopt.errors import ConfigError

VERSION = 1
SCHEMA, UNFINISHED = "schema.json", "unfinished.json"
START_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its name, the number of its records, its size and its checksums."""

    file: str
    records: int
    bytes: int
    sha256: str
    start_sha256: str  # of the first 64 KiB, which tells files of one size apart
    source_sha256: str  # of the records of the source that it was written from


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What a directory of TFRecord files holds. The attributes up to `notes` are those of tfopt.data.Examples.

    Attributes:
        structure: Types and shapes of a stored example, see tfopt.data.records.encoding.
        decoders: Decoders of the inputs and of the targets, see tfopt.data.stored. None means that examples are
            stored as they are.
        compression: "" or "GZIP".
        parts: The shards of each part, in their order.
    """

    version: int = VERSION
    name: str
    outputs: int
    class_names: tuple[str, ...] = ()
    padding: Any = None
    ignored_target: int | None = None
    bytes_per_target: float = 1.0
    notes: tuple[str, ...] = ()
    structure: Any
    decoders: dict[str, dict[str, Any] | None] | None = None
    compression: str = ""
    parts: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)

    def same_source(self, other: Schema) -> bool:
        """Whether two schemas describe the same kind of examples, written in the same way."""
        ours, theirs = (_plain(replace(each, parts={}, notes=())) for each in (self, other))
        return ours == theirs

    def shards(self) -> dict[str, Shard]:
        """Returns the shards of all parts by their file names."""
        return {shard.file: shard for shards in self.parts.values() for shard in shards}


ADAPTER = TypeAdapter(Schema)
is_schema = json_with("sha256", "version", "name", "outputs", "structure", "parts")  # see tfopt.atomic.own_files


def write_schema(path: Path, schema: Schema) -> None:
    """Writes a schema with a checksum of its own, to no file that tfopt did not write."""
    write_own(path, json.dumps(with_checksum(_plain(schema)), indent=1) + "\n", is_schema)


def read_schema(path: Path) -> Schema:
    """Reads a schema. Raises ConfigError if the file is damaged, or of another version.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), SCHEMA)
        >>> write_schema(path, Schema(name="squares", outputs=1, structure={}))
        >>> read_schema(path).name
        'squares'
    """
    try:
        content = json.loads(read_stored(path).decode())
        if content["version"] != VERSION:
            raise ConfigError(
                f"A schema must have version {VERSION}, which this version of tfopt writes. "
                f"Received: {path} with version {content['version']!r}. Convert the examples again, or use the version "
                "of tfopt that wrote it."
            )
        if CHECKSUM not in content or not is_as_written(content):
            raise _damaged(path, EDITED)
        return ADAPTER.validate_python(content)
    except ConfigError:  # also a ValueError
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from error


def file_checksums(path: Path) -> tuple[str, str]:
    """Returns the checksum of a file, and that of its first 64 KiB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), start_checksum(path)


def start_checksum(path: Path) -> str:
    """Returns the checksum of the first 64 KiB of a file."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(START_BYTES)).hexdigest()


def _plain(schema: Schema) -> Any:
    """Returns a schema as JSON holds it: tuples are lists, NumPy numbers are numbers."""
    return json.loads(json.dumps(asdict(schema), default=lambda number: number.item()))


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"A schema must be a file that tfopt.data.convert wrote. Received: {path} ({reason}). Convert the examples "
        "again, or restore the file."
    )
