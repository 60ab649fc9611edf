"""Post-training quantization of a float model from calibration data. Each step has its own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.fold import fold_constants
from tfopt.quantization.annotation.annotate import Adjustment, AnnotatedGraph, annotate, apply_adjustments, with_biases
from tfopt.quantization.annotation.fusion import Fusion, find_fusions
from tfopt.quantization.annotation.grids import Range, WeightGrid
from tfopt.quantization.annotation.ranged_tensors import (
    share_ranges,
    tensors_to_observe,
    without_impossible_zero_points,
)
from tfopt.quantization.calibration.calibrate import calibrate, computable
from tfopt.quantization.calibration.data import CalibrationData
from tfopt.quantization.calibration.range_use import examine
from tfopt.quantization.config import QuantizationConfig, check_exclude
from tfopt.quantization.post_training.accuracy_budget import AccuracyEvaluator, search_float_nodes
from tfopt.quantization.post_training.adaround import round_weights
from tfopt.quantization.post_training.bias_correction import correct_biases
from tfopt.quantization.post_training.equalization_and_smooth_quant import equalize
from tfopt.quantization.quantized_model import QuantizedModel, annotated
from tfopt.report import Change, PassReport
from tfopt.tasks.scorer import higher_is_better


@computable()
def quantize_after_training(
    source: FrozenGraph, config: QuantizationConfig, examples: CalibrationData
) -> QuantizedModel:
    """Returns a model annotated with the ranges that are measured on calibration data; see `tfopt.quantize`."""
    batches = examples.inputs
    evaluation = None if config.max_accuracy_drop is None else examples.labelled()
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
            evaluator.names,
            evaluator.score,
            config.max_accuracy_drop,
            higher_is_better=higher_is_better(config.metric),
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
        held_out=examples.held_out(),
        report=report,
    )
    return annotated(model, kept_float)


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
