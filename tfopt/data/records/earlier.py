"""What an earlier conversion left in a directory: its finished shards, and the files that it was writing."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

from tfopt.atomic.files import TEMPORARY_SUFFIX
from tfopt.atomic.own_files import check_replaceable
from tfopt.data.records.schema import SCHEMA, UNFINISHED, Schema, Shard, file_checksums, is_schema, read_schema
from tfopt.errors import ConfigError

SHARD = re.compile(r"(train|validation|test)-\d{5}-of-\d{5}\.tfrecord")
TEMPORARY = re.compile(rf"\..*{TEMPORARY_SUFFIX}")


class OtherSourceError(ConfigError):
    """The files were written from other examples than those given."""


def earlier_shards(directory: Path, schema: Schema, files: Set[str], *, overwrite: bool) -> dict[str, Shard]:
    """Returns the shards that an earlier call wrote, and removes what it left unfinished; with `overwrite` all files.

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


def other_source(name: str, reason: str) -> OtherSourceError:
    """Returns the error for files that were written from other examples."""
    return OtherSourceError(
        f"The source must be the one that the files were written from. Received: {name!r}, but {reason}. "
        "Set overwrite=True (--overwrite) to write all files again, or choose another directory."
    )
