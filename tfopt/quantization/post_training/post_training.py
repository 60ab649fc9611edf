"""Post-training quantization of a float model from calibration data, step by step, and bias correction.

Bias correction subtracts the mean error that quantization causes from the biases. Rounded weights and clipped
activations shift the mean of a channel's results. On calibration data, the shift is E[y_int8] - E[y_float]. The bias
can correct it exactly (Nagel et al., ICCV 2019, arXiv:1906.04721, section 4.2). The shift of a layer depends on the
corrections of the layers before it. So the float graph and the quantized graph run as one graph. In this graph, the
results of each quantized layer are corrected by the mean difference on the same examples before the next layer reads
them. So one run gives the corrections of all layers in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, NodeDef, producer
from tfopt.graph.fold import fold_constants
from tfopt.quantization.annotation.annotate import Adjustment, AnnotatedGraph, annotate, apply_adjustments, with_biases
from tfopt.quantization.annotation.fusion import Fusion, find_fusions
from tfopt.quantization.annotation.grids import Range, WeightGrid
from tfopt.quantization.annotation.ranged_tensors import (
    share_ranges,
    tensors_to_observe,
    without_impossible_zero_points,
)
from tfopt.quantization.calibration.calibrate import CalibrationData, calibrate, computable, in_pieces, length
from tfopt.quantization.calibration.range_use import examine
from tfopt.quantization.config import QuantizationConfig, check_exclude
from tfopt.quantization.post_training.accuracy_budget import AccuracyEvaluator, search_float_nodes
from tfopt.quantization.post_training.adaround import round_weights
from tfopt.quantization.post_training.equalization_and_smooth_quant import equalize
from tfopt.quantization.quantized_model import QuantizedModel, requantize
from tfopt.report import Change, PassReport
from tfopt.tasks.scorer import higher_is_better

REFERENCE = "float_reference"
PIECE = 32  # examples per run of both graphs


@computable()
def quantize_after_training(source: FrozenGraph, config: QuantizationConfig, data: CalibrationData) -> QuantizedModel:
    """Returns a model annotated with the ranges that are measured on calibration data; see `tfopt.quantize`."""
    batches = data.inputs
    evaluation = None if config.max_accuracy_drop is None else data.labelled()
    graph = fold_constants(source)
    check_exclude(config.exclude, [node.name for node in graph.graph_def.node])
    fusions, _ = find_fusions(graph, GraphEditor(graph.graph_def), config.exclude)
    graph, steps = equalize(graph, fusions, batches, config)
    if config.bias_correction:
        graph = with_biases(graph, fusions)
    editor = GraphEditor(graph.graph_def)
    fusions, skipped = find_fusions(graph, editor, config.exclude)  # with these biases, and without some Relu6
    kept_float = {skip.name: skip.reason for skip in skipped}
    ranges = calibrate(graph, tensors_to_observe(editor, fusions), batches, config)
    ranges = without_impossible_zero_points(graph, editor, fusions, ranges)
    ranges = share_ranges(editor, fusions, graph.output_nodes, ranges)
    grid = WeightGrid(bits=config.weight_bits, reduce_range=config.reduce_range)
    adjustments, rounding = _adjustments(graph, fusions, ranges, batches, config, grid)
    notes = examine(graph, batches, ranges)
    report = PassReport(name="quantize", steps=[*steps, *rounding], notes=notes)
    if config.max_accuracy_drop is not None and evaluation is not None:
        evaluator = AccuracyEvaluator(graph, kept_float, ranges, adjustments, *evaluation, config.metric, grid)
        found = search_float_nodes(
            evaluator.names, evaluator.score, config.max_accuracy_drop, higher_is_better=higher_is_better(config.metric)
        )
        kept_float |= found.kept_float
        report = replace(report, steps=[*report.steps, *found.steps], metrics=found.metrics)
    model = QuantizedModel(
        graph=AnnotatedGraph(**vars(graph)),
        float_graph=graph,
        source=source,
        ranges=ranges,
        weight_grid=grid,
        adjustments=adjustments,
        held_out=data.held_out(),
        report=report,
    )
    return requantize(model, kept_float)


def _adjustments(
    graph: FrozenGraph,
    fusions: list[Fusion],
    ranges: Mapping[str, Range],
    batches: Sequence[Mapping[str, Any]],
    config: QuantizationConfig,
    grid: WeightGrid,
) -> tuple[dict[str, Adjustment], list[Change]]:
    """Returns the weights and biases that int8 uses in place of the float ones, and the changes of the weights."""
    adjustments: dict[str, Adjustment] = {}
    steps: list[Change] = []
    if config.rounding == "adaptive":
        rounded, steps = round_weights(graph, fusions, ranges, batches, grid)
        adjustments = {name: Adjustment(weights=weights) for name, weights in rounded.items()}
    if config.bias_correction and fusions:
        quantized = annotate(*apply_adjustments(graph, fusions, adjustments), ranges, weight_grid=grid)
        shifts = correct_biases(graph, quantized, fusions, batches)
        adjustments |= {
            name: replace(adjustments.get(name, Adjustment()), bias=shift) for name, shift in shifts.items()
        }
    return adjustments, steps


def correct_biases(
    graph: FrozenGraph, annotated: FrozenGraph, fusions: Sequence[Fusion], batches: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Returns the correction of each fusion's bias, by the name of its op.

    The annotated graph is the float graph with ranges, possibly with other weights. Each fusion has a bias.
    """
    both, corrections = _side_by_side(graph, annotated, fusions)
    function = both.as_function(fetch=list(corrections.values()))
    totals, examples = {name: np.zeros(()) for name in corrections}, 0
    for piece in in_pieces(batches, PIECE):
        count = length(piece)
        examples += count
        for name, value in zip(corrections, function(**piece), strict=True):
            totals[name] = totals[name] + count * value.numpy().astype(np.float64)
    return {name: (total / examples).astype(np.float32) for name, total in totals.items()}


def _side_by_side(
    graph: FrozenGraph, annotated: FrozenGraph, fusions: Sequence[Fusion]
) -> tuple[FrozenGraph, dict[str, str]]:
    """Returns one graph of both, and the tensor of each fusion's correction on the examples of one call."""
    editor = GraphEditor(annotated.graph_def)
    shared = {spec.name for spec in graph.inputs.values()} | graph.tables.keys()

    def renamed(tensor: str) -> str:
        return tensor if producer(tensor) in shared else f"{REFERENCE}/{tensor}"

    reference = GraphEditor(graph.graph_def)
    for name in reference.topological():
        if name not in shared:
            node: NodeDef = reference.nodes[name]
            editor.add(node.op, renamed(name), [renamed(tensor) for tensor in node.input], **node.attr)
    corrections = {}
    for fusion in fusions:
        axes = 1 if editor.nodes[fusion.op].op == "MatMul" else 3
        corrections[fusion.op] = _shift(editor, fusion.nodes[1], renamed(fusion.nodes[1]), axes)
    return replace(annotated, graph_def=editor.graph_def(editor.nodes)), corrections


def _shift(editor: GraphEditor, result: str, exact: str, axes: int) -> str:
    """Corrects a result by its mean difference from the exact one in each channel, and returns this difference."""
    error = editor.add("Sub", f"{result}/error", [exact, result], T=FLOAT32)
    over = editor.add_constant(f"{result}/error_axes", np.arange(axes, dtype=np.int32))
    mean = editor.add(
        "Mean", f"{result}/correction", [error, over], T=FLOAT32, Tidx=INT32, keep_dims=AttrValue(b=False)
    )
    corrected = editor.add("AddV2", f"{result}/corrected", [result, mean], T=FLOAT32)
    editor.redirect(result, corrected, keep=[error, corrected])
    return mean
