"""Iterators over batches that are in memory, with the types and shapes of the iterator of a `fit`.

A training function takes its batches from an iterator. It is traced for the types and shapes of that iterator, so
another iterator with the same ones runs the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# More than any call takes at once.
MOST_BATCHES = 100_000
IN_ADVANCE = 64


class Hand:
    """An iterator that gives the batches it is handed, of the types and shapes of a spec.

    It lives as long as the `fit`. A new iterator for each call would cost more than a millisecond in the call.

    Example:
        >>> hand = Hand((tf.TensorSpec((None, 3)),))
        >>> iterator = hand.give([(tf.zeros((2, 3)),)])
        >>> iterator.element_spec, next(iterator)[0].shape
        ((TensorSpec(shape=(None, 3), dtype=tf.float32, name=None),), TensorShape([2, 3]))
        >>> hand.close()
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self._queue = tf.queue.FIFOQueue(MOST_BATCHES, [tf.variant, tf.bool], [(), ()])
        # A batch travels as a data set of one element, so that it may hold ragged and sparse tensors too.
        handed = tf.data.Dataset.range(tf.int64.max).map(lambda _: self._queue.dequeue())
        batches = handed.take_while(lambda _, goes_on: goes_on).flat_map(
            lambda batch, _: tf.data.experimental.from_variant(batch, spec)
        )
        # A thread gets them ready, as at the end of a fast input: a step finds its batch there.
        self._iterator = iter(batches.prefetch(IN_ADVANCE).with_options(_as_it_is()))

    def give(self, batches: Sequence[Any]) -> Any:
        """Returns the iterator, whose next elements are these batches. It waits for more after them."""
        for batch in batches:
            self._queue.enqueue((tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch)), True))
        return self._iterator

    def close(self) -> None:
        # A queue that is closed while a thread waits for it would print an error.
        self._queue.enqueue((tf.data.experimental.to_variant(tf.data.Dataset.range(0)), False))


def again(batches: Sequence[Any], spec: Any, *, repeat: bool = False) -> Any:
    """Returns an iterator over batches, with the types and shapes of another iterator.

    Example:
        >>> iterator = again([(tf.zeros((2, 3)),)], (tf.TensorSpec((None, 3)),))
        >>> iterator.element_spec, len(list(iterator))
        ((TensorSpec(shape=(None, 3), dtype=tf.float32, name=None),), 1)
    """
    variant = tf.data.experimental.to_variant(_joined(batches, repeat=repeat))
    return iter(tf.data.experimental.from_variant(variant, spec))


def batches_in_memory(batch: Any, spec: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns an iterator that gives one batch again and again, to all replicas of a strategy.

    Example:
        >>> iterator = batches_in_memory((tf.zeros((2, 3)),), (tf.TensorSpec((None, 3)),), tf.distribute.get_strategy())
        >>> next(iterator)[0].shape
        TensorShape([2, 3])
    """
    count = strategy.num_replicas_in_sync
    if count == 1:
        return again([batch], spec, repeat=True)

    def of_replica(place: int, value: Any) -> Any:
        return value.values[place] if isinstance(value, tf.distribute.DistributedValues) else value

    parts = [keras.tree.map_structure(functools.partial(of_replica, place), batch) for place in range(count)]
    return iter(strategy.distribute_datasets_from_function(lambda _: _joined(parts, repeat=True)))


def _joined(batches: Sequence[Any], *, repeat: bool) -> tf.data.Dataset:
    alone = map(tf.data.Dataset.from_tensors, batches)
    joined = functools.reduce(lambda first, other: first.concatenate(other), alone)
    return (joined.repeat() if repeat else joined).with_options(_as_it_is())


def _as_it_is() -> tf.data.Options:
    """Options without which tf.data would add stages and threads of its own.

    A thread that tunes may sleep for a minute when its iterator is to end, and the process with it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    return options
