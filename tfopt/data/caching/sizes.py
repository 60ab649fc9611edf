"""The bytes that examples take: computed from their shapes, or estimated from the first examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of

# The bytes that tf.data holds for each tensor in addition to its content: 200, measured with scalars.
BYTES_PER_TENSOR = 200
SAMPLE = 32
# The data sets that hold their elements in memory, and those that choose among the elements of another data set.
IN_MEMORY = ("TensorSlice", "TensorDataset", "Range", "Sparse")
CHOOSING = ("Take", "Skip", "Shard", "Options", "AssertCardinality", "Concatenate", "Zip", "UnaryUnchanged")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The number of examples and the bytes of each.

    Attributes:
        count: Number of examples; None if the data set does not know it, or if it has no end.
        each: Mean bytes of an example; None if its shape does not determine them.
        endless: Whether the data set has no end.

    Example:
        >>> size_of(tf.data.Dataset.range(10)).total
        2080
    """

    count: int | None
    each: float | None
    endless: bool = False

    @property
    def total(self) -> int | None:
        """Bytes of all examples; None if they are not known."""
        return None if self.count is None or self.each is None else int(self.count * self.each)


def size_of(
    records: tf.data.Dataset, decode: Callable[..., Any] | None = None, *, sampled: bool = False, overhead: bool = True
) -> Size:
    """Returns the size of the examples that `decode` makes of records, or of the records if there is no function.

    Args:
        records: Data set of records.
        decode: Function from a record to an example.
        sampled: Whether to read and decode the first records if shapes do not determine the bytes.
        overhead: Whether to count what tf.data holds for each tensor.
    """
    decoded = records if decode is None else records.map(decode)
    cardinality = int(records.cardinality())
    each: float | None = bytes_by_spec(decoded.element_spec, overhead=overhead)
    if each is None and sampled:
        found = [_bytes_of(example, overhead=overhead) for example in decoded.take(SAMPLE)]
        each = sum(found) / len(found) if found else 0.0
    return Size(
        count=cardinality if cardinality >= 0 else None,
        each=each,
        endless=cardinality == tf.data.INFINITE_CARDINALITY,
    )


def bytes_by_spec(spec: Any, *, overhead: bool = True) -> int | None:
    """Returns the bytes of one example, or None if its shape or type does not determine them.

    Example:
        >>> bytes_by_spec((tf.TensorSpec((8, 8, 3), tf.uint8), tf.TensorSpec((), tf.int64)), overhead=False)
        200
    """
    total = 0
    for each in tf.nest.flatten(spec):
        elements = each.shape.num_elements() if isinstance(each, tf.TensorSpec) else None
        if elements is None or not has_size(each.dtype):
            return None
        total += elements * each.dtype.size + BYTES_PER_TENSOR * overhead
    return total


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


def _bytes_of(example: Any, *, overhead: bool) -> int:
    return sum(_content(tensor) + BYTES_PER_TENSOR * overhead for tensor in _tensors(example))


def _tensors(example: Any) -> Iterator[tf.Tensor]:
    yield from tf.nest.flatten(example, expand_composites=True)


def _content(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size if has_size(tensor.dtype) else 0
