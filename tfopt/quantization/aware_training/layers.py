"""Keras layers with fake quantization: they compute with weights rounded to the grid of int8 or int4.

Each class is a subclass of the layer that it is named after, with the same config. `call` runs the `call` of that layer
with the rounded weights in place of the variable. The variable itself stays float. So optimizers, regularizers,
constraints and pruning masks work as usual, and zeros stay zeros.

The grid has one scale for each output channel. So rounding commutes with the scale of a batch norm after the layer:
round(W * scale) = round(W) * scale. Therefore batch norm is not folded in training. The export folds it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfopt.compat.layers import no_autocast
from tfopt.quantization.aware_training.fake_quant import CallCount, WeightRange


class _RoundedWeights:
    """Replaces one variable by its rounded weights during a call of the layer.

    With 7 of the 8 bits no processor overflows (reduce_range). The limits of the grid are the largest weights, or are
    trained (`learned_ranges`) up to a number of calls.
    """

    rounded = "kernel"

    def __init__(
        self,
        *args: Any,
        weight_bits: int = 8,
        learned_ranges: bool = False,
        freeze_after: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        # It is a separate layer, so that its state is saved in whatever way the original layer saves its own state.
        self.weight_range: Any = WeightRange(
            bits=weight_bits, learned=learned_ranges, freeze_after=freeze_after, dtype="float32", name="weight_range"
        )

    def channel_axes(self, rank: int) -> tuple[int, ...]:
        """Returns the axes of the weights that are output channels."""
        return (rank - 1,)

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)  # type: ignore[misc]
        shape = getattr(self, self.rounded).shape
        self.weight_range.build((None, math.prod(shape[axis] for axis in self.channel_axes(len(shape)))))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        variable = getattr(self, self.rounded)
        with no_autocast():  # the grid of weights in half precision would be different
            weights = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
        rounded = self._from_matrix(self.weight_range(self._as_matrix(weights), training=training), weights.shape)
        with keras.StatelessScope([(variable, rounded)]):
            return super().call(inputs)  # type: ignore[misc]

    def start_range(self) -> None:
        """Sets the initial values of learned limits from the current weights."""
        self.weight_range.start(self._as_matrix(tf.convert_to_tensor(getattr(self, self.rounded).value)).numpy())

    def _as_matrix(self, weights: Any) -> Any:
        """Returns weights as a matrix with a column for each output channel."""
        order = self._matrix_order(len(weights.shape))
        columns = math.prod(weights.shape[axis] for axis in self.channel_axes(len(weights.shape)))
        return tf.reshape(tf.transpose(weights, order), [-1, columns])

    def _from_matrix(self, matrix: Any, shape: Any) -> Any:
        order = self._matrix_order(len(shape))
        return tf.transpose(tf.reshape(matrix, [shape[axis] for axis in order]), np.argsort(order))

    def _matrix_order(self, rank: int) -> tuple[int, ...]:
        channels = self.channel_axes(rank)
        return (*(axis for axis in range(rank) if axis not in channels), *channels)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),  # type: ignore[misc]
            "weight_bits": self.weight_range.bits,
            "learned_ranges": self.weight_range.learned,
            "freeze_after": self.weight_range.freeze_after,
        }


@keras.saving.register_keras_serializable("tfopt")
class QuantizedDense(_RoundedWeights, layers.Dense):
    """`keras.layers.Dense` with rounded weights."""


@keras.saving.register_keras_serializable("tfopt")
class QuantizedEinsumDense(_RoundedWeights, layers.EinsumDense):
    """`keras.layers.EinsumDense` with rounded weights."""

    def channel_axes(self, rank: int) -> tuple[int, ...]:
        _, kernel, result = re.split(",|->", self.equation.replace(" ", ""))
        return tuple(axis for axis, label in enumerate(kernel) if label in result)


@keras.saving.register_keras_serializable("tfopt")
class QuantizedConv1D(_RoundedWeights, layers.Conv1D):
    """`keras.layers.Conv1D` with rounded weights."""


@keras.saving.register_keras_serializable("tfopt")
class QuantizedConv2D(_RoundedWeights, layers.Conv2D):
    """`keras.layers.Conv2D` with rounded weights."""


class _Depthwise(_RoundedWeights):
    def channel_axes(self, rank: int) -> tuple[int, ...]:
        return rank - 2, rank - 1


@keras.saving.register_keras_serializable("tfopt")
class QuantizedDepthwiseConv1D(_Depthwise, layers.DepthwiseConv1D):
    """`keras.layers.DepthwiseConv1D` with rounded weights."""


@keras.saving.register_keras_serializable("tfopt")
class QuantizedDepthwiseConv2D(_Depthwise, layers.DepthwiseConv2D):
    """`keras.layers.DepthwiseConv2D` with rounded weights."""


class _Transpose(_RoundedWeights):
    def channel_axes(self, rank: int) -> tuple[int, ...]:
        return (rank - 2,)


@keras.saving.register_keras_serializable("tfopt")
class QuantizedConv1DTranspose(_Transpose, layers.Conv1DTranspose):
    """`keras.layers.Conv1DTranspose` with rounded weights."""


@keras.saving.register_keras_serializable("tfopt")
class QuantizedConv2DTranspose(_Transpose, layers.Conv2DTranspose):
    """`keras.layers.Conv2DTranspose` with rounded weights."""


@keras.saving.register_keras_serializable("tfopt")
class QuantizedEmbedding(_RoundedWeights, layers.Embedding):
    """`keras.layers.Embedding` with rounded vectors, one scale for each of their entries."""

    rounded = "embeddings"


@keras.saving.register_keras_serializable("tfopt")
class FrozenLateBatchNormalization(layers.BatchNormalization):
    """`keras.layers.BatchNormalization` that uses its moving statistics after a number of calls in training.

    From then on it normalises as in inference, so that the ranges after it become stable (Krishnamoorthi,
    arXiv:1806.08342, section 3.2.2).
    """

    def __init__(self, *, freeze_after: int, **options: Any) -> None:
        super().__init__(**options)
        self.freeze_after = freeze_after
        self.calls = CallCount(limit=freeze_after, dtype="float32", name="calls")

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        normalize = super().call
        if not (training and self.trainable):
            return normalize(inputs, training=False, mask=mask)
        return tf.cond(
            self.calls.another(),
            lambda: normalize(inputs, training=True, mask=mask),
            lambda: normalize(inputs, training=False, mask=mask),
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "freeze_after": self.freeze_after}


QUANTIZED: dict[type, Any] = {
    layers.Dense: QuantizedDense,
    layers.EinsumDense: QuantizedEinsumDense,
    layers.Conv1D: QuantizedConv1D,
    layers.Conv2D: QuantizedConv2D,
    layers.DepthwiseConv1D: QuantizedDepthwiseConv1D,
    layers.DepthwiseConv2D: QuantizedDepthwiseConv2D,
    layers.Conv1DTranspose: QuantizedConv1DTranspose,
    layers.Conv2DTranspose: QuantizedConv2DTranspose,
    layers.Embedding: QuantizedEmbedding,
}
# Layers that are rounded even if no int8 kernel computes them. Transposed convolutions and embeddings have no kernel.
# Convolutions of one axis have one only in some cases.
WITHOUT_KERNEL = (
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Embedding),
    *(layers.Conv1D, layers.DepthwiseConv1D),
)
