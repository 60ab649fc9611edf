"""Fake quantization while training: values are rounded to the grid that int8 will have, and gradients pass.

A value x on a grid of step s, clipped to p steps above zero (and below, where it is signed), becomes

    y = round(clip(x / s, -p or 0, p)) * s

and the gradient of round is taken to be 1 (straight-through, Bengio et al., arXiv:1308.3432): dy/dx is 1 inside the
range and 0 outside. tfopt.quantization.aware_training.lsq gives the step a gradient too.

At inference the same values come from TensorFlow's own fake-quantization ops, which the frozen graph then holds for
the exporters to read.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfopt.quantization.annotation.range import steps_above_zero
from tfopt.quantization.aware_training.lsq import SMALLEST, learning_limit

MOMENTUM = 0.99


def fake_quantize(x: Any, limit: Any, *, bits: int = 8, signed: bool = True) -> Any:
    """Rounds float32 values to a symmetric grid, with straight-through gradients for the values and the limit.

    Args:
        x: The values.
        limit: The largest value of the grid, positive; a scalar, or one for each entry of the last axis.
        bits: Width of the quantized values.
        signed: Whether the grid reaches from -limit to limit, else from 0 to limit.
    Example:
        >>> fake_quantize(tf.constant([-2.0, 0.33, 0.9]), 0.7, bits=4).numpy()
        array([-0.7,  0.3,  0.7], dtype=float32)
    """
    top = steps_above_zero(bits, signed=signed)
    step = limit / top
    scaled = tf.clip_by_value(x / step, -top if signed else 0, top)
    return (scaled + tf.stop_gradient(tf.round(scaled) - scaled)) * step


@keras.saving.register_keras_serializable("tfopt")
class CallCount(layers.Layer):
    """Counts calls in training, up to the one after which something stays as it is."""

    def __init__(self, *, limit: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.limit = limit
        if limit is not None:
            self.count = self.add_weight(
                shape=(), initializer="zeros", trainable=False, dtype="int64", autocast=False, name="count"
            )
        self.built = True

    def another(self) -> Any:
        """Counts a call. Returns whether it is one of the first."""
        if self.limit is None:
            return tf.constant(True)
        count = tf.convert_to_tensor(self.count.value)
        self.count.assign(count + 1)
        return count < self.limit


class _Range(layers.Layer):
    """What the ranges of activations and of weights share."""

    def __init__(self, *, learned: bool = False, freeze_after: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.learned = learned
        self.freeze_after = freeze_after
        self.calls = CallCount(limit=freeze_after, dtype="float32", name="calls")

    def _add_limit(self, shape: tuple[int, ...]) -> None:
        # Not cast to half precision, in which a moving average would stand still.
        self.limit = self.add_weight(
            shape=shape, initializer="ones", trainable=self.learned, dtype="float32", autocast=False, name="limit"
        )

    def _learned_limit(self, count: Any, *, bits: int = 8, signed: bool = True) -> Any:
        limit = tf.convert_to_tensor(self.limit.value)
        learning = learning_limit(limit, count, bits=bits, signed=signed)
        return tf.where(self.calls.another(), learning, tf.stop_gradient(learning))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "learned": self.learned, "freeze_after": self.freeze_after}


@keras.saving.register_keras_serializable("tfopt")
class FakeQuantize(_Range):
    """Passes a tensor on with the values that it will have in int8.

    `tfopt.quantize` puts it where the int8 kernels need a range. The range is a moving average of the largest value of
    each batch, or is learned; it is float32 whatever the tensor is.

    Args:
        signed: Whether the tensor has negative values.
        learned: Whether the optimizer trains the limit, else it is a moving average.
        freeze_after: After so many calls in training the limit stays; None for never.

    Example:
        >>> import numpy as np
        >>> layer = FakeQuantize(signed=False)
        >>> layer(np.array([-0.5, 0.2003, 1.5], "float32")).numpy().round(3)
        array([0. , 0.2, 1. ], dtype=float32)
    """

    def __init__(self, *, signed: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.signed = signed
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        self._add_limit(())

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = tf.cast(inputs, tf.float32)
        if training and self.trainable:
            values = fake_quantize(x, self._training_limit(x), signed=self.signed)
        else:
            limit = tf.maximum(tf.convert_to_tensor(self.limit.value), SMALLEST)
            values = tf.quantization.fake_quant_with_min_max_vars(
                x, -limit if self.signed else 0.0, limit, num_bits=8, narrow_range=self.signed
            )
        return tf.cast(values, inputs.dtype)

    def _training_limit(self, x: Any) -> Any:
        if self.learned:
            return self._learned_limit(tf.size(x) // tf.maximum(tf.shape(x)[0], 1), signed=self.signed)
        highest = tf.reduce_max(tf.abs(x) if self.signed else x)
        limit = tf.convert_to_tensor(self.limit.value)
        # Not finite: a replica without examples, or a step that loss scaling will throw away.
        moves = self.calls.another() & tf.math.is_finite(highest)
        limit = tf.where(moves, limit * MOMENTUM + highest * (1 - MOMENTUM), limit)
        self.limit.assign(limit)
        return tf.stop_gradient(tf.maximum(limit, SMALLEST))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "signed": self.signed}


@keras.saving.register_keras_serializable("tfopt")
class WeightRange(_Range):
    """The ranges of one layer's weights, a matrix with a column for each output channel.

    A column's limit is its largest value, unless limits are learned.
    """

    def __init__(self, *, bits: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.bits = bits

    def build(self, input_shape: Any) -> None:
        if self.learned:
            self._add_limit((input_shape[-1],))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if training and self.learned and self.trainable:
            return fake_quantize(inputs, self._learned_limit(inputs.shape[0], bits=self.bits), bits=self.bits)
        limit = self._limit(inputs)
        if training:
            return fake_quantize(inputs, tf.stop_gradient(limit), bits=self.bits)
        return tf.quantization.fake_quant_with_min_max_vars_per_channel(
            inputs, -limit, limit, num_bits=self.bits, narrow_range=True
        )

    def _limit(self, weights: Any) -> Any:
        if self.learned:
            return tf.maximum(tf.convert_to_tensor(self.limit.value), SMALLEST)
        limit = tf.reduce_max(tf.abs(weights), axis=0)
        return tf.where(limit > 0, limit, 1.0)  # a channel of zeros has no scale of its own

    def start(self, weights: np.ndarray) -> None:
        """Sets learned limits to what suits the weights: where the paper starts, but not beyond the largest."""
        if self.learned:
            magnitudes = np.abs(weights)
            usual = 2 * magnitudes.mean(0) * math.sqrt(steps_above_zero(self.bits))
            limit = np.minimum(usual, magnitudes.max(0))
            self.limit.assign(np.where(limit > 0, limit, 1.0))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bits": self.bits}
