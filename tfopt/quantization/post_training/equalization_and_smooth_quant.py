"""Equalization and SmoothQuant: channels are rescaled so that activations and weights both fit their int8 ranges.

An activation has one scale for all its channels. If one channel is a hundred times as large as the others, only two or
three steps are left for the others. Weights have one scale per output channel, for all input channels. If the weights
of one input channel are a hundred times as large, few steps are left for the others. A channel c of the activation can
be divided by s[c] if the weights that read it are multiplied by s[c] (see channel_groups.py). The results in float stay
the same. Let a[c] be the largest value of the activation's channel, and w[c] that of the weights that read it:

    s[c] = a[c]^alpha / w[c]^(1 - alpha)

With alpha = 0.5, the activation and the weights have the same largest value sqrt(a[c] w[c]) in every channel. This is
cross-layer equalization (Nagel et al., ICCV 2019, arXiv:1906.04721). The paper estimates the ranges of the activation
from the weights before it; here calibration data give the ranges. It is also SmoothQuant (Xiao et al., ICML 2023,
arXiv:2211.10438): there the division goes into the scale and offset of a normalisation, and all projections that read
the activation share s.

Channels are rescaled only where the rounding errors become clearly smaller. The errors are computed from the ranges,
without running the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor
from tfopt.graph.fold import WEIGHTED
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.quantization.calibration.calibrate import in_pieces
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.post_training.channel_groups import INPUT_AXIS, ChannelGroup, find_groups, rescale
from tfopt.report import Change

WORTHWHILE = 0.5  # rescale where the mean squared error is at most this share of what it was
LARGEST_SCALE = 1e4
ONE = np.ones(1)


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """What a convolution or product reads: the largest value and mean square of each channel, and the weights.

    The weights are [taps, channels, outputs], normalised so that the largest of each output is 1; for a depthwise
    convolution [taps, channels].
    """

    limits: np.ndarray
    squares: np.ndarray
    signed: bool
    weights: np.ndarray


def balancing_scales(activation: np.ndarray, weights: np.ndarray, alpha: float = 0.5) -> np.ndarray:
    """Returns the vector s that divides an activation's channels: activation^alpha / weights^(1 - alpha).

    Both are the largest absolute values of each channel. The geometric mean of the scales is 1 over the channels that
    are used. A channel of zeros gets the scale that brings its weights to the median. A channel with zero weights gets
    the scale that brings its activation to the median.

    Example:
        >>> balancing_scales(np.array([100.0, 1.0]), np.array([1.0, 1.0])).round(2).tolist()
        [3.16, 0.32]
    """
    used = (activation > 0) & (weights > 0)
    if not used.any():
        return np.ones(len(activation))
    logs = np.zeros(len(activation))
    a, w = (np.log(each, where=each > 0, out=logs.copy()) for each in (activation, weights))
    logs[used] = alpha * a[used] - (1 - alpha) * w[used]
    logs[used] -= logs[used].mean()
    silent, unread = ~used & (weights > 0), ~used & (activation > 0)
    logs[silent] = np.median((w + logs)[used]) - w[silent]
    logs[unread] = a[unread] - np.median((a - logs)[used])
    return np.clip(np.exp(logs), 1 / LARGEST_SCALE, LARGEST_SCALE)


def rounding_error(statistics: ChannelStatistics, scales: np.ndarray) -> float:
    """Returns the mean squared error in the results of an op that rounding its activation and weights causes.

    Each rounding is taken as an independent error, uniform over a step, or as the value itself if that is smaller. All
    results have the same weight, whatever their size.
    """
    values, squares = statistics.limits / scales, statistics.squares / scales**2
    step = values.max() / (127 if statistics.signed else 255)
    error = np.minimum(step**2 / 12, squares)
    if statistics.weights.ndim == 2:  # a depthwise convolution has one scale for the weights of each channel
        return float((error * (statistics.weights * scales) ** 2).sum())
    weights = statistics.weights * scales[:, None]
    steps = np.abs(weights).max(axis=(0, 1)) / 127
    from_weights = np.minimum(steps**2 / 12, weights**2).sum(axis=(0, 2)) * squares
    return float((error * (weights**2).sum(axis=(0, 2)) + from_weights).sum())


def equalize(
    graph: FrozenGraph, fusions: Sequence[Fusion], batches: Sequence[Mapping[str, Any]], config: QuantizationConfig
) -> tuple[FrozenGraph, list[Change]]:
    """Returns a folded float graph that computes the same with more similar ranges of channels, and the changes.

    The results of convolutions and products are rescaled with `config.equalization`, those of normalisations with
    `config.smooth_quant`.
    """
    editor = GraphEditor(graph.graph_def)
    wanted = {True: config.equalization, False: config.smooth_quant > 0}
    groups = [group for group in find_groups(graph, editor, fusions) if wanted[group.is_absorbed_by_weights(editor)]]
    if not groups:
        return graph, []
    heads = {fusion.op for fusion in fusions}
    statistics, reached = _measure(graph, editor, groups, batches)
    done = []
    for group in groups:
        if any(reached[name] >= 6.0 for name in group.relu6(editor)):
            continue
        quantized = [statistics[name] for name in sorted(group.multiplied & heads)]
        if not all(np.isfinite(each.limits).all() and np.isfinite(each.squares).all() for each in quantized):
            continue  # the calibration raises the error
        before = np.array([rounding_error(each, ONE) for each in quantized])
        if not before.all():
            continue  # the activation or the weights are zero
        by_weights = group.is_absorbed_by_weights(editor)
        scales = _scales(quantized, 0.5 if by_weights else config.smooth_quant)
        ratio = np.mean([rounding_error(each, scales) for each in quantized] / before)
        if ratio <= WORTHWHILE:
            rescale(editor, group, scales)
            detail = f"{group.channels} channels rescaled for {', '.join(sorted(group.multiplied))}: "
            detail += f"rounding errors {np.sqrt(ratio):.2g}x what they were"
            done.append(Change(name=group.seed, kind="equalization" if by_weights else "smooth_quant", detail=detail))
    return graph.edited(editor), done


def _scales(statistics: Sequence[ChannelStatistics], alpha: float) -> np.ndarray:
    """Returns the scales of a group, from the largest activations and weights of all ops that read it."""
    activation = np.max([each.limits / (each.limits.max() or 1.0) for each in statistics], axis=0)
    products = [each.weights for each in statistics if each.weights.ndim == 3]
    if not products:
        return balancing_scales(activation, np.ones_like(activation), alpha=1.0)
    # The mean over the outputs, not the largest: that would be 1 in nearly every channel, since weights are normalised.
    weights = np.max([np.sqrt((np.abs(each).max(axis=0) ** 2).mean(axis=1)) for each in products], axis=0)
    return balancing_scales(activation, weights, alpha)


def _measure(
    graph: FrozenGraph, editor: GraphEditor, groups: Sequence[ChannelGroup], batches: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, ChannelStatistics], dict[str, float]]:
    """Returns the statistics of each op that reads a group, and the largest value of each Relu6 in a group."""
    channels = {name: group.channels for group in groups for name in group.multiplied}
    clipped = sorted(name for group in groups for name in group.relu6(editor))
    tensors = sorted({editor.nodes[name].input[0] for name in channels})
    widths = {editor.nodes[name].input[0]: count for name, count in channels.items()}
    limits = {tensor: np.zeros(widths[tensor]) for tensor in tensors}
    squares = {tensor: np.zeros(widths[tensor]) for tensor in tensors}
    lowest = dict.fromkeys(tensors, 0.0)
    reached = dict.fromkeys(clipped, 0.0)
    function = graph.as_function(fetch=[*tensors, *clipped])
    pieces = 0
    for piece in in_pieces(batches):
        values = function(**piece)
        pieces += 1
        for tensor, value in zip(tensors, values, strict=False):
            rows = tf.reshape(value, [-1, widths[tensor]])
            limits[tensor] = np.maximum(limits[tensor], tf.reduce_max(tf.abs(rows), axis=0).numpy())
            squares[tensor] += tf.reduce_mean(tf.square(rows), axis=0).numpy()
            lowest[tensor] = min(lowest[tensor], float(tf.reduce_min(rows)))
        for name, value in zip(clipped, values[len(tensors) :], strict=True):
            reached[name] = max(reached[name], float(tf.reduce_max(value)))
    statistics = {}
    for name, count in channels.items():
        tensor = editor.nodes[name].input[0]
        statistics[name] = ChannelStatistics(
            limits=limits[tensor],
            squares=squares[tensor] / max(pieces, 1),
            signed=lowest[tensor] < 0,
            weights=_normalised_weights(editor, name, count),
        )
    return statistics, reached


def _normalised_weights(editor: GraphEditor, name: str, channels: int) -> np.ndarray:
    node = editor.nodes[name]
    assert node.op in WEIGHTED
    weights = np.moveaxis(editor.value(node.input[1]).astype(np.float64), INPUT_AXIS[node.op], -2)
    if node.op == "DepthwiseConv2dNative":
        taps = weights.reshape(-1, channels)
        return taps / np.maximum(np.abs(taps).max(axis=0), 1e-30)
    matrix = weights.reshape(-1, channels, weights.shape[-1])
    return matrix / np.maximum(np.abs(matrix).max(axis=(0, 1)), 1e-30)
