"""Moves the spread of ranges between channels from activations into the weights that read them, or back.

An activation has one scale for all its channels. If one channel is a hundred times as large as the others, these have
two or three steps left. Weights have one scale per output channel, across all input channels: if those of one input
are a hundred times as large, the others have few steps. Dividing each channel c of the activation by s[c] and
multiplying the weights that read it (see channel_groups.py) changes neither in float, and trades one spread for the
other. With a[c] the largest value of an activation's channel and w[c] that of the weights reading it,

    s[c] = a[c]^alpha / w[c]^(1 - alpha)

At alpha = 0.5 both then reach as far, sqrt(a[c] w[c]) in every channel. That is cross-layer equalization, where the
activation's ranges are stood in for by those of the weights before it (Nagel et al., ICCV 2019, arXiv:1906.04721);
calibration data give the ranges themselves. It is also SmoothQuant (Xiao et al., ICML 2023, arXiv:2211.10438), where
the division goes into the scale and offset of a normalisation, and projections that read the same activation share s.

Rescaling is left alone where the rounding errors that result would not be clearly smaller: these follow from the
ranges, so that they are known without running anything.
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
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.calibration.calibrate import in_pieces
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.post_training.channel_groups import INPUT_AXIS, ChannelGroup, find_groups, rescale
from tfopt.report import Change

WORTHWHILE = 0.5  # rescale where the mean squared error is at most this share of what it was
LARGEST_SCALE = 1e4
ONE = np.ones(1)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A convolution or product as the reader of a rescaled activation.

    Attributes:
        limits: Largest absolute value of each channel of the activation.
        squares: Mean square of each channel.
        signed: Whether the activation is ever negative.
        weights: [taps, channels, outputs], each output's largest being 1; of a depthwise convolution [taps, channels].
    """

    limits: np.ndarray
    squares: np.ndarray
    signed: bool
    weights: np.ndarray


def balancing_scales(activation: np.ndarray, weights: np.ndarray, alpha: float = 0.5) -> np.ndarray:
    """Returns the vector s to divide an activation's channels by: activation^alpha / weights^(1 - alpha).

    Args:
        activation: Largest absolute value of each channel.
        weights: Likewise of the weights that read each channel.
        alpha: How much of the activation's spread moves into the weights: 1 all of it.
    Returns: Scales whose geometric mean is 1 over the channels that are used. What is not used stays within the rest: a
        channel that is zero throughout gets weights as large as the median, one that is not read a median activation.
    Example:
        >>> balancing_scales(np.array([100.0, 1.0]), np.array([1.0, 1.0])).round(2).tolist()
        [3.16, 0.32]
    """
    used = (activation > 0) & (weights > 0)
    if not used.any():
        return np.ones(len(activation))
    logs = np.zeros(len(activation))
    a, w = (
        np.log(activation, where=activation > 0, out=logs.copy()),
        np.log(weights, where=weights > 0, out=logs.copy()),
    )
    logs[used] = alpha * a[used] - (1 - alpha) * w[used]
    logs[used] -= logs[used].mean()
    silent, unread = ~used & (weights > 0), ~used & (activation > 0)
    logs[silent] = np.median((w + logs)[used]) - w[silent]
    logs[unread] = a[unread] - np.median((a - logs)[used])
    return np.clip(np.exp(logs), 1 / LARGEST_SCALE, LARGEST_SCALE)


def rounding_error(reading: Reading, scales: np.ndarray) -> float:
    """Returns the mean squared error that rounding activation and weights causes in the reader's results.

    Each rounding is an independent error, uniform over a step, or the value itself where that is smaller; the results
    count alike, however large they are.
    """
    values, squares = reading.limits / scales, reading.squares / scales**2
    step = values.max() / (127 if reading.signed else 255)
    error = np.minimum(step**2 / 12, squares)
    if reading.weights.ndim == 2:  # each channel of a depthwise convolution has a scale of its own for its weights
        return float((error * (reading.weights * scales) ** 2).sum())
    weights = reading.weights * scales[:, None]
    steps = np.abs(weights).max(axis=(0, 1)) / 127
    from_weights = np.minimum(steps**2 / 12, weights**2).sum(axis=(0, 2)) * squares
    return float((error * (weights**2).sum(axis=(0, 2)) + from_weights).sum())


def equalize(
    graph: FrozenGraph, batches: Sequence[Mapping[str, Any]], config: QuantizationConfig
) -> tuple[FrozenGraph, list[Change]]:
    """Returns a graph that computes the same, with channels whose ranges are more alike, and what was rescaled.

    Args:
        graph: A folded float graph.
        batches: Calibration data as `graph.feed` returns it.
        config: Says whether to rescale behind convolutions and products (`equalization`) and behind normalisations
            (`smooth_quant`).
    """
    editor = GraphEditor(graph.graph_def)
    fusions, _ = find_fusions(graph, editor, config.exclude)
    wanted = {True: config.equalization, False: config.smooth_quant > 0}
    groups = [group for group in find_groups(graph, editor, fusions) if wanted[group.is_absorbed_by_weights(editor)]]
    if not groups:
        return graph, []
    heads = {fusion.op for fusion in fusions}
    readings, reached = _measure(graph, editor, groups, batches)
    done = []
    for group in groups:
        if any(reached[name] >= 6.0 for name in group.relu6(editor)):
            continue
        quantized = [readings[name] for name in sorted(group.multiplied & heads)]
        if not all(np.isfinite(each.limits).all() and np.isfinite(each.squares).all() for each in quantized):
            continue  # the calibration tells of it
        before = np.array([rounding_error(each, ONE) for each in quantized])
        if not before.all():
            continue  # nothing there to round
        by_weights = group.is_absorbed_by_weights(editor)
        scales = _scales(quantized, 0.5 if by_weights else config.smooth_quant)
        ratio = np.mean([rounding_error(each, scales) for each in quantized] / before)
        if ratio <= WORTHWHILE:
            rescale(editor, group, scales)
            done.append(
                Change(
                    name=group.seed,
                    kind="equalization" if by_weights else "smooth_quant",
                    detail=f"{group.channels} channels rescaled for {', '.join(sorted(group.multiplied))}: "
                    f"rounding errors {np.sqrt(ratio):.2g}x what they were",
                )
            )
    return graph.edited(editor), done


def _scales(readings: Sequence[Reading], alpha: float) -> np.ndarray:
    """Returns the scales for all that read one group: the largest of their activations and of their weights count."""
    activation = np.max([reading.limits / (reading.limits.max() or 1.0) for reading in readings], axis=0)
    products = [reading.weights for reading in readings if reading.weights.ndim == 3]
    if not products:
        return balancing_scales(activation, np.ones_like(activation), alpha=1.0)
    # Over an output's own range, the mean over many outputs: their largest would be 1 in nearly every channel.
    weights = np.max([np.sqrt((np.abs(each).max(axis=0) ** 2).mean(axis=1)) for each in products], axis=0)
    return balancing_scales(activation, weights, alpha)


def _measure(
    graph: FrozenGraph, editor: GraphEditor, groups: Sequence[ChannelGroup], batches: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Reading], dict[str, float]]:
    """Returns what each reader of a group reads, and the largest value of each Relu6 in one."""
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
    readings = {}
    for name, count in channels.items():
        tensor = editor.nodes[name].input[0]
        readings[name] = Reading(
            limits=limits[tensor],
            squares=squares[tensor] / max(pieces, 1),
            signed=lowest[tensor] < 0,
            weights=_normalised_weights(editor, name, count),
        )
    return readings, reached


def _normalised_weights(editor: GraphEditor, name: str, channels: int) -> np.ndarray:
    node = editor.nodes[name]
    assert node.op in WEIGHTED
    weights = np.moveaxis(editor.value(node.input[1]).astype(np.float64), INPUT_AXIS[node.op], -2)
    if node.op == "DepthwiseConv2dNative":
        taps = weights.reshape(-1, channels)
        return taps / np.maximum(np.abs(taps).max(axis=0), 1e-30)
    matrix = weights.reshape(-1, channels, weights.shape[-1])
    return matrix / np.maximum(np.abs(matrix).max(axis=(0, 1)), 1e-30)
