"""Data sets of the records in TFRecord files, whose errors name the file and the record.

TensorFlow checks each record against its checksum. Its error gives neither the file nor the number of the record, and
no function inside tf.data can catch it. But the number of records in each file is known. So the rest of a damaged file
is dropped (`ignore_errors`), the end of each file is followed by an element that fails with a message, and only as many
elements are taken as the file has records. The failing element is reached only if records are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.data.records.frames import READ_BYTES

# Files that are read at the same time, and records that are taken from one before the next: the order depends on both,
# so neither depends on the machine.
FILES_AT_A_TIME = 4
BLOCK = 16


def records_of(
    files: Sequence[Path], counts: Sequence[int], compression: str = "", files_at_a_time: int = FILES_AT_A_TIME
) -> tf.data.Dataset:
    """Returns the records of TFRecord files, string scalars, always in the same order.

    Args:
        files: The files.
        counts: Number of records of each file.
        compression: "", "GZIP" or "ZLIB".
        files_at_a_time: Number of files that are read at the same time. It decides the order.
    Raises:
        tf.errors.InvalidArgumentError: While reading: a file is damaged, or holds another number of records.
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
