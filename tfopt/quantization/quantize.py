"""Static int8 post-training quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfopt.errors import ConfigError, check_type
from tfopt.graph import FrozenGraph, GraphEditor, freeze
from tfopt.graph.fold import fold_constants
from tfopt.pruning.tfmot import is_tf_keras
from tfopt.quantization.annotate import annotate, tensors_to_observe
from tfopt.quantization.calibrate import calibrate
from tfopt.quantization.chains import Chain, find_chains, matches
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.keras_methods import KerasQuantized, is_keras_config, quantize_with_keras
from tfopt.quantization.tfmot import freeze_tf_keras, quantize_tf_keras
from tfopt.quantization.trained import annotate_trained, has_ranges
from tfopt.quantization.training import quantize_for_training
from tfopt.report import Change, PassReport, Skip


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedModel:
    """A model whose graph carries the ranges to quantize it with.

    It still computes in float32, with the values int8 would have, so its accuracy can be measured anywhere;
    `tfopt.export` lowers it to int8 kernels.

    Attributes:
        graph: The annotated graph.
        float_graph: The same graph before annotation.
        report: Each convolution and product: quantized how, or left float and why.
    """

    graph: FrozenGraph
    float_graph: FrozenGraph
    report: PassReport

    def __repr__(self) -> str:
        return f"QuantizedModel({self.graph.name!r}, {self.report})"

    def predict(self, inputs: Any) -> np.ndarray | dict[str, np.ndarray]:
        """Returns the outputs for one batch of inputs: an array, or a dict by name where there are several."""
        outputs = self.graph.predict(inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def quantize(
    model: keras.Model | str | Path,
    config: QuantizationConfig | keras.quantizers.QuantizationConfig | None = None,
    *,
    calibration_data: Any = None,
) -> QuantizedModel | KerasQuantized | keras.Model:
    """Measures activation ranges on calibration data and returns the model annotated for int8.

    The model itself is not changed. Batch normalisation is folded into the weights first. Helps convolutions and
    matrix products on processors with int8 instructions (AVX512-VNNI, AVX-VNNI, AMX); nothing else gets faster.

    With `training=True` in the config it returns a Keras model in place of an annotated one: a copy with the same
    weights, whose layers compute with the values that int8 will have, to train on with `fit` like any other.
    `tfopt.quantization_report` tells what was done. Given that model again, with `training=False`, it is annotated by
    the ranges that training left in it; so `tfopt.export` needs no calibration data for it.

    With a configuration of Keras' own, such as `keras.quantizers.Int4QuantizationConfig()` or `GPTQConfig(...)`, Keras
    quantizes a copy of the model by it: the result holds the copy as `model`, and a report. A `tf_keras` (Keras 2)
    model without calibration data goes to tensorflow-model-optimization, which returns it ready to train with fake
    quantization; trained, it exports in int8 by its own ranges.

    Args:
        model: A built Keras model (functional, Sequential or subclassed), a .keras file or a SavedModel directory.
        config: The settings; None means QuantizationConfig().
        calibration_data: Batches of inputs, or of (inputs, labels); an array of inputs will do. For a model of several
            inputs a dict or a tuple of arrays, or batches of such. Not needed for a model that holds ranges.
    Returns: The annotated model, with a report; with training=True a functional Keras model.
    Raises:
        UnsupportedModelError: The model is not built; with training=True, it is neither functional nor Sequential.
        ConfigError: The calibration data is missing, empty, of the wrong shape, or not finite.
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
    if is_keras_config(config):
        return quantize_with_keras(model, config, calibration_data)
    config = QuantizationConfig() if config is None else config
    check_type("config", config, QuantizationConfig)
    of_keras_2 = is_tf_keras(model)
    if config.training and not of_keras_2:
        return quantize_for_training(model, config, calibration_data)
    source = freeze_tf_keras(model) if of_keras_2 else freeze(model, fold=False)
    if of_keras_2 and not has_ranges(source) and (config.training or calibration_data is None):
        return quantize_tf_keras(model, config)
    if has_ranges(source):
        graph, annotated, chains, skipped = annotate_trained(source, config.exclude)
        report = _report(GraphEditor(graph.graph_def), chains, skipped)
        return QuantizedModel(graph=annotated, float_graph=source, report=report)
    graph = fold_constants(source)
    editor = GraphEditor(graph.graph_def)
    unmatched = [pattern for pattern in config.exclude if not any(matches(name, (pattern,)) for name in editor.nodes)]
    if unmatched:
        raise ConfigError(
            f"exclude must name nodes of the graph. Received: exclude={config.exclude}, where {unmatched[0]!r} matches "
            "none. The report of a run without it lists the names."
        )
    chains, skipped = find_chains(graph, editor, config.exclude)
    ranges = calibrate(graph, tensors_to_observe(editor, chains), calibration_data, config)
    annotated = annotate(graph, chains, ranges, weight_bits=config.weight_bits)
    report = _report(editor, chains, skipped, weight_bits=config.weight_bits)
    return QuantizedModel(graph=annotated, float_graph=graph, report=report)


def _report(
    editor: GraphEditor, chains: Sequence[Chain], skipped: Sequence[Skip], *, weight_bits: int = 8
) -> PassReport:
    changed = [
        Change(name=chain.op, kind=editor.nodes[chain.op].op, detail=_detail(editor, chain, weight_bits))
        for chain in chains
    ]
    report = PassReport(name="quantize", changed=changed, skipped=skipped)
    report.warn_if_unchanged()
    return report


def _detail(editor: GraphEditor, chain: Chain, weight_bits: int) -> str:
    weights = editor.value(chain.weights)
    fused = [
        part
        for part in (chain.bias and "bias", chain.summand and "sum", chain.activation and chain.activation.name)
        if part
    ]
    return f"int{weight_bits} weights {weights.shape} per channel" + (f", fused {', '.join(fused)}" if fused else "")
