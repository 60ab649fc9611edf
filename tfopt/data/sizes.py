"""The bytes that examples take, computed from their shapes or estimated from the first; and a cache in free memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of
from tfopt.errors import warn
from tfopt.report.formatting import memory_size

# The bytes that tf.data holds for each tensor in addition to its content: 200, measured with scalars.
BYTES_PER_TENSOR = 200
SAMPLE = 32
# The data sets that hold their elements in memory, and those that choose among the elements of another data set.
IN_MEMORY = ("TensorSlice", "TensorDataset", "Range", "Sparse")
CHOOSING = ("Take", "Skip", "Shard", "Options", "AssertCardinality", "Concatenate", "Zip", "UnaryUnchanged")
# The share of the free memory that examples may take. The model, its training and the batches need the rest.
SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Size:
    """The number of examples and the bytes of each.

    Attributes:
        count: Number of examples; None if the data set does not know it, or if it has no end.
        content: Mean bytes of the content of an example; None if its shape does not determine them.
        tensors: Mean number of tensors of an example. tf.data holds further bytes for each in memory.
        endless: Whether the data set has no end.

    Example:
        >>> size_of(tf.data.Dataset.range(10)).total
        2080
    """

    count: int | None
    content: float | None
    tensors: float
    endless: bool = False

    @property
    def each(self) -> float | None:
        """Bytes of an example in memory; None if they are not known."""
        return None if self.content is None else self.content + BYTES_PER_TENSOR * self.tensors

    @property
    def total(self) -> int | None:
        """Bytes of all examples in memory; None if they are not known."""
        return None if self.count is None or self.each is None else int(self.count * self.each)


def size_of(records: tf.data.Dataset, decode: Callable[..., Any] | None = None, *, sampled: bool = False) -> Size:
    """Returns the size of the examples that `decode` makes of records, or of the records if there is no function.

    Args:
        records: Data set of records.
        decode: Function from a record to an example.
        sampled: Whether to read and decode the first records if shapes do not determine the bytes.
    """
    decoded = records if decode is None else records.map(decode)
    cardinality = int(records.cardinality())
    specs = tf.nest.flatten(decoded.element_spec)
    content, tensors = _content_by_specs(specs), float(len(specs))
    if content is None and sampled:
        found = [tf.nest.flatten(example, expand_composites=True) for example in decoded.take(SAMPLE)]
        content = sum(_content(tensor) for each in found for tensor in each) / max(len(found), 1)
        tensors = sum(map(len, found)) / max(len(found), 1)
    return Size(
        count=cardinality if cardinality >= 0 else None,
        content=content,
        tensors=tensors,
        endless=cardinality == tf.data.INFINITE_CARDINALITY,
    )


def _content_by_specs(specs: Sequence[Any]) -> float | None:
    total = 0
    for each in specs:
        elements = each.shape.num_elements() if isinstance(each, tf.TensorSpec) else None
        if elements is None or not has_size(each.dtype):
            return None
        total += elements * each.dtype.size
    return float(total)


def has_size(dtype: tf.DType) -> bool:
    """Returns whether the values of a type all have the same number of bytes."""
    return dtype not in (tf.string, tf.variant, tf.resource)


def is_in_memory(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set only chooses among tensors that it holds, so that a cache would hold them twice.

    Example:
        >>> is_in_memory(tf.data.Dataset.range(9).take(3)), is_in_memory(tf.data.Dataset.range(9).map(abs))
        (True, False)
    """
    kind = type(dataset).__name__
    inputs = inputs_of(dataset)
    if not inputs:
        return any(word in kind for word in IN_MEMORY)
    return any(word in kind for word in CHOOSING) and all(map(is_in_memory, inputs))


def _content(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size if has_size(tensor.dtype) else 0


def cached(dataset: tf.data.Dataset, *, count: bool = True) -> tf.data.Dataset:
    """Returns a data set that keeps its examples in memory, or the same data set if they do not fit.

    If the data set knows the number and the shape of its examples, their size is computed first. Otherwise the bytes
    are counted while the examples are read, and reading ends with an error when the limit is exceeded.

    Args:
        dataset: Data set of examples.
        count: Whether the bytes may be counted. TensorFlow does not find the files of a data set behind the counting,
            so it cannot divide them among workers.
    Warns:
        TfoptWarning: The examples do not fit, or the data set is infinite.
    Example:
        >>> dataset = cached(tf.data.Dataset.range(1000))
        >>> len(dataset)
        1000
    """
    examples, each = int(dataset.cardinality()), size_of(dataset).each
    limit = int(SHARE * available_memory_bytes())
    if examples == tf.data.INFINITE_CARDINALITY:
        _warn("the data set is infinite")
        return dataset
    if examples == tf.data.UNKNOWN_CARDINALITY or each is None:
        return (_limited(dataset, limit) if count else dataset).cache()
    if examples * each > limit:
        sizes = f"they take {memory_size(examples * each)}, and {memory_size(limit)} may be used"
        _warn(f"{sizes} ({SHARE:.0%} of the free memory)")
        return dataset
    return dataset.cache()


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that this process can still take: the free memory, within the limits of its control groups.

    Args:
        root: Directory that holds `proc` and `sys`.
    Example:
        >>> available_memory_bytes() > 0
        True
    """
    free = [psutil.virtual_memory().available, *_left_in_groups(root)]
    return max(min(free), 0)


def _left_in_groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, limit, used, reclaimable = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        group = top / name.strip("/")
        for each in (group, *group.parents):
            if each == mount.parent:
                break
            try:
                # Cached files count as used, but the kernel drops them when memory is needed.
                stat = dict(row.split() for row in (each / "memory.stat").read_text().splitlines())
                in_use = int((each / used).read_text()) - int(stat.get(reclaimable, 0))
                yield int((each / limit).read_text()) - in_use
            except (OSError, ValueError):  # a container shows no such group, or no limit ("max") is set
                continue


def _limited(dataset: tf.data.Dataset, limit: int) -> tf.data.Dataset:
    """Counts the bytes of the examples, and fails at the example that exceeds the limit."""
    if any(
        isinstance(spec, tf.RaggedTensorSpec) and not spec.ragged_rank for spec in tf.nest.flatten(dataset.element_spec)
    ):
        # A row of a ragged tensor is a plain tensor, and `scan` would forget that the rows differ in length. A batch of
        # one row is a ragged tensor, which it keeps.
        rows, counted = dataset.cardinality(), _limited(dataset.batch(1), limit).unbatch()
        known = rows != tf.data.UNKNOWN_CARDINALITY
        return counted.apply(tf.data.experimental.assert_cardinality(rows)) if known else counted
    words = (
        f"The examples must fit in memory with cache=True. Received: more than {memory_size(limit)}, {SHARE:.0%} of "
        "the free memory. Set cache=False."
    )

    @tf.autograph.experimental.do_not_convert
    def add(total: tf.Tensor, example: Any) -> tuple[tf.Tensor, Any]:
        total += tf.add_n([_bytes(tensor) for tensor in tf.nest.flatten(example, expand_composites=True)])
        with tf.control_dependencies([tf.debugging.Assert(total <= limit, [words])]):
            return tf.identity(total), example

    return dataset.scan(tf.constant(0, tf.int64), add)


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
        content = tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64))
    elif has_size(tensor.dtype):
        content = tf.size(tensor, tf.int64) * tensor.dtype.size
    else:
        content = tf.constant(0, tf.int64)
    return content + BYTES_PER_TENSOR


def _warn(reason: str) -> None:
    warn(
        f"The examples are not kept in memory: {reason}. They are read again in every epoch. Set cache=False to do so "
        "without this warning, or cache them in a file: dataset.cache(filename)."
    )
