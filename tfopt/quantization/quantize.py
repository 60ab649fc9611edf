"""Static int8 post-training quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfopt.errors import ConfigError, check_type
from tfopt.graph import FrozenGraph, GraphEditor, freeze
from tfopt.graph.fold import fold_constants
from tfopt.pruning.tfmot import is_tf_keras
from tfopt.quantization.annotate import annotate, tensors_of_chain, tensors_to_observe
from tfopt.quantization.calibrate import calibrate
from tfopt.quantization.chains import Chain, find_chains, find_chains_where, matches, weights_quantizer
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.fake_quant import steps_above_zero
from tfopt.quantization.keras_methods import KerasQuantized, is_keras_config, quantize_with_keras
from tfopt.quantization.observers import Range
from tfopt.quantization.tfmot import freeze_tf_keras, quantize_tf_keras
from tfopt.quantization.trained import has_ranges, read_ranges
from tfopt.quantization.training import quantize_for_training
from tfopt.report import Change, PassReport


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedModel:
    """A model whose graph carries the ranges to quantize it with.

    It still computes in float32, with the values int8 would have, so its accuracy can be measured anywhere;
    `tfopt.export` lowers it to int8 kernels.

    Attributes:
        graph: The annotated graph.
        float_graph: The same graph before annotation; of a model trained with fake quantization, with rounded weights.
        source: What the model itself computes, before any folding, with the fake quantization that it was trained with.
        ranges: The range of each tensor that needs one, or may, by its name in float_graph.
        steps: For an op, the step between two of its quantized weights, one for each output channel. An op that has
            none takes the smallest that covers its weights.
        weight_bits: The width of the quantized weights.
        report: Each convolution and product: quantized how, or left float and why.
    """

    graph: FrozenGraph
    float_graph: FrozenGraph
    source: FrozenGraph
    ranges: Mapping[str, Range]
    steps: Mapping[str, np.ndarray]
    weight_bits: int
    report: PassReport

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
        return _annotated(self, left)


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
    quantized = _trained(source, config) if has_ranges(source) else _calibrated(source, config, calibration_data)
    quantized.report.warn_if_unchanged()
    return quantized


def _trained(source: FrozenGraph, config: QuantizationConfig) -> QuantizedModel:
    """Returns a model that was trained with fake quantization, annotated with the ranges it learned."""
    trained = read_ranges(source, config.exclude)
    unannotated = QuantizedModel(
        graph=trained.graph,
        float_graph=trained.graph,
        source=source,
        ranges=trained.ranges,
        steps=trained.steps,
        weight_bits=config.weight_bits,
        report=PassReport(name="quantize"),
    )
    return _annotated(unannotated, trained.left_float)


def _calibrated(source: FrozenGraph, config: QuantizationConfig, calibration_data: Any) -> QuantizedModel:
    """Returns a float model annotated with the ranges that are measured on the calibration data."""
    graph = fold_constants(source)
    editor = GraphEditor(graph.graph_def)
    unmatched = [pattern for pattern in config.exclude if not any(matches(name, (pattern,)) for name in editor.nodes)]
    if unmatched:
        raise ConfigError(
            f"exclude must name nodes of the graph. Received: exclude={config.exclude}, where {unmatched[0]!r} matches "
            "none. The report of a run without it lists the names."
        )
    chains, skipped = find_chains(graph, editor, config.exclude)
    unannotated = QuantizedModel(
        graph=graph,
        float_graph=graph,
        source=source,
        ranges=calibrate(graph, tensors_to_observe(editor, chains), calibration_data, config),
        steps={},
        weight_bits=config.weight_bits,
        report=PassReport(name="quantize"),
    )
    return _annotated(unannotated, {skip.name: skip.reason for skip in skipped})


def _annotated(model: QuantizedModel, left_float: Mapping[str, str]) -> QuantizedModel:
    """Returns the model with its float graph annotated anew, all of it but the nodes that are left float, and why."""
    editor = GraphEditor(model.float_graph.graph_def)

    def obstacle(chain: Chain) -> str | None:
        missing = [tensor for tensor in tensors_of_chain(editor, chain) if tensor not in model.ranges]
        return f"no range is known for {missing[0]!r}" if missing else None

    chains, skipped = find_chains_where(model.float_graph, editor, obstacle, left_float=left_float)
    annotated = annotate(model.float_graph, chains, model.ranges, model.steps, weight_bits=model.weight_bits)
    quantized = GraphEditor(annotated.graph_def)
    changed = [
        Change(name=chain.op, kind=editor.nodes[chain.op].op, detail=_detail(editor, quantized, chain))
        for chain in chains
    ]
    return replace(model, graph=annotated, report=replace(model.report, changed=changed, skipped=skipped))


def _detail(editor: GraphEditor, quantized: GraphEditor, chain: Chain) -> str:
    weights = editor.value(chain.weights)
    fused = [
        part
        for part in (chain.bias and "bias", chain.summand and "sum", chain.activation and chain.activation.name)
        if part
    ]
    what = f"int{_weight_bits(quantized, chain)} weights {weights.shape} per channel"
    return what + (f", fused {', '.join(fused)}" if fused else "")


def _weight_bits(quantized: GraphEditor, chain: Chain) -> int:
    """Returns how many bits a chain's weights need: those of 4 bits are int8 weights that use 15 of its values."""
    quantizer = weights_quantizer(quantized, quantized.nodes[chain.op].input[1])
    assert quantizer is not None, chain.op
    weights, limits = quantized.value(quantizer.input[0]), quantized.value(quantizer.input[2])
    highest = np.abs(np.rint(weights * (steps_above_zero(8) / limits))).max()
    return 4 if highest <= steps_above_zero(4) else 8
