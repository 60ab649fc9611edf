"""The directory that a conversion writes: what an earlier call left there, the shards of each part, and new files."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from tfopt.atomic.files import TEMPORARY_SUFFIX, flush_to_disk
from tfopt.atomic.own_files import check_replaceable
from tfopt.data.examples import Examples, Split
from tfopt.data.records.schema import (
    SCHEMA,
    UNFINISHED,
    Schema,
    Shard,
    file_checksums,
    is_schema,
    read_schema,
    shard_name,
)
from tfopt.errors import ConfigError, ExportError

SHARD = re.compile(r"(train|validation|test)-\d{5}-of-\d{5}\.tfrecord")
TEMPORARY = re.compile(rf"\..*{TEMPORARY_SUFFIX}")
# Files are read in large blocks, and several at a time. Files of this size give both to sets of a gigabyte and more.
SHARD_BYTES = 2**27
MOST_SHARDS = 1024


def earlier_shards(directory: Path, schema: Schema, files: Set[str], *, overwrite: bool) -> dict[str, Shard]:
    """Returns the shards that an earlier call wrote, and removes what it left unfinished.

    Args:
        directory: The directory to write to.
        schema: What is to be written.
        files: The names of the shards to write.
        overwrite: Whether to remove all files of an earlier call.
    Raises:
        ConfigError: The directory holds other files, or shards of other examples that may not be overwritten.
    """
    names = {path.name for path in directory.iterdir()}
    shards = {name for name in names if SHARD.fullmatch(name)}
    temporary = {name for name in names if TEMPORARY.fullmatch(name)}
    existing = next((name for name in (SCHEMA, UNFINISHED) if name in names), None)
    for name in names & {SCHEMA, UNFINISHED}:
        check_replaceable(directory / name, is_schema)
    others = names - temporary - {SCHEMA, UNFINISHED} - (set() if existing is None else shards)
    if others:
        raise ConfigError(
            "directory must be new, empty or one that convert wrote. "
            f"Received: directory={directory}, which holds {min(others)}. Choose another directory."
        )
    earlier = {}
    if overwrite:
        temporary = names
    elif existing is not None:
        found = read_schema(directory / existing)
        earlier = found.shards()
        if not found.same_source(schema) or not {*earlier} <= files:
            raise other_source(
                schema.name, f"{directory / existing} describes other examples, or another number of files"
            )
    for name in temporary:
        (directory / name).unlink()
    return earlier


def is_whole(directory: Path, shard: Shard | None) -> bool:
    """Whether a shard of an earlier call is there as it was written."""
    if shard is None:
        return False
    path = directory / shard.file
    try:
        return path.stat().st_size == shard.bytes and file_checksums(path)[0] == shard.sha256
    except OSError:  # it is missing
        return False


def other_source(name: str, reason: str) -> ConfigError:
    """Returns the error for files that were written from other examples."""
    return ConfigError(
        f"The source must be the one that the files were written from. Received: {name!r}, but {reason}. "
        "Set overwrite=True (--overwrite) to write all files again, or choose another directory."
    )


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write. The file gets its final name when the block ends without an error.

    Raises:
        ExportError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tfopt-{uuid.uuid4().hex}")
    try:
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)
        flush_to_disk(path.parent)
    except (OSError, tf.errors.OpError) as error:
        raise ExportError(
            f"The file could not be written. Received: {path} ({error}). Make room, or choose another directory. "
            "The finished files stay, and the next call goes on after them."
        ) from error
    finally:
        with suppress(OSError):  # it has its final name, or was never made
            temporary.unlink()


class PlannedShard(NamedTuple):
    """A shard to write: the records of its part from `start` on."""

    file: str
    start: int
    records: int


def planned_shards(part: str, records: int, shards: int) -> list[PlannedShard]:
    """Divides the records of a part into shards that differ by one record at most.

    Example:
        >>> [(shard.start, shard.records) for shard in planned_shards("train", records=8, shards=3)]
        [(0, 2), (2, 3), (5, 3)]
    """
    number = max(min(shards, records), 1)
    edges = [records * i // number for i in range(number + 1)]
    return [PlannedShard(shard_name(part, i, number), edges[i], edges[i + 1] - edges[i]) for i in range(number)]


def number_of_shards(total_bytes: float) -> int:
    """Returns the number of shards of about 128 MiB.

    Example:
        >>> number_of_shards(1e6), number_of_shards(1e9)
        (1, 7)
    """
    return min(max(round(total_bytes / SHARD_BYTES), 1), MOST_SHARDS)


def number_of_records(examples: Examples, part: Split) -> int:
    """Returns the number of records of a part. They are read once if the source does not know it.

    Raises:
        ConfigError: The part has no end.
    """
    records = examples.records(part)
    count = int(records.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            f"A part must have an end to be written. Received: the {part} part of {examples.name!r}, which has none. "
            "Take a number of its examples: dataset.take(1000)."
        )
    if count == tf.data.UNKNOWN_CARDINALITY:
        count = int(records.reduce(tf.constant(0, tf.int64), lambda total, *_: total + 1))
    return count
