"""Metrics that Keras does not have, for the logs of training."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tfopt")
class BitsPerByteMetric(keras.metrics.Mean):
    """Mean number of bits that a language model needs for a byte of text, from logits.

    Args:
        bytes_per_target: Mean number of bytes that a token stands for.
        ignored_target: Token number that does not count, for example of padding.
        name: Name of the metric.
        dtype: Type in which the metric counts.
    Example:
        >>> metric = BitsPerByteMetric()
        >>> metric.update_state([[3, 7]], ops.zeros((1, 2, 256)))
        >>> round(float(metric.result()), 4)
        8.0
    """

    def __init__(
        self,
        bytes_per_target: float = 1.0,
        ignored_target: int | None = None,
        name: str = "bits_per_byte",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self._bytes_per_target = bytes_per_target
        self._ignored_target = ignored_target

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of token numbers [batch, ...] and logits [batch, ..., tokens]."""
        logits = ops.cast(y_pred, "float32")
        truth = ops.reshape(ops.cast(y_true, "int32"), ops.shape(logits)[:-1])
        weight = ops.ones_like(truth, dtype="float32")
        if self._ignored_target is not None:
            weight = ops.cast(ops.not_equal(truth, self._ignored_target), "float32")
            truth = ops.where(weight > 0, truth, 0)
        if sample_weight is not None:
            given = ops.cast(sample_weight, "float32")
            while len(given.shape) < len(weight.shape):
                given = ops.expand_dims(given, -1)
            weight = weight * given
        nats = ops.sparse_categorical_crossentropy(truth, logits, from_logits=True)
        super().update_state(nats / (math.log(2) * self._bytes_per_target), sample_weight=weight)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "bytes_per_target": self._bytes_per_target,
            "ignored_target": self._ignored_target,
        }
