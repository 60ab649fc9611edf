"""Keeps the examples of a data set in memory, as long as they fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from tfopt.errors import TfoptWarning

# Of the memory that is free when the pipeline is made: the model, its training and the batches need some too.
SHARE = 0.8
# What tf.data holds for each tensor besides its content: measured 200 bytes with scalars.
BYTES_PER_TENSOR = 200


def cached(dataset: tf.data.Dataset, *, count: bool = True) -> tf.data.Dataset:
    """Returns a data set that keeps its examples in memory, or the same data set if they do not fit.

    The size is known beforehand where the data set knows how many examples it has and what shape they have. Where it
    does not, the bytes are counted while the examples are read, and reading ends with an error when they are too many.

    Args:
        dataset: Of examples.
        count: Whether the bytes may be counted. TensorFlow does not find the files of a data set behind the counting,
            so it cannot divide them among workers.
    Warns:
        TfoptWarning: The examples do not fit, or have no end.
    Example:
        >>> dataset = cached(tf.data.Dataset.range(1000))
        >>> len(dataset)
        1000
    """
    examples, each = int(dataset.cardinality()), _bytes_by_spec(dataset.element_spec)
    limit = int(SHARE * available_memory_bytes())
    if examples == tf.data.INFINITE_CARDINALITY:
        _warn("they have no end")
        return dataset
    if examples == tf.data.UNKNOWN_CARDINALITY or each is None:
        return (_limited(dataset, limit) if count else dataset).cache()
    if examples * each > limit:
        _warn(f"they take {_gib(examples * each)}, and {_gib(limit)} may be used ({SHARE:.0%} of the free memory)")
        return dataset
    return dataset.cache()


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that this process can still take: what is free, within the limits of its control groups.

    Args:
        root: Where `proc` and `sys` are.
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
                # Cached files count as used, and go when memory is needed.
                stat = dict(row.split() for row in (each / "memory.stat").read_text().splitlines())
                in_use = int((each / used).read_text()) - int(stat.get(reclaimable, 0))
                yield int((each / limit).read_text()) - in_use
            except (OSError, ValueError):  # there is no such group inside a container, or no limit ("max")
                continue


def _bytes_by_spec(spec: Any) -> int | None:
    """Returns the bytes of one example, or None where its shape or type leaves them open."""
    total = 0
    for each in tf.nest.flatten(spec):
        elements = each.shape.num_elements() if isinstance(each, tf.TensorSpec) else None
        if elements is None or not _has_size(each.dtype):
            return None
        total += elements * each.dtype.size + BYTES_PER_TENSOR
    return total


def _has_size(dtype: tf.DType) -> bool:
    return dtype not in (tf.string, tf.variant, tf.resource)


def _limited(dataset: tf.data.Dataset, limit: int) -> tf.data.Dataset:
    """Counts the bytes of the examples, and fails at the one that exceeds the limit."""
    words = (
        f"cache=True must keep examples that fit in memory. Received: more than {_gib(limit)}, {SHARE:.0%} of the "
        "memory that was free. Set cache=False."
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
    elif _has_size(tensor.dtype):
        content = tf.size(tensor, tf.int64) * tensor.dtype.size
    else:
        content = tf.constant(0, tf.int64)
    return content + BYTES_PER_TENSOR


def _warn(reason: str) -> None:
    warnings.warn(
        f"The examples are not kept in memory: {reason}. They are read anew in every epoch. Set cache=False to do so "
        "without this warning, or cache them in a file: dataset.cache(filename).",
        TfoptWarning,
        stacklevel=4,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**28 else f"{size:,} bytes"
