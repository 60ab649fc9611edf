"""The frames of a TFRecord file without compression, which hold one record each.

    length of the record    8 bytes, little-endian
    checksum of the length  4 bytes
    record
    checksum of the record  4 bytes

The checksum is CRC-32C, rotated by 15 bits plus a constant. Python computes it for the lengths. TensorFlow checks the
records, because that takes too long in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

HEADER, FOOTER = 12, 4
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


def good_records(path: Path, compression: str = "") -> int:
    """Returns the number of records before the first damaged one, or of all records."""
    records = tf.data.TFRecordDataset(str(path), compression, buffer_size=2**22).ignore_errors()
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
