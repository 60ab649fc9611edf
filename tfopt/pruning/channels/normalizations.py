"""Normalizations: each channel alone, groups of channels, or all channels together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from keras import layers

from tfopt.pruning.channels.call import Call, Part, Rule
from tfopt.pruning.channels.elements import Axis


def batch_normalization(call: Call) -> Sequence[tuple[Axis, ...]]:
    layer, x = call.operation, call.x
    for variable in (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance):
        call.follow(variable, x.axes[layer.axis], at=0)
    return [x.axes]


def group_normalization(call: Call) -> Sequence[tuple[Axis, ...]]:
    """A group is removed as a whole: the statistics of the others stay the same."""
    layer, x = call.operation, call.x
    axis = layer.axis % len(x.axes)
    others = tuple(call.fix(each, "averages over it") for number, each in enumerate(x.axes) if number != axis)
    channels = x.axes[axis]
    for variable in (layer.gamma, layer.beta):
        call.follow(variable, channels)
    if isinstance(channels, np.ndarray):
        rows = channels.reshape(layer.groups, -1)
        call.tie(rows)
        call.resize("groups", Part(channels, rows.shape[1]))
        if rows.shape[1] > 1:
            call.trace.heads.append(channels)
    return [(*others[:axis], channels, *others[axis:])]


def layer_normalization(call: Call) -> Sequence[tuple[Axis, ...]]:
    """The statistics are those of the axes that stay, so the outputs change when channels are removed."""
    layer, x = call.operation, call.x
    axes = [axis % len(x.axes) for axis in ([layer.axis] if isinstance(layer.axis, int) else layer.axis)]
    out = list(x.axes)
    for number, axis in enumerate(axes):
        for variable in (getattr(layer, "gamma", None), getattr(layer, "beta", None), getattr(layer, "scale", None)):
            if hasattr(variable, "shape"):  # `scale` of a LayerNormalization is a switch
                call.follow(variable, x.axes[axis], at=number)
        out[axis] = call.normalized(x.axes[axis])
    return [tuple(out)]


NORMALIZATIONS: dict[type, Rule] = {
    layers.BatchNormalization: batch_normalization,
    layers.GroupNormalization: group_normalization,
    layers.LayerNormalization: layer_normalization,
    layers.RMSNormalization: layer_normalization,
}
