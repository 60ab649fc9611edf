"""The training step of scripts whose results must stay as they are: Keras' own, on every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.tensorflow import custom_gradients_forgotten
from tfopt.training.step.step import or_none, without_islands


class KerasStep:
    """One training or test step of a model as Keras computes it, on every replica of a strategy.

    It is for scripts whose results must stay as they are. `Step` weights every example alike and clips the sum of the
    gradients. Keras divides the loss by the number of replicas, averages over the examples of each replica, and clips
    on each replica. Where batches do not divide evenly, or gradients are clipped, the weights differ. So here each
    replica runs Keras' `train_step`; what is gained is that one call into TensorFlow runs several steps, which Keras
    cannot do under MirroredStrategy.
    """

    jit_compile = False  # as Keras under a strategy

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy

    def train(self, data: Any) -> Any:
        """Trains on one batch, distributed or not, and returns the logs."""
        return self._run(self._model.train_step, data)

    def test(self, data: Any) -> Any:
        """Evaluates the model on one batch, distributed or not, and returns the logs."""
        return self._run(self._model.test_step, data)

    def _run(self, step: Callable[[Any], Any], data: Any) -> Any:
        with without_islands(self.jit_compile), custom_gradients_forgotten():
            logs = self._strategy.run(step, args=(keras.tree.map_structure(or_none, data),))
        of_replicas = self._strategy.experimental_local_results
        return keras.tree.map_structure(lambda value: tf.reduce_mean(of_replicas(value), axis=0), logs)
