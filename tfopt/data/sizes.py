"""The bytes that examples take, computed from their shapes or estimated from the first; and the memory that is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of

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

    Example:
        >>> size_of(tf.data.Dataset.range(10)).total
        2080
    """

    count: int | None  # None if the data set does not know it, or has no end
    content: float | None  # mean bytes of the content of an example; None if its shape does not determine them
    tensors: float  # mean number in an example: tf.data holds further bytes for each in memory
    endless: bool = False

    @property
    def each(self) -> float | None:
        """Bytes of an example in memory; None if they are not known."""
        return None if self.content is None else self.content + BYTES_PER_TENSOR * self.tensors

    @property
    def total(self) -> int | None:
        """Bytes of all examples in memory; None if they are not known."""
        return None if self.count is None or self.each is None else int(self.count * self.each)

    def with_more(self, examples: int) -> int:
        """Returns the bytes in memory of these and of more examples, if their size is known."""
        assert self.total is not None
        assert self.each is not None
        return self.total + int(examples * self.each)


def size_of(records: tf.data.Dataset, decode: Callable[..., Any] | None = None, *, sampled: bool = False) -> Size:
    """Returns the size of the examples that `decode` makes of records, or of the records if there is no function.

    Args:
        sampled: Whether to read and decode the first records if shapes do not determine the bytes.
    """
    decoded = records if decode is None else records.map(decode)
    cardinality = int(records.cardinality())
    specs = tf.nest.flatten(decoded.element_spec)
    content, tensors = _content_by_specs(specs), float(len(specs))
    if content is None and sampled:
        found = [tf.nest.flatten(example, expand_composites=True) for example in decoded.take(SAMPLE)]
        content = sum(int(content_of(tensor)) for each in found for tensor in each) / max(len(found), 1)
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
        if elements is None or not _has_size(each.dtype):
            return None
        total += elements * each.dtype.size
    return float(total)


def _has_size(dtype: tf.DType) -> bool:
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


def content_of(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the bytes that a tensor holds, int64, in TensorFlow."""
    if tensor.dtype == tf.string:
        return tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64))
    size = tensor.dtype.size if _has_size(tensor.dtype) else 0
    return tf.size(tensor, tf.int64) * size if size else tf.constant(0, tf.int64)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that this process can still take: the free memory, within the limits of its control groups."""
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
