"""Data sets of the records in TFRecord files, whose errors name the file and the record.

TensorFlow checks each record against its checksum. Its error gives neither the file nor the number of the record, and
no function inside tf.data can catch it. But the number of records in each file is known. So the rest of a damaged file
is dropped (`ignore_errors`), the end of each file is followed by an element that fails with a message, and only as many
elements are taken as the file has records. The failing element is reached only if records are missing.

Damaged files are found before they are read, and their damaged records left out where the user allows it.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfopt.atomic.scratch import scratch_directory
from tfopt.data.records.frames import READ_BYTES, Frame, frames_of, good_records
from tfopt.data.records.schema import Shard, file_checksums, start_checksum
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_stored

# Files that are read at the same time, and records that are taken from one before the next: the order depends on both,
# so neither depends on the machine.
FILES_AT_A_TIME = 4
BLOCK = 16
SHOWN = 5


def records_of(
    files: Sequence[Path], counts: Sequence[int], compression: str = "", files_at_a_time: int = FILES_AT_A_TIME
) -> tf.data.Dataset:
    """Returns the records of TFRecord files, string scalars, always in the same order.

    Args:
        files: The files.
        counts: Number of records of each file.
        files_at_a_time: Number of files that are read at the same time. It decides the order.
    Raises:
        tf.errors.InvalidArgumentError: While reading: a file is damaged, or holds another number of records.
        tf.errors.NotFoundError, tf.errors.PermissionDeniedError: While reading: a file cannot be opened.
    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> with tf.io.TFRecordWriter(str(path)) as writer:
        ...     for i in range(3):
        ...         writer.write(bytes([i]))
        >>> list(records_of([path], [3]).as_numpy_iterator())
        [b'\\x00', b'\\x01', b'\\x02']
    """

    def read(file: Any, count: Any) -> tf.data.Dataset:
        def failing(file: Any) -> tf.Tensor:
            good = tf.data.TFRecordDataset(file, compression, READ_BYTES).ignore_errors()
            number = good.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1)
            words = "A TFRecord file must be whole and unchanged. Received, damaged at record"
            advice = "(counted from 0). Restore the file, convert the examples again, or set skip_damaged. File:"
            with tf.control_dependencies([tf.debugging.Assert(False, [words, number, advice, file])]):
                return tf.identity(file)

        file = _opened(file)
        whole = tf.data.TFRecordDataset(file, compression, READ_BYTES).ignore_errors()
        return whole.concatenate(tf.data.Dataset.from_tensors(file).map(failing)).take(count)

    paths = [str(file) for file in files]
    dataset = tf.data.Dataset.from_tensor_slices((tf.constant(paths, tf.string), tf.constant(counts, tf.int64)))
    dataset = dataset.interleave(
        read,
        cycle_length=max(min(files_at_a_time, len(paths)), 1),
        block_length=BLOCK,
        num_parallel_calls=max(min(files_at_a_time, len(paths)), 1),
        deterministic=True,
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(sum(counts)))


def _opened(file: tf.Tensor) -> tf.Tensor:
    """Returns the name of a file, and fails if it cannot be opened: ignoring that error, TensorFlow tries for ever."""
    first = tf.data.FixedLengthRecordDataset(file, record_bytes=1).take(1)
    with tf.control_dependencies([first.reduce(tf.constant(0), lambda number, _: number)]):
        return tf.identity(file)


class Part(NamedTuple):
    """The files of one part that can be read, and the number of records of each."""

    files: list[Path]
    counts: list[int]


class _Problem(NamedTuple):
    path: Path
    words: str
    can_be_skipped: bool = True


def usable_files(
    directory: Path, parts: Mapping[str, Sequence[Shard]], *, check: str, skip_damaged: int, compression: str
) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Returns the files of each part, and notes about records that are left out. For the rest see `tfrecord`.

    Args:
        parts: The shards of each part, as they were written.
    Raises:
        ConfigError: A file is missing, damaged or of other examples, and its records may not be left out.
    """
    check = "checksum" if skip_damaged else check
    problems = {}
    for shard in itertools.chain.from_iterable(parts.values()):
        problem = _problem(directory / shard.file, shard, check, compression)
        if problem is not None:
            problems[shard.file] = problem
    if problems and (not skip_damaged or not all(problem.can_be_skipped for problem in problems.values())):
        raise _error(list(problems.values()), "")
    usable, notes, lost = {}, [], 0
    for part, shards in parts.items():
        files, counts = [], []
        for shard in shards:
            path, count = directory / shard.file, shard.records
            if shard.file in problems:
                path, count, words = _repaired(path, shard, skip_damaged - lost, compression)
                lost += shard.records - count
                notes.append(f"{shard.file}: {words} Left out: {shard.records - count} of {shard.records} records.")
                if lost > skip_damaged:
                    limit = f" At most skip_damaged={skip_damaged} records may be left out, and {lost} are damaged."
                    raise _error(list(problems.values()), limit)
            if count:
                files.append(path)
                counts.append(count)
        usable[part] = Part(files, counts)
    return usable, tuple(notes)


def _problem(path: Path, shard: Shard, check: str, compression: str) -> _Problem | None:
    check_stored("A TFRecord file", path)
    if check == "off":
        return None
    try:
        size = path.stat().st_size
        same = size == shard.bytes
        if same and check == "size":
            same = start_checksum(path) == shard.start_sha256
        elif same:
            same = file_checksums(path)[0] == shard.sha256
    except FileNotFoundError:
        return _Problem(path, "it is missing")
    except OSError as error:
        return _Problem(path, f"it cannot be read: {error.strerror}")
    if same:
        return None
    good = good_records(path, compression)
    if good < shard.records:
        bytes_left = "" if size == shard.bytes else f", with {size:,} of {shard.bytes:,} bytes"
        return _Problem(path, f"it is damaged at record {good} of {shard.records} (counted from 0){bytes_left}")
    words = f"it holds {good} whole records, but others than were written. Is it of another conversion?"
    return _Problem(path, words, can_be_skipped=False)


def _repaired(path: Path, shard: Shard, allowed: int, compression: str) -> tuple[Path, int, str]:
    """Returns a file of the whole records of a damaged one, their number, and what is damaged.

    The file is a temporary copy, which is removed when the process ends.
    """
    if not path.exists():
        return path, 0, "It is missing."
    if compression:
        good = good_records(path, compression)
        return path, good, f"Nothing can be read from record {good} on, because the file is compressed."
    frames = frames_of(path)
    stack = ExitStack()
    folder = stack.enter_context(scratch_directory())
    atexit.register(stack.close)
    damaged: list[int] = []
    start = 0
    rest, copy = folder / "rest", folder / path.name
    while start < len(frames) and len(damaged) <= allowed:
        _copy(path, frames[start:], rest)
        start += good_records(rest)
        if start < len(frames):
            damaged.append(start)
            start += 1
    rest.unlink(missing_ok=True)
    whole = [frame for i, frame in enumerate(frames[:start]) if i not in set(damaged)][: shard.records]
    _copy(path, whole, copy)
    words = [f"Damaged records (counted from 0): {', '.join(map(str, damaged))}."] if damaged else []
    if len(frames) < shard.records:
        words.append(f"Nothing can be read from record {len(frames)} on.")
    return copy, len(whole), " ".join(words)


def _copy(source: Path, frames: Sequence[Frame], target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as copy:
        for frame in frames:
            file.seek(frame.start)
            copy.write(file.read(frame.size))


def _error(problems: Sequence[_Problem], limit: str) -> ConfigError:
    listed = "; ".join(f"{problem.path}: {problem.words}" for problem in problems[:SHOWN])
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return ConfigError(
        f"TFRecord files must be as they were written.{limit} Received {len(problems)} that are not: {listed}{more}. "
        "Restore them, convert the examples again, or set skip_damaged to the number of records that may be lost."
    )
