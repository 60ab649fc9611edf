"""The position of training in its data: an epoch number that the data set reads each time it is iterated.

tf.data shuffles each iterator with a new seed, which it draws from a generator inside the data set. The order of an
epoch then depends on the number of iterators made before (Keras' fit makes two per epoch), and a restarted process
begins with the first seed again. Here the training loop sets a variable, and its number alone decides the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfopt.compat.datasets import SameElements
from tfopt.errors import ConfigError

# The number while no training loop sets the epoch.
UNCONTROLLED = -1


class EpochCounter:
    """The number of the epoch for the next iterator over the data; -1 while no training loop sets it.

    Pass the counter to `pipeline` and assign the number before each epoch begins. An iterator reads it when its first
    batch is requested. Use one iterator per epoch: a repeated data set reads the number again at every repetition, and
    may do so before the end of an epoch, because batches are prepared in advance.

    Example:
        >>> counter = EpochCounter()
        >>> counter.value
        -1
        >>> counter.assign(3)
        >>> counter.value
        3
    """

    def __init__(self) -> None:
        self._made: tf.Variable | None = None  # later, so that no device is touched before it is needed
        self.known_at_once = False

    @property
    def value(self) -> int:
        """The number of the epoch, from 0; -1 while no training loop sets it."""
        return UNCONTROLLED if self._made is None else int(self._made.numpy())

    def assign(self, epoch: int, *, at_once: bool = False) -> None:
        """Sets the number of the epoch, or -1 to leave the order to the pipeline.

        Args:
            epoch: Number of the epoch.
            at_once: Whether the next iterator is made after this call, which is cheaper. With steps_per_epoch, Keras'
                `fit` makes it earlier, during the epoch before.
        Raises:
            ConfigError: The number is below -1.
        """
        if epoch < UNCONTROLLED:
            raise ConfigError(
                f"epoch must be at least 0, or -1 to leave the order to the pipeline. Received: epoch={epoch}. "
                "Epochs count from 0."
            )
        self._variable.assign(epoch)
        self.known_at_once = at_once

    def seeds(self, seed: int) -> tf.data.Dataset:
        """Returns a data set of one int64 seed: the seed of the epoch, or, at -1, a new seed for each iterator.

        The seed of an epoch depends on `seed` and the epoch only. TensorFlow's global seed has no effect on it.

        Example:
            >>> counter = EpochCounter()
            >>> seeds = counter.seeds(0)
            >>> int(next(iter(seeds))) == int(next(iter(seeds)))
            False
            >>> counter.assign(3)
            >>> int(next(iter(seeds))) == int(next(iter(seeds)))
            True
        """
        variable = self._variable

        def choose(drawn: tf.Tensor) -> tf.Tensor:
            epoch = variable.read_value()
            return tf.where(epoch < 0, drawn, seed_of(seed, epoch))

        return tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1).map(choose)

    @property
    def _variable(self) -> tf.Variable:
        def make() -> tf.Variable:
            with tf.device("CPU:0"):  # where tf.data runs
                return tf.Variable(UNCONTROLLED, dtype=tf.int64, trainable=False, name="epoch")

        if self._made is None:
            # In another thread: the scope of a strategy holds only for the thread that entered it. Inside the scope
            # the variable would have a copy on each replica, and need a broadcast between the workers.
            with ThreadPoolExecutor(1) as outside:
                self._made = outside.submit(make).result()
        return self._made


def seeds_of_passes(seed: int) -> tf.data.Dataset:
    """Returns a data set of the seeds of all passes over the data, without end. They depend on `seed` alone.

    Example:
        >>> len(list(seeds_of_passes(0).take(3)))
        3
    """
    return tf.data.Dataset.counter(dtype=tf.int64).map(lambda number: seed_of(seed, number))


def with_seeds(examples: tf.data.Dataset, seed: Any, *, in_service: bool) -> tf.data.Dataset:
    """Returns pairs of an example and a seed [2] of its own.

    Args:
        in_service: Whether a tf.data service reads the examples.
    Example:
        >>> examples = tf.data.Dataset.range(3)
        >>> [seed.shape[0] for _, seed in with_seeds(examples, 0, in_service=False)]
        [2, 2, 2]
    """
    if not in_service:
        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True)
        return tf.data.Dataset.zip(examples, seeds)
    # A service divides every source among its workers, and random numbers cannot be divided. Each worker counts.
    start = tf.cast(seed, tf.int64)

    def count(number: tf.Tensor, *example: Any) -> Any:
        return number + 1, (example[0] if len(example) == 1 else example, tf.stack([start, number]))

    return examples.scan(tf.constant(0, tf.int64), count)


class PerEpoch(SameElements):
    """A data set that reads the epoch number, with a faster path to the same elements outside strategies.

    TensorFlow sets up a function of tf.data for every iterator. That takes ten milliseconds, as long as a short epoch.
    If the epoch is known when an iterator is made outside a strategy, the iterator gets a data set without a function.

    Args:
        dataset: Data set that reads the counter, for strategies and for data sets derived from this one.
        of_seed: Function from the seed of an epoch to the data set of that epoch.
        device: Device to copy the elements to in advance; None leaves them on the processor.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        counter: EpochCounter,
        seed: int,
        of_seed: Callable[[tf.Tensor], tf.data.Dataset],
        device: str | None = None,
    ) -> None:
        dataset = on_device(dataset, device)
        super().__init__(dataset, tf.data.experimental.to_variant(dataset))
        self._device, self._counter, self._seed = device, counter, seed
        # A partial: TensorFlow counts the traces of a Python function over all data sets, and warns at too many.
        self._of_seed = tf.function(functools.partial(lambda drawn: tf.data.experimental.to_variant(of_seed(drawn))))

    def of_epoch(self, epoch: int) -> tf.data.Dataset:
        """Returns the data set of one epoch, which does not read the counter."""
        with tf.device("CPU:0"):
            variant = self._of_seed(seed_of(self._seed, tf.constant(epoch, tf.int64)))
            return tf.data.experimental.from_variant(variant, self.element_spec)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._counter.value
        if epoch == UNCONTROLLED or not self._counter.known_at_once or not tf.executing_eagerly():
            return super().__iter__()
        elements = self.of_epoch(epoch)
        if self._device is not None:
            return iter(on_device(elements, self._device))
        with tf.device("CPU:0"):
            return iter(elements)


def on_device(dataset: tf.data.Dataset, device: str | None) -> tf.data.Dataset:
    """Returns a data set whose elements are copied to a device in advance; with None the same data set."""
    return dataset if device is None else dataset.apply(tf.data.experimental.prefetch_to_device(device, 1))


def seed_of(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Returns the seed of one epoch."""
    return tf.random.stateless_uniform((), seed=[seed, epoch], minval=None, maxval=None, dtype=tf.int64)
