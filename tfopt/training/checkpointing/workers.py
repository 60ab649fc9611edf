"""What the workers of a training tell each other about its checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfopt.training.distributed.strategy import is_multi_worker


class Workers:
    """The processes that train under one strategy. With one process nothing is sent.

    `any` and `agree` are collectives: every worker must call them at the same point of the training.

    Args:
        strategy: The strategy that the model trains under.
    Example:
        >>> workers = Workers(tf.distribute.get_strategy())
        >>> workers.any(True), workers.agree(3), workers.is_chief
        (True, True, True)
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files."""
        return bool(self.strategy.extended.should_checkpoint)

    def any(self, value: bool) -> bool:
        """Returns whether the value is true on at least one worker."""
        if not is_multi_worker(self.strategy):
            return value
        return float(self._sum(tf.constant(float(value)))) > 0

    def agree(self, number: int) -> bool:
        """Returns whether all workers have the same number."""
        if not is_multi_worker(self.strategy):
            return True
        value = tf.constant(float(number), "float64")
        mean = float(self._sum(value)) / self.strategy.num_replicas_in_sync
        return not float(self._sum((value - mean) ** 2))

    @functools.cached_property
    def _sum(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Sums a number over all replicas."""

        def add(value: tf.Tensor) -> tf.Tensor:
            return self.strategy.reduce("SUM", self.strategy.run(tf.identity, args=(value,)), axis=None)

        return tf.function(add)
