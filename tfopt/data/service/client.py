"""Sends the pipeline of each epoch to a tf.data service, and counts what comes back.

The workers share the records of an epoch: the dispatcher hands each record to one of them (dynamic sharding), and each
shuffles, decodes, augments and batches its part. So every example comes once per epoch while all workers live. The
order depends on which worker is faster, so it differs from run to run.

The examples that a worker holds when it is killed are lost for this epoch (TensorFlow promises "at most once"). The
epoch goes on when a worker is at the same address again, and ends with an error that says how many examples it lacks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfopt.compat.datasets import SameElements
from tfopt.data.epoch_order import UNCONTROLLED, EpochCounter, seed_of
from tfopt.data.measurement.stages import stages_of
from tfopt.data.sizes import is_in_memory, size_of
from tfopt.errors import ConfigError
from tfopt.report.formatting import memory_size

# The graph with the tensors that a data set holds is sent to each worker, for each epoch.
LARGEST_IN_GRAPH = 2**28
SECONDS_TO_REACH = 10.0


class ThroughService(SameElements):
    """The batches of a tf.data service: each iterator has those of one epoch.

    Args:
        of_seed: Function from the seed of an epoch to its batches.
        batch_size: Examples per batch; None if the batches cannot be joined, because their shapes differ.
        count: Number of examples of an epoch; None if it is unknown, or if some are left out.
    """

    runs_elsewhere = True  # `measure` asks

    def __init__(
        self,
        of_seed: Callable[[tf.Tensor], tf.data.Dataset],
        address: str,
        *,
        seed: int,
        counter: EpochCounter | None,
        batch_size: int | None,
        count: int | None,
        prefetch: int,
    ) -> None:
        self._of_seed, self._address, self._prefetch = of_seed, address, prefetch
        self._seed, self._counter = seed, counter
        self._batch_size, self._count = batch_size, count
        self._made = 0
        local = of_seed(tf.constant(0, tf.int64))
        _check_can_be_sent(local)
        # Only an iterator made in Python knows its epoch. Every other use of this data set fails with the reason.
        # Each worker has a last batch of its own. Their number is known only if they are joined and none is left out.
        steps = tf.data.UNKNOWN_CARDINALITY if batch_size is None or count is None else -(-count // batch_size)
        refused = local.map(_refuse, num_parallel_calls=None).apply(tf.data.experimental.assert_cardinality(steps))
        super().__init__(refused, tf.data.experimental.to_variant(refused))

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            return super().__iter__()
        epoch = UNCONTROLLED if self._counter is None else self._counter.value
        self._made += 1
        number = epoch if epoch != UNCONTROLLED else -1 - self._made
        return iter(self._of_epoch(seed_of(self._seed, tf.constant(number, tf.int64))))

    def _of_epoch(self, seed: tf.Tensor) -> tf.data.Dataset:
        _check_is_reached(self._address)
        service = tf.data.experimental.service
        batches = self._of_seed(seed).apply(service.distribute("distributed_epoch", self._address))
        if self._batch_size is not None:
            batches = batches.rebatch(self._batch_size)  # each worker has a smaller last batch
        if self._count is not None:
            batches = _counted(batches, self._count)
        return batches.prefetch(self._prefetch)


def _check_is_reached(address: str, seconds: float | None = None) -> None:
    """Raises ConfigError if nothing listens at the address of a service. TensorFlow would wait for it without end.

    Example:
        >>> _check_is_reached("grpc://localhost:1", seconds=0)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A tf.data service must listen at its address. Received: service='grpc://localhost:1'
        (Connection refused). Start it there: tfopt data serve.
    """
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    end = time.monotonic() + (SECONDS_TO_REACH if seconds is None else seconds)
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, ValueError) as error:
            if time.monotonic() >= end or isinstance(error, ValueError):
                raise ConfigError(
                    f"A tf.data service must listen at its address. Received: service={address!r} "
                    f"({getattr(error, 'strerror', None) or error}). Start it there: tfopt data serve."
                ) from error
            time.sleep(0.2)


def _check_can_be_sent(dataset: tf.data.Dataset) -> None:
    """Raises ConfigError if other processes cannot run a data set."""
    for stage in stages_of(dataset).walk():
        if stage.calls_python or stage.kind == "generator":
            raise ConfigError(
                "A tf.data service runs TensorFlow only: its workers do not have the Python functions of this process. "
                f"Received: the stage {stage.name!r}, which calls Python. Convert the examples to TFRecord files "
                "(tfopt data convert), or leave service out."
            )


def check_records_can_be_sent(records: tf.data.Dataset) -> None:
    """Raises ConfigError if records in memory are too large to send, or have no end."""
    size = size_of(records)
    if size.endless:
        raise ConfigError(
            "A tf.data service needs records with an end, which it shares among its workers. Received: records without "
            "end. Take a number of them for each epoch: dataset.take(n)."
        )
    if is_in_memory(records) and size.total is not None and size.total > LARGEST_IN_GRAPH:
        raise ConfigError(
            f"A tf.data service gets records in memory with every epoch, so they must be below "
            f"{memory_size(LARGEST_IN_GRAPH)}. Received: {memory_size(size.total)}. Convert them to TFRecord files on "
            "a file system that the workers reach (tfopt data convert), or leave service out."
        )


def _counted(batches: tf.data.Dataset, expected: int) -> tf.data.Dataset:
    """Returns batches that end with an error if examples are missing."""
    spec = batches.element_spec
    seen = [0]

    def add(size: Any) -> Any:
        seen[0] += int(size)
        return size

    def check(number: Any) -> Any:
        if seen[0] != expected:
            raise ValueError(
                f"The tf.data service lost {expected - seen[0]:,} of {expected:,} examples of this epoch: a worker "
                "ended while it held them. Train this epoch again, from the last checkpoint."
            )
        return False

    def count(*batch: Any) -> Any:
        first = tf.nest.flatten(batch)[0]
        size = tf.numpy_function(add, [tf.shape(first)[0]], tf.int32)
        with tf.control_dependencies([size]):
            same = tf.nest.map_structure(tf.identity, batch)
        return same[0] if len(same) == 1 else same

    def empty(number: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda each: tf.zeros([size or 0 for size in each.shape], each.dtype), spec)

    end = tf.data.Dataset.range(1).filter(lambda number: tf.numpy_function(check, [number], tf.bool)).map(empty)
    return batches.map(count).concatenate(end)


def _refuse(*batch: Any) -> Any:
    words = (
        "The batches of a tf.data service must be iterated in Python or by fit on one device. A tf.distribute "
        "strategy, or a data set made of this one, does not know the number of its epoch. Leave service out."
    )
    with tf.control_dependencies([tf.debugging.Assert(False, [words])]):
        same = tf.nest.map_structure(tf.identity, batch)
    return same[0] if len(same) == 1 else same
