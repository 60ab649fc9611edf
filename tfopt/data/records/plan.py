"""How many TFRecord files a part becomes, and which records each of them holds."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfopt.data.examples import Examples, Split
from tfopt.data.records.schema import shard_name
from tfopt.errors import ConfigError

# Files are read in large blocks, and several at a time. Files of this size give both to sets of a gigabyte and more.
SHARD_BYTES = 2**27
MOST_SHARDS = 1024


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
