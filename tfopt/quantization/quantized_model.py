"""A quantized model: a float graph, with the ranges and the settings that quantize it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tfopt.graph import FrozenGraph, GraphEditor, fold_constants
from tfopt.quantization.annotation.annotate import Adjustment, AnnotatedGraph, annotate, apply_adjustments, has_ranges
from tfopt.quantization.annotation.fusion import Fusion, FusionSearch, int8_weights
from tfopt.quantization.annotation.grids import LOST, Range, WeightGrid, lost_weights, share_lost, steps_above_zero
from tfopt.quantization.annotation.ranged_tensors import tensors_of_fusion
from tfopt.quantization.calibration.calibrate import HeldOut
from tfopt.report import Change, PassReport


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedModel:
    """A model whose graph holds the ranges to quantize it with.

    The graph still computes in float32, with the values that int8 would have. So its accuracy can be measured on any
    device. `tfopt.export` lowers it to int8 kernels.

    Attributes:
        graph: The annotated graph, with its fusions.
        float_graph: The same graph before annotation. If the model was trained with fake quantization, the weights are
            rounded.
        source: The graph of the model before any folding, with the fake quantization that it was trained with.
        ranges: The range of each tensor that needs one, or may need one, by its name in float_graph.
        weight_steps: The step between two quantized weights for each output channel, by the name of the op. An op
            without an entry takes the smallest step that covers its weights.
        weight_grid: How many bits the quantized weights use.
        adjustments: The weights and biases of quantized nodes that replace those in float_graph, by name of the op.
        held_out: Examples that were not calibrated on, where there are any. An export measures its error on them.
        report: How each convolution and product is quantized, or why it stays float.
    """

    graph: AnnotatedGraph
    float_graph: FrozenGraph
    source: FrozenGraph
    ranges: Mapping[str, Range]
    weight_steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    weight_grid: WeightGrid = field(default_factory=WeightGrid)
    adjustments: Mapping[str, Adjustment] = field(default_factory=dict)
    held_out: HeldOut | None = None
    report: PassReport

    def __repr__(self) -> str:
        return f"QuantizedModel({self.graph.name!r}, {self.report})"

    def predict(self, inputs: Any) -> np.ndarray | dict[str, np.ndarray]:
        """Returns the outputs for one batch of inputs: an array, or a dict by name if there are several outputs."""
        outputs = self.graph.predict(inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def in_float(self) -> FrozenGraph:
        """Returns the graph of the float32 artifact, without the changes that only int8 needs.

        If the model was trained with fake quantization, the weights are rounded.
        """
        return self.float_graph if has_ranges(self.source) else fold_constants(self.source)

    def leaving_float(self, reasons: Mapping[str, str]) -> QuantizedModel:
        """Returns the same model with further nodes in float. The measured ranges stay.

        The names of the nodes are those of the report, each with the reason for the new report.
        """
        return requantize(self, {skip.name: skip.reason for skip in self.report.skipped} | dict(reasons))


def requantize(model: QuantizedModel, kept_float: Mapping[str, str]) -> QuantizedModel:
    """Returns the model with a new annotated graph, in which the nodes of `kept_float` stay float for its reasons."""
    editor = GraphEditor(model.float_graph.graph_def)

    def obstacle(fusion: Fusion) -> str | None:
        missing = [tensor for tensor in tensors_of_fusion(editor, fusion) if tensor not in model.ranges]
        return f"no range is known for {missing[0]!r}" if missing else None

    fusions, skipped = FusionSearch(model.float_graph, editor).find(kept_float, obstacle)
    adjusted, fusions = apply_adjustments(model.float_graph, fusions, model.adjustments)
    graph = annotate(adjusted, fusions, model.ranges, model.weight_steps, weight_grid=model.weight_grid)
    before, after = GraphEditor(adjusted.graph_def), GraphEditor(graph.graph_def)
    changed, lost = [], {}
    for fusion in fusions:
        exact, (rounded, _) = before.value(fusion.weights), int8_weights(after, after.nodes[fusion.op].input[1])
        detail = _detail(fusion, exact.shape, rounded)
        changed.append(Change(name=fusion.op, kind=before.nodes[fusion.op].op, detail=detail))
        lost[fusion.op] = share_lost(exact, rounded)
    notes = [*(note for note in model.report.notes if note.kind != LOST), *lost_weights(lost)]
    return replace(model, graph=graph, report=replace(model.report, changed=changed, skipped=skipped, notes=notes))


def _detail(fusion: Fusion, shape: tuple[int, ...], rounded: np.ndarray) -> str:
    # Weights of 4 bits are int8 weights that use 15 values.
    bits = 4 if np.abs(rounded).max() <= steps_above_zero(4) else 8
    fused = [
        part
        for part in (fusion.bias and "bias", fusion.summand and "sum", fusion.activation and fusion.activation.name)
        if part
    ]
    what = f"int{bits} weights {shape} " + ("per channel" if fusion.per_channel else "with one range")
    return what + (f", fused {', '.join(fused)}" if fused else "")
