"""Measures the accuracy of a quantized model with any set of its nodes in float, without a new graph for each set.

Each node that reads a tensor with a range reads it through a switch, which selects the float tensor or its fake
quantization. Weights and biases have such switches too. The switches are an input of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import AttrValue, GraphEditor, dtype_attr, producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.output_ops import output_ops
from tfopt.quantization.annotation.adjustments import Adjustment, bias_of
from tfopt.quantization.annotation.annotate import add_fake_quant
from tfopt.quantization.annotation.fusion import Fusion, FusionSearch
from tfopt.quantization.annotation.range import Range
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops, quantized_consumers, tensors_to_observe
from tfopt.quantization.annotation.weight_grid import WeightGrid
from tfopt.quantization.post_training.accuracy_budget import Score
from tfopt.tasks.scorer import Metric, Scorer
from tfopt.tasks.scores import Score as TaskScore

SWITCHES = "tfopt_quantized"


class AccuracyEvaluator:
    """Scores a model with some of its nodes in float on labelled examples.

    Args:
        graph: The float graph.
        kept_float: Nodes that are float in every evaluation, each with the reason.
        ranges: The range of each tensor that could be quantized.
        adjustments: The changed weights and biases of the quantized nodes.
        inputs: Batches of inputs, as `graph.feed` returns them.
        labels: The labels of all examples.
        metric: The metric, as in QuantizationConfig.
        weight_grid: How many bits the quantized weights use; None means 8.
    Raises:
        ConfigError: The labels do not fit the outputs, or the metric is not a finite number.
    """

    def __init__(
        self,
        graph: FrozenGraph,
        kept_float: Mapping[str, str],
        ranges: Mapping[str, Range],
        adjustments: Mapping[str, Adjustment],
        inputs: Sequence[Mapping[str, Any]],
        labels: Any,
        metric: str | Metric | TaskScore,
        weight_grid: WeightGrid | None = None,
    ) -> None:
        self._editor = GraphEditor(graph.graph_def)
        self._kept_float, self._ranges = dict(kept_float), ranges
        self._search = FusionSearch(graph, self._editor)
        fusions, _ = self._search.find(self._kept_float)
        self.names = [fusion.op for fusion in fusions]
        self._consumers = [
            (tensor, reader)
            for tensor in tensors_to_observe(self._editor, fusions)
            for reader in sorted({*self._editor.consumers.get(producer(tensor), ())})
        ]
        grid = weight_grid or WeightGrid()
        self._function = _switchable(graph, fusions, self._consumers, ranges, adjustments, grid).as_function()
        self._inputs = inputs
        self._exact = self._outputs(self.names)
        self._scorer = Scorer(metric, labels, self._exact, output_ops(graph))

    def score(self, kept_float: Collection[str]) -> Score:
        """Returns the metric, and the distance from the float outputs, with these nodes in float.

        Raises:
            ConfigError: The metric is not a finite number.
        """
        outputs = self._outputs(kept_float)
        distances = [
            np.linalg.norm(outputs[name] - exact) / max(float(np.linalg.norm(exact)), 1e-30)
            for name, exact in self._exact.items()
        ]
        return Score(value=self._scorer.value(outputs), error=float(np.mean(distances)))

    def _outputs(self, kept_float: Collection[str]) -> dict[str, np.ndarray]:
        fusions, _ = self._search.find(self._kept_float | dict.fromkeys(kept_float, "tried"))
        shared_range_ops = find_shared_range_ops(self._editor, fusions, self._ranges)
        quantized, ops = quantized_consumers(self._editor, fusions, shared_range_ops), {fusion.op for fusion in fusions}
        reads = [reader in quantized.get(tensor, ()) for tensor, reader in self._consumers]
        switches = tf.constant([*reads, *(name in ops for name in self.names)])
        parts = [self._function(**inputs, **{SWITCHES: switches}) for inputs in self._inputs]
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}


def _switchable(
    graph: FrozenGraph,
    fusions: Sequence[Fusion],
    reads: Sequence[tuple[str, str]],
    ranges: Mapping[str, Range],
    adjustments: Mapping[str, Adjustment],
    weight_grid: WeightGrid,
) -> FrozenGraph:
    """Returns the graph with one more input: whether each (tensor, consumer) and each fusion is quantized."""
    editor = GraphEditor(graph.graph_def)
    count = len(reads) + len(fusions)
    qmax = {fusion.op: weight_grid.qmax_of(editor, fusion, ranges) for fusion in fusions}
    spec = tf.TensorSpec([count], tf.bool, name=editor.free_name(SWITCHES))
    editor.add("Placeholder", spec.name, (), dtype=dtype_attr(tf.bool))
    unpacked = editor.add(
        "Unpack", f"{spec.name}/each", [spec.name], num=AttrValue(i=count), axis=AttrValue(i=0), T=dtype_attr(tf.bool)
    )

    def choose(position: int, quantized: str, exact: str) -> str:
        switch = f"{unpacked}:{position}" if position else unpacked
        return editor.add("SelectV2", f"{quantized}/chosen", [switch, quantized, exact], T=dtype_attr(tf.float32))

    rounded = {tensor: add_fake_quant(editor, tensor, ranges[tensor]) for tensor in dict(reads)}
    for position, (tensor, reader) in enumerate(reads):
        chosen = choose(position, rounded[tensor], tensor)
        inputs = [chosen if source == tensor else source for source in editor.nodes[reader].input]
        editor.set_inputs(reader, inputs)
    for position, fusion in enumerate(fusions, start=len(reads)):
        adjustment = adjustments.get(fusion.op, Adjustment())
        exact = editor.value(fusion.weights)
        own = exact if adjustment.weights is None else adjustment.weights
        weights = _rounded(own, exact, editor.nodes[fusion.op].op, qmax[fusion.op])
        name = choose(position, editor.add_constant(f"{fusion.op}/int8_weights", weights), fusion.weights)
        editor.set_inputs(fusion.op, [editor.nodes[fusion.op].input[0], name])
        if adjustment.bias is not None and fusion.bias is not None:
            bias = editor.add_constant(f"{fusion.op}/int8_bias", bias_of(editor, fusion) + adjustment.bias)
            editor.set_inputs(fusion.nodes[1], [fusion.op, choose(position, bias, fusion.bias)])
    return replace(graph, inputs={**graph.inputs, SWITCHES: spec}).edited(editor)


def _rounded(weights: np.ndarray, exact: np.ndarray, op: str, qmax: int) -> np.ndarray:
    """Returns weights on the grid that annotation chooses for the exact weights."""
    axes = (0, 1, 3) if op == "DepthwiseConv2dNative" else tuple(range(weights.ndim - 1))
    limits = np.abs(exact).max(axis=axes, keepdims=True).astype(np.float32)
    scale = np.where(limits == 0, np.float32(1), limits) / np.float32(qmax)
    return np.asarray(np.rint(weights / scale) * scale, np.float32)
