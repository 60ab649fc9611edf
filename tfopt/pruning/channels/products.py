"""Layers with weights for each channel: dense layers, convolutions of every kind, embeddings, and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import layers

from tfopt.pruning.channels.call import Axis, Fixed, Ids, LayerCall, Part, Rule
from tfopt.pruning.channels.elementwise import activated


def dense(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    layer, x = call.operation, call.x
    out = call.weight(layer.kernel, 1)
    call.follow(layer.kernel, x.channels, at=0)
    call.follow(layer.bias, out)
    call.resize("units", out)
    call.work(x.sizes[:-1], call.weight(layer.kernel, 0), out)
    return [(*x.axes[:-1], activated(call, out, layer.activation))]


def einsum_dense(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """An axis that kernel and input share is coupled. A letter of the kernel and the output alone is a new axis."""
    layer, x = call.operation, call.x
    (terms, result), hidden = layer.equation.split("->"), len(x.shape)
    left, kernel = terms.split(",")
    # An ellipsis stands for the dimensions that the other letters leave.
    dots = "".join(chr(0x100 + number) for number in range(hidden - len(left.replace("...", ""))))
    left, result = left.replace("...", dots), result.replace("...", dots)
    axes: dict[str, Axis] = dict(zip(left, x.axes, strict=True))
    for number, letter in enumerate(kernel):
        call.follow(layer.kernel, axes.setdefault(letter, call.weight(layer.kernel, number)), at=number)
    out = [axes[letter] for letter in result]
    if layer.bias is not None:  # its dimensions are the last ones of the output
        for number in range(1, len(layer.bias.shape) + 1):
            if result[-number] in layer.bias_axes:
                call.follow(layer.bias, out[-number], at=-number)
    given = list(layer.partial_output_shape)
    for number in range(1, len(given) + 1):
        if given[-number] is not None and isinstance(out[-number], np.ndarray):
            given[-number] = out[-number]
    call.resize("output_shape", given)
    free = [size for letter, size in zip(left, x.sizes, strict=True) if letter not in kernel]
    call.work(free, *(call.weight(layer.kernel, number) for number in range(len(kernel))))
    return [(*out[:-1], activated(call, out[-1], layer.activation))]


def _convolution(follow: Callable[[LayerCall], Ids]) -> Rule:
    """Makes a rule of a function that couples the input with the kernels, and returns the output's channels."""

    def rule(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
        layer = call.operation
        if layer.data_format != "channels_last":
            return call.fix_all("has its channels first, and tfopt follows channels_last only")
        out = follow(call)
        call.follow(layer.bias, out)
        windows = call.fix_axes(call.x.axes[1:-1], "slides its window over this axis")
        return [(call.x.axes[0], *windows, activated(call, out, layer.activation))]

    return rule


@_convolution
def convolution(call: LayerCall) -> Ids:
    layer, x = call.operation, call.x
    out = call.weight(layer.kernel, -1)
    window = math.prod(layer.kernel_size)
    if layer.groups == 1:
        call.follow(layer.kernel, x.channels, at=-2)
        call.work(call.sizes[0][:-1], window, call.weight(layer.kernel, -2), out)
    else:
        _tie_groups(call, x.channels, out)
        call.work(call.sizes[0][:-1], window, int(layer.kernel.shape[-2]), out)
    call.resize("filters", out)
    if window == 1 < max(layer.strides) and isinstance(x.channels, np.ndarray):
        call.trace.strided.append(x.channels)
    return out


def _tie_groups(call: LayerCall, channels: Axis, out: Ids) -> None:
    """Couples the channels of each group of a grouped convolution: a group is removed as a whole."""
    groups = call.operation.groups
    rows = out.reshape(groups, -1)
    call.tie(rows)
    if isinstance(channels, Fixed):
        call.join(out, channels)
        return
    inside = channels.reshape(groups, -1)
    call.tie(inside)
    call.join(inside[:, 0], rows[:, 0])
    call.resize("groups", Part(out, rows.shape[1]))
    call.trace.heads.append(out)


@_convolution
def transposed_convolution(call: LayerCall) -> Ids:
    layer, x = call.operation, call.x
    out = call.weight(layer.kernel, -2)
    call.follow(layer.kernel, x.channels, at=-1)
    call.resize("filters", out)
    call.work(x.sizes[:-1], math.prod(layer.kernel_size), call.weight(layer.kernel, -1), out)
    return out


@_convolution
def depthwise_convolution(call: LayerCall) -> Ids:
    out = _followed_depthwise(call, call.operation.kernel)
    call.work(call.sizes[0][:-1], math.prod(call.operation.kernel_size), out)
    return out


@_convolution
def separable_convolution(call: LayerCall) -> Ids:
    layer = call.operation
    out = call.weight(layer.pointwise_kernel, -1)
    between = _followed_depthwise(call, layer.depthwise_kernel)
    call.follow(layer.pointwise_kernel, between, at=-2)
    call.resize("filters", out)
    call.work(call.sizes[0][:-1], math.prod(layer.kernel_size), between)
    call.work(call.sizes[0][:-1], between, out)
    return out


def _followed_depthwise(call: LayerCall, kernel: Any) -> Ids:
    inside = call.weight(kernel, -2)
    call.join(inside, call.x.channels)
    return np.repeat(inside, call.operation.depth_multiplier)


def embedding(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    out = call.weight(call.operation.embeddings, 1)
    call.resize("output_dim", out)
    return [(*call.x.axes, out)]


def reversible_embedding(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    layer = call.operation
    args, named = call.arguments
    if not (named.get("reverse") or any(arg is True for arg in args[1:])):
        return embedding(call)
    x = call.x
    if layer.tie_weights:
        call.follow(layer.embeddings, x.channels, at=1)
    else:
        call.follow(layer.reverse_embeddings, x.channels, at=0)
    call.work((*x.sizes[:-1], layer.input_dim), call.weight(layer.embeddings, 1))
    return [(*x.axes[:-1], Fixed("its axis is the vocabulary"))]


PRODUCTS: dict[type, Rule] = {
    layers.Dense: dense,
    layers.EinsumDense: einsum_dense,
    **dict.fromkeys((layers.Conv1D, layers.Conv2D, layers.Conv3D), convolution),
    **dict.fromkeys((layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose), transposed_convolution),
    **dict.fromkeys((layers.DepthwiseConv1D, layers.DepthwiseConv2D), depthwise_convolution),
    **dict.fromkeys((layers.SeparableConv1D, layers.SeparableConv2D), separable_convolution),
    layers.Embedding: embedding,
    layers.ReversibleEmbedding: reversible_embedding,
}


def batch_normalization(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    layer, x = call.operation, call.x
    for variable in (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance):
        call.follow(variable, x.axes[layer.axis], at=0)
    return [x.axes]


def group_normalization(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
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


def layer_normalization(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
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
