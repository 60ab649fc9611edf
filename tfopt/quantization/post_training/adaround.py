"""AdaRound: rounds each weight up or down so that the results of the layer change as little as possible.

Rounding every weight to the nearest step does not give the smallest change of the results, because the errors of
several weights can cancel. Let X be the layer's inputs on calibration data, and D the rounding errors of its weights.
The results change by X D. The mean square of this is D' H D with H = X' X / n. Only H is stored, so all examples and
all positions count, and the memory does not grow with their number.

AdaRound (Nagel et al., ICML 2020, arXiv:2004.10568) relaxes the choice between up and down. A weight becomes its lower
step plus h(v) in [0, 1]. Gradient descent finds v, and a growing penalty drives h to 0 or 1. Afterwards single weights
are moved to their other step where that lowers the error. The loss of the paper also contains the activation after the
layer, which can clip errors; the loss here does not. An output channel is rounded to nearest if its error is not
smaller with AdaRound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, NodeDef, attribute
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import Fusion, before_data_movement
from tfopt.quantization.annotation.grids import Range, WeightGrid
from tfopt.quantization.calibration.calibrate import in_pieces
from tfopt.report import Change

ITERATIONS = 400
LEARNING_RATE = 0.02
PENALTY = 0.3  # the error is scaled so that rounding to nearest has the error 1
WARM_UP = 0.2  # share of the iterations without penalty
BETA = (20.0, 2.0)  # exponent of the penalty at its beginning and end
ZETA, GAMMA = 1.1, -0.1  # the sigmoid is stretched to these ends and clipped, so that it reaches 0 and 1
DESCENTS = 64  # how many single weights of each output are moved at the end, at most
ON_GRID = 0.01  # a weight closer than this to a step, in steps, is already rounded
LARGEST = 8192  # weights per output; H has the square of this number
LARGEST_WINDOWS = 2**26  # values in all windows at a time
DEPTHWISE = "DepthwiseConv2dNative"


def round_adaptively(weights: np.ndarray, scales: np.ndarray, gram: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns weights rounded to multiples of `scales` so that the results change as little as possible.

    The weights are [groups, inputs, outputs]: a depthwise convolution has one group per channel, any other op one
    group. The scales are [groups, 1, outputs]. `gram` is the mean of x x' over the inputs x of each group, [groups,
    inputs, inputs]. The second result is the ratio of their error to the error of rounding to nearest.

    Example:
        >>> both = np.array([[[1.0, 0.9], [0.9, 1.0]]])  # two inputs that are nearly the same
        >>> rounded, _ = round_adaptively(np.array([[[0.4], [0.4]]]), np.ones((1, 1, 1)), both)
        >>> sorted(rounded.reshape(-1).tolist())  # the sum is 0.8: one up is better than both down
        [0.0, 1.0]
    """
    positions = weights / scales
    nearest = np.rint(positions)
    lower = np.floor(positions)
    fixed = np.abs(positions - nearest) < ON_GRID
    error_of_nearest = _errors(nearest - positions, scales, gram)
    up = _relaxed(positions - lower, fixed, scales, gram, float(error_of_nearest.sum()))
    chosen = np.where(fixed, nearest, lower + up)
    chosen = _descended(chosen, positions, fixed, scales, gram)
    error = _errors(chosen - positions, scales, gram)
    better = error < error_of_nearest
    chosen = np.where(better[:, None, :], chosen, nearest)
    ratio = float(np.minimum(error, error_of_nearest).sum() / max(float(error_of_nearest.sum()), 1e-30))
    return (chosen * scales).astype(weights.dtype), ratio if better.any() else 1.0


def _errors(steps: np.ndarray, scales: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Returns the mean squared error of each output, [groups, outputs]."""
    moved = steps * scales
    return np.asarray((moved * (gram @ moved)).sum(axis=1))


def _descended(
    chosen: np.ndarray, positions: np.ndarray, fixed: np.ndarray, scales: np.ndarray, gram: np.ndarray
) -> np.ndarray:
    """Moves one weight of each output to its other step, the one that lowers the error most, until none lowers it."""
    chosen, lower = chosen.copy(), np.floor(positions)
    moved = gram @ ((chosen - positions) * scales)
    own = np.diagonal(gram, axis1=1, axis2=2)[..., None]
    for _ in range(DESCENTS):
        change = np.where(chosen > lower, -1.0, 1.0) * scales
        gain = np.where(fixed, 0.0, change * (2 * moved + change * own))
        place = gain.argmin(axis=1, keepdims=True)
        worth = np.take_along_axis(gain, place, axis=1) < -1e-12
        if not worth.any():
            break
        step = np.where(worth, np.take_along_axis(change, place, axis=1), 0.0)
        np.put_along_axis(chosen, place, np.take_along_axis(chosen, place, axis=1) + np.rint(step / scales), axis=1)
        rows = np.take_along_axis(gram, place.transpose(0, 2, 1), axis=1)
        moved += (rows * step.transpose(0, 2, 1)).transpose(0, 2, 1)
    return chosen


def _relaxed(fraction: np.ndarray, fixed: np.ndarray, scales: np.ndarray, gram: np.ndarray, unit: float) -> np.ndarray:
    """Returns 1 for weights to round up, and 0 for weights to round down."""
    if unit <= 0:
        return np.rint(fraction)
    start = np.clip((fraction - GAMMA) / (ZETA - GAMMA), 1e-3, 1 - 1e-3)
    variable = keras.Variable(np.log(start / (1 - start)), dtype="float32")
    fractions, steps, matrix = (tf.constant(value, tf.float32) for value in (fraction, scales, gram))
    free = tf.constant(~fixed, tf.float32)
    count = tf.maximum(tf.reduce_sum(free), 1.0)
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build([variable])

    def portion() -> tf.Tensor:
        return tf.clip_by_value(tf.sigmoid(variable.value) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)

    @tf.function(autograph=False)
    def step(beta: tf.Tensor, penalty: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            up = portion()
            moved = (up - fractions) * free * steps
            error = tf.reduce_sum(moved * tf.matmul(matrix, moved)) / unit
            undecided = 1.0 - tf.pow(tf.abs(2.0 * up - 1.0), beta)
            loss = error + penalty * tf.reduce_sum(undecided * free) / count
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])

    for iteration in range(ITERATIONS):
        progress = max(0.0, (iteration / ITERATIONS - WARM_UP) / (1 - WARM_UP))
        beta = BETA[0] + (BETA[1] - BETA[0]) * progress
        step(tf.constant(beta, tf.float32), tf.constant(PENALTY if progress else 0.0, tf.float32))
    return np.asarray(portion().numpy() >= 0.5, np.float64)


def round_weights(
    graph: FrozenGraph,
    fusions: Sequence[Fusion],
    ranges: Mapping[str, Range],
    batches: Sequence[Mapping[str, Any]],
    weight_grid: WeightGrid,
) -> tuple[dict[str, np.ndarray], list[Change]]:
    """Returns the weights of each fusion rounded by AdaRound, by the name of its op, and the changes of the errors."""
    editor = GraphEditor(graph.graph_def)
    rounded, changes = {}, []
    small = [fusion for fusion in fusions if fusion.per_channel and _inputs(editor, fusion) <= LARGEST]
    for fusion, gram in zip(small, _grams(graph, editor, small, ranges, batches), strict=True):
        held = editor.value(fusion.weights)
        weights = _grouped(held, editor.nodes[fusion.op].op)
        limits = np.abs(weights).max(axis=1, keepdims=True)
        scales = np.where(limits == 0, 1.0, limits) / weight_grid.qmax_of(editor, fusion, ranges)
        result, ratio = round_adaptively(weights, scales, gram)
        flat = result[0] if len(result) == 1 else result[..., 0].T
        rounded[fusion.op] = flat.reshape(held.shape).astype(held.dtype)
        detail = f"{held.size:,} weights rounded: mean squared error {ratio:.2g}x that of the nearest"
        changes.append(Change(name=fusion.op, kind="adaptive_rounding", detail=detail))
    return rounded, changes


def _inputs(editor: GraphEditor, fusion: Fusion) -> int:
    """Returns how many weights each output has."""
    shape = editor.value(fusion.weights).shape
    return int(np.prod(shape[:2] if editor.nodes[fusion.op].op == DEPTHWISE else shape[:-1]))


def _grouped(weights: np.ndarray, op: str) -> np.ndarray:
    """Returns weights as [groups, inputs, outputs], in float64."""
    if op == DEPTHWISE:
        return weights.reshape(-1, weights.shape[2]).T[..., None].astype(np.float64)
    return weights.reshape(1, -1, weights.shape[-1]).astype(np.float64)


def _grams(
    graph: FrozenGraph,
    editor: GraphEditor,
    fusions: Sequence[Fusion],
    ranges: Mapping[str, Range],
    batches: Sequence[Mapping[str, Any]],
) -> list[np.ndarray]:
    """Returns the mean of x x' over the quantized inputs x of each fusion's weights."""
    function = graph.as_function(fetch=[fusion.input for fusion in fusions])
    value_ranges = [ranges[before_data_movement(editor, fusion.input)] for fusion in fusions]
    totals: list[Any] = [0.0] * len(fusions)
    rows = [0] * len(fusions)
    for piece in in_pieces(batches):
        for index, (fusion, value_range, value) in enumerate(
            zip(fusions, value_ranges, function(**piece), strict=True)
        ):
            quantized = tf.quantization.fake_quant_with_min_max_args(
                value, value_range.low, value_range.limit, num_bits=8, narrow_range=value_range.signed
            )
            for part in _parts(quantized, _inputs(editor, fusion)):
                windows = _windows(editor.nodes[fusion.op], part, editor.value(fusion.weights).shape)
                rows[index] += len(windows)
                totals[index] += tf.einsum("nkg,nlg->gkl", windows, windows).numpy().astype(np.float64)
    return [total / count for total, count in zip(totals, rows, strict=True)]


def _parts(values: tf.Tensor, inputs: int) -> list[tf.Tensor]:
    """Splits a tensor into parts of a few examples, so that the windows of a part stay small."""
    positions = int(np.prod(values.shape[1:-1])) if values.shape.rank == 4 else 1
    count = max(1, LARGEST_WINDOWS // (positions * inputs))
    return [values[start : start + count] for start in range(0, len(values), count)]


def _windows(node: NodeDef, values: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns the values that a node multiplies by its weights at each position, [positions, inputs, groups]."""
    if node.op == "MatMul":
        return values[..., None]
    padding = attribute(node, "padding").s.decode()
    if padding == "EXPLICIT":
        values = tf.pad(values, np.reshape(attribute(node, "explicit_paddings").list.i, (4, 2)))
    patches = tf.image.extract_patches(
        values,
        sizes=[1, *shape[:2], 1],
        strides=list(attribute(node, "strides").list.i),
        rates=list(attribute(node, "dilations").list.i) or [1, 1, 1, 1],
        padding="VALID" if padding == "EXPLICIT" else padding,
    )
    return tf.reshape(
        patches, [-1, int(np.prod(shape[:2])), shape[2]] if node.op == DEPTHWISE else [-1, int(np.prod(shape[:3])), 1]
    )
