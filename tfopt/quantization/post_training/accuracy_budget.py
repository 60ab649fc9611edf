"""Finds a small set of nodes that must stay float, so that int8 loses no more accuracy than allowed.

All sets of nodes are evaluated in one graph. Each node that reads a tensor with a range reads it through a switch,
which selects the float tensor or its fake quantization. Weights and biases have such switches too. The switches are an
input of the graph, so an evaluation costs one run over the evaluation data. The search has three steps:

1. It measures the loss of each node alone in int8, with all other nodes in float.
2. It finds by bisection how many of the nodes with the largest losses must be float.
3. Losses do not add up, so some of these nodes may not need to be float. It tries each of them in int8 again, the node
   with the smallest loss first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import FLOAT32, AttrValue, GraphEditor, dtype_attr, producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.output_ops import output_ops
from tfopt.quantization.annotation.annotate import INT8_GRID, Adjustment, add_fake_quant, bias_of
from tfopt.quantization.annotation.fusion import Fusion, FusionSearch
from tfopt.quantization.annotation.grids import Range, WeightGrid
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops, quantized_consumers, tensors_to_observe
from tfopt.report import Change
from tfopt.tasks.scorer import Metric, Scorer
from tfopt.tasks.scores import Score


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The metric of a model with some nodes in float, and its relative distance from the float outputs."""

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class FloatNodes:
    """The result of the search: the nodes that must be float, each with the reason, and the steps, for the report.

    The metrics are those with all nodes in float, with all nodes in int8, and with the nodes found.
    """

    kept_float: Mapping[str, str]
    steps: Sequence[Change]
    metrics: Mapping[str, float]


def search_float_nodes(
    names: Sequence[str],
    evaluate: Callable[[Collection[str]], Trial],
    largest_drop: float,
    *,
    higher_is_better: bool = True,
) -> FloatNodes:
    """Returns a small set of nodes that must be float, so that the metric worsens by at most `largest_drop`.

    `names` are the nodes that could be int8. `evaluate` measures the model with the given nodes in float.

    Example:
        >>> costs = {"a": 0.01, "b": 0.2, "c": 0.001}
        >>> def evaluate(kept_float):
        ...     drop = sum(cost for name, cost in costs.items() if name not in kept_float)
        ...     return Trial(value=1 - drop, error=drop)
        >>> list(search_float_nodes(list(costs), evaluate, 0.02).kept_float)
        ['b']
    """
    exact, plain = evaluate(names), evaluate(())

    def loss(score: Trial) -> float:
        return exact.value - score.value if higher_is_better else score.value - exact.value

    def holds(score: Trial) -> bool:
        return loss(score) <= largest_drop + 1e-9

    steps = [Change(name="model", kind="budget", detail=f"float {exact.value:.4g}, int8 {plain.value:.4g}")]
    found: dict[str, Trial] = {}
    last = plain
    if not holds(plain):
        alone = {name: evaluate([other for other in names if other != name]) for name in names}
        ranked = sorted(names, key=lambda name: (-loss(alone[name]), -alone[name].error))
        count, last = _fewest(ranked, evaluate, holds)
        chosen = ranked[:count]
        steps.append(Change(name=", ".join(chosen), kind="budget", detail=f"costliest {count} float: {last.value:.4g}"))
        for name in reversed(chosen):
            trial = evaluate([other for other in chosen if other != name])
            detail = f"{'back to int8' if holds(trial) else 'must be float'}: {trial.value:.4g} with it in int8"
            steps.append(Change(name=name, kind="budget", detail=detail))
            if holds(trial):
                chosen, last = [other for other in chosen if other != name], trial
        found = {name: alone[name] for name in chosen}
    reasons = {name: f"accuracy budget: {loss(score):.4g} lost with it alone in int8" for name, score in found.items()}
    metrics = {"float": exact.value, "int8": plain.value, "kept": last.value}
    return FloatNodes(kept_float=reasons, steps=steps, metrics=metrics)


def _fewest(
    ranked: Sequence[str], evaluate: Callable[[Collection[str]], Trial], holds: Callable[[Trial], bool]
) -> tuple[int, Trial]:
    """Returns how many of the first names must be float, and the score with these in float, by bisection."""
    too_few, enough = 0, len(ranked)
    score = evaluate(ranked)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        trial = evaluate(ranked[:middle])
        if holds(trial):
            enough, score = middle, trial
        else:
            too_few = middle
    return enough, score


SWITCHES = "tfopt_quantized"


class AccuracyEvaluator:
    """Scores a model with some of its nodes in float on labelled examples.

    The nodes in `kept_float` are float in every evaluation, each for the reason given there. `inputs` are batches as
    `graph.feed` returns them, and `labels` those of all examples.
    """

    def __init__(
        self,
        graph: FrozenGraph,
        kept_float: Mapping[str, str],
        ranges: Mapping[str, Range],
        adjustments: Mapping[str, Adjustment],
        inputs: Sequence[Mapping[str, Any]],
        labels: Any,
        metric: str | Metric | Score,
        weight_grid: WeightGrid = INT8_GRID,
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
        self._function = _switchable(graph, fusions, self._consumers, ranges, adjustments, weight_grid).as_function()
        self._inputs = inputs
        self._exact = self._outputs(self.names)
        self._scorer = Scorer(metric, labels, self._exact, output_ops(graph))

    def score(self, kept_float: Collection[str]) -> Trial:
        """Returns the metric, and the distance from the float outputs, with these nodes in float."""
        outputs = self._outputs(kept_float)
        distances = [
            np.linalg.norm(outputs[name] - exact) / max(float(np.linalg.norm(exact)), 1e-30)
            for name, exact in self._exact.items()
        ]
        return Trial(value=self._scorer.value(outputs), error=float(np.mean(distances)))

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
        return editor.add("SelectV2", f"{quantized}/chosen", [switch, quantized, exact], T=FLOAT32)

    rounded = {tensor: add_fake_quant(editor, tensor, ranges[tensor]) for tensor in dict(reads)}
    for position, (tensor, reader) in enumerate(reads):
        chosen = choose(position, rounded[tensor], tensor)
        inputs = [chosen if source == tensor else source for source in editor.nodes[reader].input]
        editor.set_inputs(reader, inputs)
    for position, fusion in enumerate(fusions, start=len(reads)):
        adjustment = adjustments.get(fusion.op, Adjustment())
        exact = editor.value(fusion.weights)
        own = exact if adjustment.weights is None else adjustment.weights
        weights = _rounded(own, exact, fusion, editor.nodes[fusion.op].op, qmax[fusion.op])
        name = choose(position, editor.add_constant(f"{fusion.op}/int8_weights", weights), fusion.weights)
        editor.set_inputs(fusion.op, [editor.nodes[fusion.op].input[0], name])
        if adjustment.bias is not None and fusion.bias is not None:
            bias = editor.add_constant(f"{fusion.op}/int8_bias", bias_of(editor, fusion) + adjustment.bias)
            editor.set_inputs(fusion.nodes[1], [fusion.op, choose(position, bias, fusion.bias)])
    return replace(graph, inputs={**graph.inputs, SWITCHES: spec}).edited(editor)


def _rounded(weights: np.ndarray, exact: np.ndarray, fusion: Fusion, op: str, qmax: int) -> np.ndarray:
    """Returns weights on the grid that annotation chooses for the exact weights."""
    axes = (0, 1, 3) if op == "DepthwiseConv2dNative" else tuple(range(weights.ndim - 1))
    limits = np.abs(exact).max(axis=axes if fusion.per_channel else None, keepdims=True).astype(np.float32)
    scale = np.where(limits == 0, np.float32(1), limits) / np.float32(qmax)
    return np.asarray(np.rint(weights / scale) * scale, np.float32)
