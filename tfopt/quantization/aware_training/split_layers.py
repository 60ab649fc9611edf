"""Takes layers apart that compute several things, where a range must lie between these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from tfopt.quantization.aware_training.rebuild import plain_copy

SEPARABLE = {
    layers.SeparableConv1D: (layers.DepthwiseConv1D, layers.Conv1D),
    layers.SeparableConv2D: (layers.DepthwiseConv2D, layers.Conv2D),
}
CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.DepthwiseConv1D, layers.DepthwiseConv2D)
FUSED = (keras.activations.linear, keras.activations.relu, keras.activations.relu6)


def unfused(layer: Any) -> Sequence[Any]:
    """Returns layers that compute what one does, so that each tensor that needs a range is between two of them."""
    if type(layer) in SEPARABLE and layer.padding != "causal":  # which no depthwise convolution pads by itself
        return _halves(layer)
    if type(layer) in CONVOLUTIONS and layer.activation not in FUSED:
        activation = layers.Activation(
            layer.activation,
            activity_regularizer=layer.activity_regularizer,
            name=f"{layer.name}_activation",
            dtype=layer.dtype_policy,
        )
        return plain_copy(layer, activation=None, activity_regularizer=None), activation
    return (plain_copy(layer),)


def _halves(layer: Any) -> Sequence[Any]:
    """Returns the two convolutions, and the activation where no kernel fuses it, of a separable convolution."""
    depthwise, pointwise = SEPARABLE[type(layer)]
    common = {"dtype": layer.dtype_policy, "data_format": layer.data_format, "trainable": layer.trainable}
    first = depthwise(
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        depth_multiplier=layer.depth_multiplier,
        dilation_rate=layer.dilation_rate,
        use_bias=False,
        depthwise_regularizer=layer.depthwise_regularizer,
        depthwise_constraint=layer.depthwise_constraint,
        name=f"{layer.name}_depthwise",
        **common,
    )
    second = pointwise(
        layer.filters,
        1,
        use_bias=layer.use_bias,
        activation=layer.activation,
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        bias_regularizer=layer.bias_regularizer,
        bias_constraint=layer.bias_constraint,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        **common,
    )
    return first, *unfused(second)
