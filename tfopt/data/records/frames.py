"""The frames of a TFRecord file, which hold one record each.

    length of the record    8 bytes, little-endian
    checksum of the length  4 bytes
    record
    checksum of the record  4 bytes

The checksum is CRC-32C, rotated by 15 bits plus a constant. Python computes it for the lengths. TensorFlow checks the
records, because that takes too long in Python.

A compressed file is a stream of frames. TensorFlow takes the end of a stream that is cut off for the end of the file,
and says nothing. So Python counts the records of such a file: it reads the stream to its end marker, where gzip and
zlib have a checksum of all bytes.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import tensorflow as tf

HEADER, FOOTER = 12, 4
GZIP = b"\x1f\x8b"
# Larger blocks were slower: they do not stay in the processor's cache.
READ_BYTES = 2**18
POLYNOMIAL, ROTATED_BY, CONSTANT = 0x82F63B78, 15, 0xA282EAD8


class Frame(NamedTuple):
    """The place of a record in its file, in bytes."""

    start: int
    size: int


def frames_of(path: Path) -> list[Frame]:
    """Returns the frames of a file up to the first whose length is damaged or that is cut off.

    Raises:
        OSError: The file cannot be read.
    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> with tf.io.TFRecordWriter(str(path)) as writer:
        ...     writer.write(b"abc")
        ...     writer.write(b"")
        >>> frames_of(path)
        [Frame(start=0, size=19), Frame(start=19, size=16)]
    """
    return list(_frames(path))


def _frames(path: Path) -> Iterator[Frame]:
    with path.open("rb") as file:
        end, start = file.seek(0, 2), 0
        while start + HEADER + FOOTER <= end:
            file.seek(start)
            header = file.read(HEADER)
            size = HEADER + int.from_bytes(header[:8], "little") + FOOTER
            if start + size > end or _checksum(header[:8]) != int.from_bytes(header[8:], "little"):
                return
            yield Frame(start, size)
            start += size


def whole_records(path: Path, compression: str = "") -> tuple[int, str | None]:
    """Returns the number of records up to the first problem of a file, and the problem; None if the file is whole.

    A file that ends between two records is whole, unless it is compressed. The bytes of the records of a file without
    compression are not looked at.

    Raises:
        OSError: The file cannot be read.
    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
        ...     writer.write(b"abc")
        >>> whole_records(path, "GZIP")
        (1, None)
        >>> _ = path.write_bytes(path.read_bytes()[:-1])
        >>> whole_records(path, "GZIP")
        (1, 'it is cut off after record 0')
    """
    if compression:
        return _records_of_stream(path, compression)
    frames = frames_of(path)
    end = frames[-1].start + frames[-1].size if frames else 0
    if end == path.stat().st_size:
        return len(frames), None
    with path.open("rb") as file:
        known = "" if frames else _looks_compressed(file.read(2))
    return len(frames), known or (
        f"it is cut off or damaged at record {len(frames)}, byte {end:,}"
        if frames
        else "it is no TFRecord file, or it is damaged at record 0"
    )


def _records_of_stream(path: Path, compression: str) -> tuple[int, str | None]:
    count = 0
    try:
        with gzip.open(path) if compression == "GZIP" else io.BufferedReader(_Zlib(path.open("rb"))) as file:
            while header := file.read(HEADER):
                size = int.from_bytes(header[:8], "little") + FOOTER
                if len(header) < HEADER or _checksum(header[:8]) != int.from_bytes(header[8:], "little"):
                    return count, f"its stream holds no record {count}"
                if len(file.read(size)) < size:
                    return count, f"its stream ends within record {count}"
                count += 1
    except EOFError:
        return count, f"it is cut off after record {count - 1}" if count else "it is cut off or empty"
    except (gzip.BadGzipFile, zlib.error) as error:
        if not count and next(_frames(path), None) is not None:
            return 0, "it is not compressed: compression=''"
        with path.open("rb") as raw:
            other = "" if count else _looks_compressed(raw.read(2), other_than=compression)
        return count, other or f"it is damaged after {count} records: {error}"
    return count, None if path.stat().st_size else "it is empty"


class _Zlib(io.RawIOBase):
    """The content of a stream that zlib compressed, up to its end marker and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._stream = file, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._stream.eof:
            given = self._stream.unconsumed_tail or self._file.read(READ_BYTES)
            found = self._stream.decompress(given, len(buffer))
            buffer[: len(found)] = found
            if found:
                return len(found)
            if not given:
                raise EOFError
        if self._stream.unused_data or self._file.read(1):
            raise zlib.error("other bytes follow the end of the stream")
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()


def _looks_compressed(start: bytes, other_than: str = "") -> str:
    """Returns words about the compression that the first two bytes of a file show, or nothing."""
    is_zlib = len(start) == 2 and start[0] & 15 == 8 and int.from_bytes(start, "big") % 31 == 0
    found = "GZIP" if start == GZIP else "ZLIB" if is_zlib else ""
    return f"it begins like a file with compression={found!r}" if found and found != other_than else ""


def good_records(path: Path, compression: str = "") -> int:
    """Returns the number of records that TensorFlow reads before the first damaged one, or of all records."""
    # The size of the blocks decides how many records TensorFlow gives before the damage of a compressed file.
    records = tf.data.TFRecordDataset(str(path), compression, READ_BYTES).ignore_errors()
    return int(records.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1))


def _checksum(content: bytes) -> int:
    rest = 0xFFFFFFFF
    for byte in content:
        rest = TABLE[(rest ^ byte) & 0xFF] ^ (rest >> 8)
    rest ^= 0xFFFFFFFF
    return (((rest >> ROTATED_BY) | (rest << (32 - ROTATED_BY))) + CONSTANT) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        rest = byte
        for _ in range(8):
            rest = rest >> 1 ^ (POLYNOMIAL if rest & 1 else 0)
        table.append(rest)
    return table


TABLE = _table()
