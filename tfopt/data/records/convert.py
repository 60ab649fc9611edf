"""Writes examples as TFRecord files, which are read faster than many small files, from any disk or network.

The files are the same for the same source: the records in their order, divided into shards of equal numbers. If the
process is killed, the next call goes on after the last finished shard.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import check_utf8, flush_to_disk
from tfopt.compat.forks import check_not_forked
from tfopt.compat.tensorflow import words_of
from tfopt.data.examples import SPLITS, Examples, Split
from tfopt.data.records.earlier import earlier_shards, is_whole, other_source
from tfopt.data.records.encoding import features_of, flatten, serialize, structure_of
from tfopt.data.records.schema import (
    SCHEMA,
    UNFINISHED,
    Schema,
    Shard,
    file_checksums,
    write_schema,
)
from tfopt.data.stored import STORED, decoder_to_json, no_encoded_images
from tfopt.errors import ConfigError, ExportError, unknown_name
from tfopt.report import Record

SAMPLE = 64
# Files are read in large blocks, and several at a time. Files of this size give both to sets of a gigabyte and more.
SHARD_BYTES = 2**27
MOST_SHARDS = 1024
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConversionReport(Record):
    """What `convert` wrote.

    Attributes:
        directory: The directory of the files.
        examples: Number of examples by part.
        shards: Number of files by part.
        bytes: Size of all files.
        kept: Number of files that an earlier call had finished.
    """

    directory: str
    examples: dict[str, int]
    shards: dict[str, int]
    bytes: int
    kept: int = 0

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {count:,} in {self.shards[part]}" for part, count in self.examples.items())
        kept = f" {self.kept} of them were finished before." if self.kept else ""
        return f"{self.directory}: {parts} files, {self.bytes:,} bytes.{kept}"


def convert(
    examples: Examples,
    directory: str | Path,
    *,
    shards: Literal["auto"] | int = "auto",
    compression: Literal["", "GZIP"] = "",
    images: Literal["files", "jpeg", "pixels"] = "files",
    overwrite: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes examples as TFRecord files with a schema, which the source `tfrecord` reads.

    Images of a folder stay encoded as they are. Other examples are written decoded, as arrays, unless the source says
    otherwise in `Examples.stored`. If the process is killed, call it again: it checks the finished files, and goes on
    with the next one. A file has its final name only when it is whole.

    Args:
        examples: The examples of a source.
        directory: New or empty directory, or one of an earlier call.
        shards: Number of files for each part. "auto" makes files of about 128 MiB.
        compression: "GZIP" compresses the files. Reading them then takes longer, and damage costs the rest of a file.
            Encoded images hardly get smaller.
        images: How to store images. "files": the content of their files, so that they can be read at any size. "jpeg":
            resized as the source does, as a JPEG of quality 95; decoding then takes less time, and the pixels change a
            little. "pixels": resized, as uint8; the examples are the same and nothing is decoded any more, but an image
            takes height * width * channels bytes.
        overwrite: Whether to remove the files of an earlier call first, also those of other examples.
        check: Whether to decode each encoded record once, so that a damaged image is found now.
        progress: Function that is called with the number of records done and the number of all records.
    Raises:
        ConfigError: The directory holds something else or files of other examples; a part has no end; a record cannot
            be read or decoded, or has a type that TFRecord files cannot hold.
        ExportError: A file cannot be written, or another process writes to the directory.
    Example:
        >>> import tempfile
        >>> from tfopt.data.sources import SOURCES
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     print(convert(SOURCES["digits"](image_size=8).limit(100), Path(directory, "digits"), shards=2))
        /...digits: train 100 in 2, test 100 in 2 files, ... bytes.
    """
    check_not_forked()
    if compression not in ("", "GZIP"):
        raise ConfigError(f"compression must be '' or 'GZIP'. Received: compression={compression!r}.")
    if shards != "auto" and (isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= 99_999):
        raise ConfigError(f"shards must be 'auto' or a whole number in [1, 99999]. Received: shards={shards!r}.")
    if images not in ("files", "jpeg", "pixels"):
        raise unknown_name("images", str(images), ("files", "jpeg", "pixels"))
    if images != "files":
        if examples.stored is None:
            raise no_encoded_images(images, f"{examples.name!r}, whose examples are stored as arrays")
        examples = replace(examples, stored=examples.stored.with_images(images))
    target = Path(directory)
    check_utf8("directory", target)
    with exclusive(target):
        return _Conversion(examples, target, shards, compression, check, progress).run(overwrite)


class _PlannedShard(NamedTuple):
    """A shard to write: the records of its part from `start` on."""

    file: str
    start: int
    records: int


class _Conversion:
    def __init__(
        self,
        examples: Examples,
        directory: Path,
        shards: Literal["auto"] | int,
        compression: str,
        check: bool,
        progress: Progress | None,
    ) -> None:
        self.examples, self.directory, self.compression = examples, directory, compression
        self.check, self.progress, self.done = check, progress, 0
        self.parts: tuple[Split, ...] = tuple(part for part in SPLITS if getattr(examples, part) is not None)
        spec = self._stored("train").element_spec
        self.features = features_of(spec)
        self.source_features = features_of(examples.train.element_spec)
        self.plan = {part: self._planned(part, shards) for part in self.parts}
        self.total = sum(shard.records for planned in self.plan.values() for shard in planned)
        stored = examples.stored
        decoders: dict[str, Any] | None = None
        if stored is not None:
            decoders = {"inputs": decoder_to_json(stored.inputs), "targets": decoder_to_json(stored.targets)}
        self.schema = Schema(
            name=examples.name,
            outputs=int(examples.outputs),
            class_names=tuple(examples.class_names),
            padding=examples.padding,
            ignored_target=examples.ignored_target,
            bytes_per_target=float(examples.bytes_per_target),
            notes=tuple(examples.notes),
            structure=structure_of(spec),
            decoders=decoders,
            compression=compression,
        )

    def run(self, overwrite: bool) -> ConversionReport:
        files = {shard.file for planned in self.plan.values() for shard in planned}
        finished = earlier_shards(self.directory, self.schema, files, overwrite=overwrite)
        kept = 0
        for part in self.parts:
            whole = {shard.file: is_whole(self.directory, finished.get(shard.file)) for shard in self.plan[part]}
            for is_kept, group in groupby(self.plan[part], lambda shard: whole[shard.file]):  # noqa: B023 (used here)
                shards = list(group)
                if is_kept:
                    self._compare(part, shards, finished)
                    kept += len(shards)
                    continue
                for shard in self._write(part, shards):
                    finished[shard.file] = shard
                    self._note(UNFINISHED, finished)
        self._note(SCHEMA, finished)
        (self.directory / UNFINISHED).unlink(missing_ok=True)
        return ConversionReport(
            directory=str(self.directory),
            examples={part: sum(shard.records for shard in planned) for part, planned in self.plan.items()},
            shards={part: len(planned) for part, planned in self.plan.items()},
            bytes=sum(shard.bytes for shard in finished.values()),
            kept=kept,
        )

    def _stored(self, part: Split) -> tf.data.Dataset:
        if self.examples.stored is None:
            return self.examples.decoded(part)
        return self.examples.records(part).map(self._read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _read(self, *record: Any) -> dict[str, Any]:
        stored = self.examples.stored
        assert stored is not None
        name, inputs, targets, *weight = stored.read(*record)
        return dict(zip(STORED, (name, inputs, targets, *weight), strict=False))

    def _planned(self, part: Split, shards: Literal["auto"] | int) -> list[_PlannedShard]:
        """Divides the records of a part into shards that differ by one record at most."""
        records = self._number_of_records(part)
        if shards == "auto":
            first = self._stored(part).map(flatten).take(SAMPLE)
            sample = list(self._named(part, 0, first.as_numpy_iterator()))
            mean = sum(len(serialize(self.features, values)) for values in sample) / max(len(sample), 1)
            shards = int(min(max(round(records * mean / SHARD_BYTES), 1), MOST_SHARDS))
        count = max(min(shards, records), 1)
        edges = [records * i // count for i in range(count + 1)]
        names = [f"{part}-{i:05d}-of-{count:05d}.tfrecord" for i in range(count)]
        return [_PlannedShard(names[i], edges[i], edges[i + 1] - edges[i]) for i in range(count)]

    def _number_of_records(self, part: Split) -> int:
        """Returns the number of records of a part. They are read once if the source does not know it."""
        records = self.examples.records(part)
        count = int(records.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise ConfigError(
                f"A part must have an end to be written. Received: the {part} part of {self.examples.name!r}, which "
                "has none. Take a number of its examples: dataset.take(1000)."
            )
        if count == tf.data.UNKNOWN_CARDINALITY:
            count = int(records.reduce(tf.constant(0, tf.int64), lambda total, *_: total + 1))
        return count

    def _compare(self, part: Split, shards: list[_PlannedShard], finished: dict[str, Shard]) -> None:
        """Raises ConfigError unless finished shards were written from the records that the source has now."""
        records = _untuned(self.examples.records(part).map(flatten).skip(shards[0].start)).as_numpy_iterator()
        for shard in shards:
            checksum = hashlib.sha256()
            for _, values in zip(range(shard.records), records, strict=False):
                _add(checksum, serialize(self.source_features, values))
            if checksum.hexdigest() != finished[shard.file].source_sha256:
                raise other_source(self.examples.name, f"{self.directory / shard.file} was written from other records")
            self._count(shard.records)

    def _write(self, part: Split, shards: list[_PlannedShard]) -> Iterator[Shard]:
        start = shards[0].start
        records = self.examples.records(part).skip(start)
        pairs = records.map(self._pair, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        iterator = self._named(part, start, _untuned(pairs.prefetch(tf.data.AUTOTUNE)).as_numpy_iterator())
        for shard in shards:
            yield self._write_shard(shard, iterator)

    def _pair(self, *record: Any) -> tuple[Any, Any]:
        """Returns a record of the source, and what is stored of it."""
        stored, decode = self.examples.stored, self.examples.decode
        if stored is None:
            return flatten(*record), flatten(*record) if decode is None else flatten(decode(*record))
        read = self._read(*record)
        decoded = tf.nest.flatten(stored.decode(**read), expand_composites=True) if self.check else []
        with tf.control_dependencies(decoded):
            return flatten(*record), tuple(tf.identity(each) for each in flatten(read))

    def _named(self, part: Split, start: int, iterator: Iterator[Any]) -> Iterator[Any]:
        """Gives an error of TensorFlow the record at which it occurred."""
        number = start
        try:
            for each in iterator:
                yield each
                number += 1
        except tf.errors.OpError as error:
            record: Any = ()
            with suppress(tf.errors.OpError):  # the record itself may be what cannot be read
                record = next(self.examples.records(part).skip(number).map(flatten).as_numpy_iterator(), ())
            names = ", ".join(value.decode(errors="replace") for value in record if isinstance(value, bytes))
            raise ConfigError(
                "Every record must be readable. "
                f"Received: record {number} of the {part} part{f' ({names[:300]})' if names else ''}: "
                f"{words_of(error)}. Repair it, or leave it out of the source."
            ) from error

    def _write_shard(self, shard: _PlannedShard, iterator: Iterator[Any]) -> Shard:
        checksum = hashlib.sha256()
        with _new_file(self.directory / shard.file) as path:
            with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=self.compression)) as writer:
                for _ in range(shard.records):
                    pair = next(iterator, None)
                    if pair is None:
                        raise ConfigError(
                            "A part must have as many records as it says. "
                            f"Received: {self.examples.name!r}, whose records end within {shard.file}. "
                            "Correct the cardinality of the data set."
                        )
                    record, values = pair
                    _add(checksum, serialize(self.source_features, record))
                    writer.write(serialize(self.features, values))
                    self._count(1)
            whole, first = file_checksums(path)
            size = path.stat().st_size
            if not any((self.directory / name).exists() for name in (SCHEMA, UNFINISHED)):
                self._note(UNFINISHED, {})  # with the first shard, the directory shows who wrote it
        return Shard(
            file=shard.file,
            records=shard.records,
            bytes=size,
            sha256=whole,
            start_sha256=first,
            source_sha256=checksum.hexdigest(),
        )

    def _count(self, records: int) -> None:
        self.done += records
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _note(self, name: str, finished: dict[str, Shard]) -> None:
        parts: dict[str, tuple[Shard, ...]] = {
            part: tuple(finished[shard.file] for shard in planned if shard.file in finished)
            for part, planned in self.plan.items()
        }
        write_schema(self.directory / name, replace(self.schema, parts=parts))


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set that TensorFlow does not tune while it is read.

    An iterator ends with its tuner, which waits by the wall clock: if that is set back by days, for as long.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _add(checksum: Any, content: bytes) -> None:
    checksum.update(len(content).to_bytes(8, "little") + content)


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write. The file gets its final name when the block ends without an error."""
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
