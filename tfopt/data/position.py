"""Where training stands in its data: the number of the epoch, read by the data set each time it is iterated.

tf.data shuffles anew for each iterator by drawing a seed from a generator within the data set. The order of an epoch
then depends on how many iterators were made before (Keras' fit makes two per epoch), and a restarted process begins
with the first again. Read from a variable that the training loop sets, the number of the epoch alone decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfopt.compat.datasets import SameElements
from tfopt.errors import ConfigError

# While nobody controls the epoch.
UNCONTROLLED = -1


class EpochCounter:
    """The number of the epoch that the next iterator over the data is for; -1 while nobody controls it.

    Give it to `pipeline` and assign it before each epoch begins. An iterator reads it when its first batch is asked
    for. A data set that repeats itself reads it again as often, perhaps before an epoch's end, because batches are
    made ahead; so let each epoch be an iterator of its own.

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
        """The number of the epoch, from 0; -1 while nobody controls it."""
        return UNCONTROLLED if self._made is None else int(self._made.numpy())

    def assign(self, epoch: int, *, at_once: bool = False) -> None:
        """Sets the number of the epoch, or -1 to control it no longer.

        Args:
            epoch: Its number.
            at_once: Whether the next iterator is known to be this epoch's when it is made, which is cheaper. Keras'
                `fit` makes it ahead, during the epoch before, when steps_per_epoch is given.
        Raises:
            ConfigError: The number is below -1.
        """
        if epoch < UNCONTROLLED:
            raise ConfigError(
                f"epoch must be at least 0, or -1 to leave the order to the pipeline. Received: epoch={epoch}."
            )
        self._variable.assign(epoch)
        self.known_at_once = at_once

    def seeds(self, seed: int) -> tf.data.Dataset:
        """Returns a data set of one int64 seed: that of the counted epoch, or -1 given, another for each iterator.

        Only arguments decide the seed of a counted epoch; TensorFlow's global seed and the process's past do not.

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
            return tf.where(epoch < 0, drawn, _mixed(seed, epoch))

        return tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1).map(choose)

    @property
    def _variable(self) -> tf.Variable:
        if self._made is None:
            # In a thread of its own: a strategy's scope, in which a variable would become one per replica and take a
            # broadcast between the workers, holds only for the thread that entered it.
            with ThreadPoolExecutor(1) as outside:
                self._made = outside.submit(_make_variable).result()
        return self._made


class PerEpoch(SameElements):
    """A data set that reads the epoch's number, and a shorter way to the same elements for whoever iterates it here.

    A function of tf.data is set up for every iterator, which takes ten milliseconds: as long as many a short epoch. So
    where the epoch is known at once, an iterator outside strategies gets its data set without such a function.

    Args:
        dataset: Reads the counter, for strategies and for data sets made of this one.
        counter: Of the epoch.
        seed: That `dataset` was made with.
        of_seed: Returns the same data set for an epoch's seed.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        counter: EpochCounter,
        seed: int,
        of_seed: Callable[[tf.Tensor], tf.data.Dataset],
    ) -> None:
        super().__init__(dataset, tf.data.experimental.to_variant(dataset))
        self._counter = counter
        self._seed = seed
        # A partial, because TensorFlow counts the traces of a Python function over all data sets, and warns.
        self._of_seed = tf.function(functools.partial(lambda drawn: tf.data.experimental.to_variant(of_seed(drawn))))

    def __iter__(self) -> Iterator[Any]:
        epoch = self._counter.value
        if epoch == UNCONTROLLED or not self._counter.known_at_once or not tf.executing_eagerly():
            return super().__iter__()
        with tf.device("CPU:0"):
            variant = self._of_seed(_mixed(self._seed, tf.constant(epoch, tf.int64)))
            return iter(tf.data.experimental.from_variant(variant, self.element_spec))


def _mixed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform((), seed=[seed, epoch], minval=None, maxval=None, dtype=tf.int64)


def _make_variable() -> tf.Variable:
    with tf.device("CPU:0"):  # where tf.data runs
        return tf.Variable(UNCONTROLLED, dtype=tf.int64, trainable=False, name="epoch")
