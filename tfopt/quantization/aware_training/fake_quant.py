"""Fake quantization in training: values are rounded to the grid that int8 will have, and gradients pass through.

A grid has the step s, and p steps above zero; a signed grid has p steps below zero too. A value x becomes

    y = round(clip(x / s, -p or 0, p)) * s

The gradient of round counts as 1 (straight-through estimator, Bengio et al., arXiv:1308.3432). So dy/dx is 1 inside the
range and 0 outside.

Learned step size quantization (LSQ) gives the step s a gradient too, so that the optimizer trains the range. It is that
of Esser et al., ICLR 2020, arXiv:1902.08153, equation 3: round(x / s) - x / s inside the range, and -p or p outside,
times 1 / sqrt(N p) for N values. The trained variable is the limit p * s in place of s. Its gradient is p times as
large, so that SGD changes the step as in the paper. The reason for the limit is Adam, whose updates are about as large
as the learning rate, whatever the gradient is. The limit has the magnitude of the values, so this update suits it. The
step is about a hundredth of the limit, so the same update would be much too large for it.

At inference, TensorFlow's own fake-quantization ops compute the same values. The exporters read these ops in the frozen
graph.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfopt.quantization.annotation.grids import steps_above_zero

MOMENTUM = 0.99


def fake_quantize(x: Any, limit: Any, *, bits: int = 8, signed: bool = True) -> Any:
    """Rounds float32 values to a symmetric grid, with straight-through gradients for the values and the limit.

    The limit is the largest value of the grid: a scalar, or one number for each entry of the last axis. An unsigned
    grid begins at 0.

    Example:
        >>> fake_quantize(tf.constant([-2.0, 0.33, 0.9]), 0.7, bits=4).numpy()
        array([-0.7,  0.3,  0.7], dtype=float32)
    """
    qmax = steps_above_zero(bits, signed=signed)
    step = limit / qmax
    scaled = tf.clip_by_value(x / step, -qmax if signed else 0, qmax)
    return (scaled + tf.stop_gradient(tf.round(scaled) - scaled)) * step


@keras.saving.register_keras_serializable("tfopt")
class CallCount(layers.Layer):
    """Counts the calls in training, up to a limit."""

    def __init__(self, *, limit: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.limit = limit
        if limit is not None:
            self.count = self.add_weight(
                shape=(), initializer="zeros", trainable=False, dtype="int64", autocast=False, name="count"
            )
        self.built = True

    def another(self) -> Any:
        """Counts a call, and returns whether it is within the limit."""
        if self.limit is None:
            return tf.constant(True)
        count = tf.convert_to_tensor(self.count.value)
        self.count.assign(count + 1)
        return count < self.limit


class _Range(layers.Layer):
    """The common part of the ranges of activations and of weights."""

    def __init__(self, *, learned: bool = False, freeze_after: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.learned = learned
        self.freeze_after = freeze_after
        self.calls = CallCount(limit=freeze_after, dtype="float32", name="calls")

    def _add_limit(self, shape: tuple[int, ...]) -> None:
        # float32, because a moving average in half precision would not change.
        self.limit = self.add_weight(
            shape=shape, initializer="ones", trainable=self.learned, dtype="float32", autocast=False, name="limit"
        )

    def _learned_limit(self, count: Any, *, bits: int = 8, signed: bool = True) -> Any:
        limit = tf.convert_to_tensor(self.limit.value)
        learning = learning_limit(limit, count, bits=bits, signed=signed)
        return tf.where(self.calls.another(), learning, tf.stop_gradient(learning))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "learned": self.learned, "freeze_after": self.freeze_after}


@keras.saving.register_keras_serializable("tfopt")
class FakeQuantize(_Range):
    """Rounds a tensor to the values that it will have in int8.

    `tfopt.quantize` inserts it where the int8 kernels need a range. The limit of the range is a moving average of the
    largest value of each batch, or is learned. It is float32 for tensors of any dtype.

    Args:
        signed: Whether the tensor has negative values.
        learned: Whether the optimizer trains the limit. Otherwise the limit is a moving average.
        freeze_after: The limit stays fixed after this number of calls in training. None means it is never fixed.

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
        # It is not finite in a replica without examples, and in a step that loss scaling will skip.
        moves = self.calls.another() & tf.math.is_finite(highest)
        limit = tf.where(moves, limit * MOMENTUM + highest * (1 - MOMENTUM), limit)
        self.limit.assign(limit)
        return tf.stop_gradient(tf.maximum(limit, SMALLEST))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "signed": self.signed}


@keras.saving.register_keras_serializable("tfopt")
class WeightRange(_Range):
    """The ranges of one layer's weights, given as a matrix with a column for each output channel.

    The limit of a column is its largest absolute value, or is learned.
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
        """Sets learned limits to the initial value of the LSQ paper, or to the largest weight if that is smaller."""
        if self.learned:
            magnitudes = np.abs(weights)
            usual = 2 * magnitudes.mean(0) * math.sqrt(steps_above_zero(self.bits))
            limit = np.minimum(usual, magnitudes.max(0))
            self.limit.assign(np.where(limit > 0, limit, 1.0))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bits": self.bits}


# Values are divided by the limit, which training could make zero. Its square must stay a number of float32.
SMALLEST = 1e-12


def scale_gradient(x: Any, factor: Any) -> Any:
    """Returns x with a gradient that is `factor` times as large."""
    return tf.stop_gradient(x) + (x - tf.stop_gradient(x)) * factor


def learning_limit(limit: Any, count: Any, *, bits: int = 8, signed: bool = True) -> Any:
    """Returns a trained limit with the gradient of LSQ; see the docstring of the module.

    `count` is how many values share one limit: for an activation, the number of values in one example.
    """
    qmax = steps_above_zero(bits, signed=signed)
    gradient_scale = tf.math.rsqrt(tf.cast(count, tf.float32) * qmax)
    return scale_gradient(tf.maximum(limit, SMALLEST), gradient_scale * qmax**2)
