"""Splits layers that compute several ops, if a tensor between the ops needs a range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from tfopt.models.plain_models import plain_copy

SEPARABLE = {
    layers.SeparableConv1D: (layers.DepthwiseConv1D, layers.Conv1D),
    layers.SeparableConv2D: (layers.DepthwiseConv2D, layers.Conv2D),
}
CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.DepthwiseConv1D, layers.DepthwiseConv2D)
FUSED = (keras.activations.linear, keras.activations.relu, keras.activations.relu6)


def split_layer(layer: Any) -> Sequence[Any]:
    """Returns layers that together compute the same. Each tensor that needs a range is the output of one of them."""
    if type(layer) in SEPARABLE and layer.padding != "causal":  # DepthwiseConv1D has no causal padding
        return _split_separable(layer)
    if type(layer) in CONVOLUTIONS and layer.activation not in FUSED:
        activation = layers.Activation(
            layer.activation,
            activity_regularizer=layer.activity_regularizer,
            name=f"{layer.name}_activation",
            dtype=layer.dtype_policy,
        )
        return plain_copy(layer, activation=None, activity_regularizer=None), activation
    return (plain_copy(layer),)


def _split_separable(layer: Any) -> Sequence[Any]:
    """Returns the two convolutions of a separable convolution, and its activation if no kernel fuses it."""
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
    return first, *split_layer(second)
