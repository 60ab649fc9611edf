"""Static int8 post-training quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfopt.errors import ConfigError, check_type
from tfopt.graph import FrozenGraph, GraphEditor, freeze
from tfopt.quantization.adaptive_rounding import round_weights
from tfopt.quantization.adjust import Adjustment, adjust, with_biases
from tfopt.quantization.annotate import annotate, tensors_to_observe
from tfopt.quantization.bias_correction import correct_biases
from tfopt.quantization.budget import keep_budget
from tfopt.quantization.calibrate import calibrate, collect, join_labels
from tfopt.quantization.chains import Chain, find_chains, matches
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.equalize import equalize
from tfopt.quantization.observers import Range
from tfopt.quantization.trials import Trials
from tfopt.report import Change, PassReport


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedModel:
    """A model whose graph carries the ranges to quantize it with.

    It still computes in float32, with the values int8 would have, so its accuracy can be measured anywhere;
    `tfopt.export` lowers it to int8 kernels.

    Attributes:
        graph: The annotated graph.
        float_graph: The same graph before annotation.
        ranges: What was measured of each tensor, by its name in float_graph.
        report: Each convolution and product: quantized how, or left float and why.
        adjustments: The weights and biases that quantized nodes have in place of those in float_graph, by name.
    """

    graph: FrozenGraph
    float_graph: FrozenGraph
    ranges: Mapping[str, Range]
    report: PassReport
    adjustments: Mapping[str, Adjustment] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"QuantizedModel({self.graph.name!r}, {self.report})"

    def predict(self, inputs: Any) -> np.ndarray | dict[str, np.ndarray]:
        """Returns the outputs for one batch of inputs: an array, or a dict by name where there are several."""
        outputs = self.graph.predict(inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def leaving_float(self, reasons: Mapping[str, str]) -> QuantizedModel:
        """Returns the same model with fewer nodes quantized; the ranges that were measured stay.

        Args:
            reasons: Names of nodes as the report gives them, each with the reason that its report will give.
        """
        left = {skip.name: skip.reason for skip in self.report.skipped} | dict(reasons)
        return _quantized(self.float_graph, self.ranges, left, self.adjustments, self.report)


def quantize(
    model: keras.Model | str | Path,
    config: QuantizationConfig | None = None,
    *,
    calibration_data: Any,
    evaluation_data: Any = None,
) -> QuantizedModel:
    """Measures activation ranges on calibration data and returns the model annotated for int8.

    The model itself is not changed. Batch normalisation is folded into the weights first, channels are rescaled where
    that makes rounding errors smaller, and the biases take off the mean error that is left. Helps convolutions and
    matrix products on processors with int8 instructions (AVX512-VNNI, AVX-VNNI, AMX); nothing else gets faster.

    Args:
        model: A built Keras model (functional, Sequential or subclassed), a .keras file or a SavedModel directory.
        config: The settings; None means QuantizationConfig().
        calibration_data: Batches of inputs, or of (inputs, labels); an array of inputs will do. For a model of several
            inputs a dict or a tuple of arrays, or batches of such.
        evaluation_data: Batches of (inputs, labels) that max_accuracy_drop is measured on, all of them; best of
            examples that the model was not trained on. None means the labelled examples of the calibration data.
    Returns: The annotated model, with a report.
    Raises:
        UnsupportedModelError: The model is not built.
        ConfigError: The calibration data is missing, empty, of the wrong shape, or not finite; there are no labels for
            max_accuracy_drop, or the metric cannot be computed from them.
    Example:
        >>> import keras, numpy as np
        >>> x = np.random.default_rng(0).random((64, 8), dtype="float32")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu")])
        >>> quantized = quantize(model, calibration_data=x)
        >>> bool(np.abs(quantized.predict(x) - model.predict(x, verbose=0)).max() < 0.05)
        True

    Reference:
        Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
        CVPR 2018, arXiv:1712.05877.
    """
    config = QuantizationConfig() if config is None else config
    check_type("config", config, QuantizationConfig)
    graph = freeze(model)
    editor = GraphEditor(graph.graph_def)
    unmatched = [pattern for pattern in config.exclude if not any(matches(name, (pattern,)) for name in editor.nodes)]
    if unmatched:
        raise ConfigError(
            f"exclude must name nodes of the graph. Received: exclude={config.exclude}, where {unmatched[0]!r} matches "
            "none. The report of a run without it lists the names."
        )
    batches, labels = collect(graph, calibration_data, config.calibration_examples)
    if config.max_accuracy_drop is not None:
        examples = (batches, labels) if evaluation_data is None else collect(graph, evaluation_data)
        evaluation = examples[0], join_labels(examples[1])
    steps: list[Change] = []
    if config.equalization or config.smooth_quant:
        graph, steps = equalize(graph, batches, config)
    chains, skipped = find_chains(graph, GraphEditor(graph.graph_def), config.exclude)
    if config.bias_correction:
        graph = with_biases(graph, chains)
        chains, skipped = find_chains(graph, GraphEditor(graph.graph_def), config.exclude)
    left_float = {skip.name: skip.reason for skip in skipped}
    ranges = calibrate(graph, tensors_to_observe(GraphEditor(graph.graph_def), chains), batches, config)
    adjustments, rounding = _adjustments(graph, chains, ranges, batches, config)
    report = PassReport(name="quantize", steps=[*steps, *rounding])
    if config.max_accuracy_drop is not None:
        trials = Trials(graph, left_float, ranges, adjustments, *evaluation, config.metric)
        budget = keep_budget(trials.names, trials.score, config.max_accuracy_drop)
        left_float |= budget.left_float
        report = replace(report, steps=[*report.steps, *budget.steps], metrics=budget.metrics)
    quantized = _quantized(graph, ranges, left_float, adjustments, report)
    quantized.report.warn_if_unchanged()
    return quantized


def _adjustments(
    graph: FrozenGraph, chains: list[Chain], ranges: Mapping[str, Range], batches: list[Any], config: QuantizationConfig
) -> tuple[dict[str, Adjustment], list[Change]]:
    """Returns the weights and biases that suit int8 better, and what was done to the weights."""
    adjustments: dict[str, Adjustment] = {}
    steps: list[Change] = []
    if config.rounding == "adaptive":
        rounded, steps = round_weights(graph, chains, ranges, batches)
        adjustments = {name: Adjustment(weights=weights) for name, weights in rounded.items()}
    if config.bias_correction and chains:
        annotated = annotate(*adjust(graph, chains, adjustments), ranges)
        shifts = correct_biases(graph, annotated, chains, batches)
        adjustments |= {
            name: replace(adjustments.get(name, Adjustment()), bias=shift) for name, shift in shifts.items()
        }
    return adjustments, steps


def _quantized(
    graph: FrozenGraph,
    ranges: Mapping[str, Range],
    left_float: Mapping[str, str],
    adjustments: Mapping[str, Adjustment],
    report: PassReport,
) -> QuantizedModel:
    """Returns the graph annotated with the ranges, all of it but the nodes that are left float with a reason."""
    chains, skipped = find_chains(graph, GraphEditor(graph.graph_def), left_float=left_float)
    adjusted, chains = adjust(graph, chains, adjustments)
    editor = GraphEditor(adjusted.graph_def)
    report = replace(
        report,
        changed=[
            Change(name=chain.op, kind=editor.nodes[chain.op].op, detail=_detail(editor, chain)) for chain in chains
        ],
        skipped=skipped,
    )
    return QuantizedModel(
        graph=annotate(adjusted, chains, ranges),
        float_graph=graph,
        ranges=ranges,
        report=report,
        adjustments=adjustments,
    )


def _detail(editor: GraphEditor, chain: Chain) -> str:
    weights = editor.value(chain.weights)
    fused = [
        part
        for part in (chain.bias and "bias", chain.summand and "sum", chain.activation and chain.activation.name)
        if part
    ]
    return f"int8 weights {weights.shape} per channel" + (f", fused {', '.join(fused)}" if fused else "")
