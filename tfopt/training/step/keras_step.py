"""Keras' own step on every replica of a strategy, for scripts whose results must stay as they are.

tfopt's step weights every example alike and clips the sum of the gradients. Keras divides the loss by the number of
replicas, averages over the examples of each replica, and clips on each replica. Where batches do not divide evenly, or
gradients are clipped, the weights differ. So here each replica runs Keras' `train_step`; what is gained is that one
call into TensorFlow runs several steps, which Keras cannot do under MirroredStrategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


class KerasStep:
    """One training or test step of a model as Keras computes it, on every replica.

    Args:
        model: A compiled Keras model that was built under a strategy.
    """

    is_of_keras = True
    is_distributed = True
    jit_compile = False  # as Keras under a strategy

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy

    def train(self, data: Any) -> Any:
        """Trains on one batch, distributed or not, and returns the logs."""
        return self._run(self._model.train_step, data)

    def spec(self, batch: Any) -> Any:
        """Returns the specs of a batch as the model is trained on it."""
        return batch

    @tf.autograph.experimental.do_not_convert
    def synchronize(self) -> None:
        """Does nothing: Keras leaves this to the strategy."""

    def test(self, data: Any) -> Any:
        """Evaluates the model on one batch, distributed or not, and returns the logs."""
        return self._run(self._model.test_step, data)

    def _run(self, step: Callable[[Any], Any], data: Any) -> Any:
        logs = self._strategy.run(step, args=(keras.tree.map_structure(_or_none, data),))
        return keras.tree.map_structure(self._mean_of_replicas, logs)

    def _mean_of_replicas(self, value: Any) -> Any:
        return tf.reduce_mean(self._strategy.experimental_local_results(value), axis=0)


def _or_none(item: Any) -> Any:
    """Returns None for the Optional by which Keras replaces a missing value, since tf.data has no None."""
    return None if isinstance(item, tf.experimental.Optional) else item
