"""Quantization-aware training: a model made anew, so that it trains with the values it will have in int8.

Where the ranges go is not decided here. The float model is frozen and folded as for export, the chains that its int8
kernels will compute are found as for export, and each tensor that these need a range for is traced back to the layer
it comes from. So what is trained is what is lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.graph import FrozenGraph, GraphEditor, freeze
from tfopt.graph.edit import producer
from tfopt.graph.fold import fold_constants
from tfopt.quantization.annotate import tensors_of_chain, tensors_to_observe
from tfopt.quantization.calibrate import calibrate
from tfopt.quantization.chains import Chain, find_chains_where, matches, pass_through_origin
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.fake_quant import FakeQuantize
from tfopt.quantization.layers import QUANTIZED, WEIGHTS_ONLY, FrozenLateBatchNormalization
from tfopt.quantization.observers import Range
from tfopt.quantization.rebuild import Place, check_rebuildable, plain_copy, rebuild
from tfopt.report import Change, PassReport, Skip

ATTRIBUTE = "_tfopt_quantization_report"
SEPARABLE = {
    layers.SeparableConv1D: (layers.DepthwiseConv1D, layers.Conv1D),
    layers.SeparableConv2D: (layers.DepthwiseConv2D, layers.Conv2D),
}
CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.DepthwiseConv1D, layers.DepthwiseConv2D)
FUSED = (keras.activations.linear, keras.activations.relu, keras.activations.relu6)


def quantize_for_training(model: Any, config: QuantizationConfig, calibration_data: Any) -> keras.Model:
    """Returns a copy of the model that trains with fake quantization; see `tfopt.quantize`."""
    if isinstance(model, (str, Path)) and Path(model).suffix == ".keras":
        model = keras.saving.load_model(model, compile=False)
    check_rebuildable(model)
    if any(isinstance(layer, FakeQuantize) for layer in model._flatten_layers()):
        raise UnsupportedModelError(
            f"model must not be quantized already. Received: {model.name!r}, which holds fake quantization. "
            "Train it on, or export it."
        )
    tensors: dict[Place, Any] = {}
    plain = rebuild(model, _unfused, lambda place, tensor: tensors.update({place: tensor}))
    traced = _trace(plain, tensors)
    _check_exclude(config.exclude, traced, plain)

    def obstacle(chain: Chain) -> str | None:
        layer = plain.get_layer(traced.owner(chain.op))
        if type(layer) not in QUANTIZED:
            return f"inside a layer of class {type(layer).__name__}, which has no quantized form"
        if matches(layer.name, config.exclude):
            return "excluded by the configuration"
        missing = [tensor for tensor in tensors_of_chain(traced.editor, chain) if tensor not in traced.places]
        return f"{missing[0]!r} needs a range and is inside a layer" if missing else None

    chains, skipped = find_chains_where(traced.graph, traced.editor, config.exclude, obstacle)
    observed = tensors_to_observe(traced.editor, chains)
    ranges = calibrate(traced.graph, observed, calibration_data, config)
    rounded = {traced.owner(chain.op) for chain in chains}
    rounded |= {
        layer.name
        for layer in plain.layers
        if type(layer) in WEIGHTS_ONLY and not matches(layer.name, config.exclude) and _is_built_plainly(layer)
    }
    report = _report(plain, traced, rounded, skipped, config)
    report.warn_if_unchanged()
    result = _assemble(plain, rounded, {traced.places[tensor]: ranges[tensor] for tensor in observed}, config)
    setattr(result, ATTRIBUTE, report)
    return result


def quantization_report(model: keras.Model) -> PassReport:
    """Returns what `tfopt.quantize` did to make a model for training: each layer, rounded how, or left float and why.

    Args:
        model: What `tfopt.quantize` returned with training=True, in this process: a saved model does not hold it.
    Raises:
        UnsupportedModelError: It did not return this model.
    Example:
        >>> import numpy as np
        >>> from tfopt.quantization import quantize
        >>> model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="head")])
        >>> config = QuantizationConfig(training=True)
        >>> print(quantization_report(quantize(model, config, calibration_data=np.zeros((8, 4), "float32"))))
        quantize: 1 changed, 0 skipped
          changed  head (Dense): int8 weights (4, 2) per channel
    """
    found = getattr(model, ATTRIBUTE, None)
    if found is None:
        raise UnsupportedModelError(
            f"model must come from tfopt.quantize with training=True, in this process. "
            f"Received: {getattr(model, 'name', model)!r}, which does not. Its layers tell: quantized ones are of "
            "classes named Quantized..., and each range is a FakeQuantize layer."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """A model's folded graph, and where in the model its tensors and nodes come from.

    Attributes:
        graph: The graph.
        editor: An editor of the same graph.
        places: Each tensor that a layer returns, or that enters the model, to the first place that it has there.
        owners: Each node of the graph before folding to the operation that computes it.
    """

    graph: FrozenGraph
    editor: GraphEditor
    places: dict[str, Place]
    owners: dict[str, str]

    def owner(self, name: str) -> str:
        """Returns the operation that a node belongs to; a node that folding added is named after one that was there."""
        while name not in self.owners:
            name = name.rpartition("/")[0]
        return self.owners[name]


def _trace(model: keras.Model, tensors: dict[Place, Any]) -> _Trace:
    """Freezes a model with all its tensors as outputs, notes where they are in the graph, and folds it without them."""
    outputs = keras.tree.flatten(model.outputs)
    probe = freeze(keras.Model(model.inputs, [*tensors.values(), *outputs], name=model.name), fold=False)
    held = GraphEditor(probe.graph_def)
    names = [_computed(held, tensor) for tensor, _ in probe.outputs.values()]
    owners: dict[str, str] = {}
    for place, name in zip(tensors, names, strict=False):  # in the order of computation
        stack = [producer(name)]
        while stack:
            node = stack.pop()
            if node not in owners:
                owners[node] = place.name
                stack += [producer(source) for source in held.nodes[node].input]
    kept = dict(list(probe.outputs.items())[len(tensors) :])
    plain = replace(probe, outputs=kept)
    placeholders = [spec.name for spec in plain.inputs.values()]
    graph = fold_constants(replace(plain, graph_def=held.graph_def(plain.output_nodes, keep=placeholders)))
    editor = GraphEditor(graph.graph_def)
    places: dict[str, Place] = {}
    for place, name in zip(tensors, names, strict=False):
        if producer(name) in editor.nodes:
            places.setdefault(pass_through_origin(editor, name), place)
    return _Trace(graph=graph, editor=editor, places=places, owners=owners)


def _computed(editor: GraphEditor, tensor: str) -> str:
    while editor.nodes[producer(tensor)].op == "Identity":
        tensor = editor.nodes[producer(tensor)].input[0]
    return tensor


def _unfused(layer: Any) -> Sequence[Any]:
    """Returns layers that compute what one does, so that each tensor that needs a range is between two of them."""
    if type(layer) in SEPARABLE:
        return _halves(layer)
    if type(layer) in CONVOLUTIONS and layer.activation not in FUSED:
        activation = layers.Activation(layer.activation, name=f"{layer.name}_activation", dtype=layer.dtype_policy)
        return plain_copy(layer, activation=None), activation
    return (plain_copy(layer),)


def _halves(layer: Any) -> Sequence[Any]:
    """Returns the two convolutions, and the activation where no kernel fuses it, of a separable convolution."""
    depthwise, pointwise = SEPARABLE[type(layer)]
    common = {"dtype": layer.dtype_policy, "data_format": layer.data_format, "trainable": layer.trainable}
    first = depthwise(
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        depth_multiplier=layer.depth_multiplier,
        dilation_rate=layer.dilation_rate,
        use_bias=False,
        depthwise_regularizer=layer.depthwise_regularizer,
        depthwise_constraint=layer.depthwise_constraint,
        name=f"{layer.name}_depthwise",
        **common,
    )
    second = pointwise(
        layer.filters,
        1,
        use_bias=layer.use_bias,
        activation=layer.activation,
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        bias_regularizer=layer.bias_regularizer,
        bias_constraint=layer.bias_constraint,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        **common,
    )
    return first, *_unfused(second)


def _assemble(
    plain: keras.Model, rounded: set[str], ranges: dict[Place, Range], config: QuantizationConfig
) -> keras.Model:
    freeze_after = config.freeze_ranges_after

    def quantized(layer: Any) -> Sequence[Any]:
        if layer.name in rounded:
            options = {"learned_ranges": config.learned_ranges, "freeze_after": freeze_after}
            kind = QUANTIZED[type(layer)]
            return (kind.from_config({**layer.get_config(), "weight_bits": config.weight_bits, **options}),)
        if type(layer) is layers.BatchNormalization and config.freeze_batch_norm_after is not None:
            return (
                FrozenLateBatchNormalization.from_config(
                    {**layer.get_config(), "freeze_after": config.freeze_batch_norm_after}
                ),
            )
        return (plain_copy(layer),)

    def ranged(place: Place, tensor: Any) -> Any:
        span = ranges.get(place)
        if span is None:
            return None
        layer = FakeQuantize(
            signed=span.signed,
            learned=config.learned_ranges,
            freeze_after=freeze_after,
            dtype=tensor.dtype,
            name=f"{place}_range",
        )
        layer.build(tensor.shape)
        layer.limit.assign(span.limit)
        return layer

    model = rebuild(plain, quantized, ranged)
    for layer in model.layers:
        if type(layer) in QUANTIZED.values():
            layer.start_range()
    return model


def _report(
    plain: keras.Model, traced: _Trace, rounded: set[str], skipped: Sequence[Skip], config: QuantizationConfig
) -> PassReport:
    changed = []
    for layer in plain.layers:
        if layer.name in rounded:
            weights = getattr(layer, QUANTIZED[type(layer)].rounded)
            detail = f"int{config.weight_bits} weights {tuple(weights.shape)} per channel"
            detail += ", its op stays float" if type(layer) in WEIGHTS_ONLY else ""
            changed.append(Change(name=layer.name, kind=type(layer).__name__, detail=detail))
    left: dict[str, Skip] = {}
    for skip in skipped:
        name = traced.owner(skip.name)
        if name not in rounded:
            left.setdefault(name, Skip(name=name, kind=type(plain.get_layer(name)).__name__, reason=skip.reason))
    return PassReport(name="quantize", changed=changed, skipped=list(left.values()))


def _is_built_plainly(layer: Any) -> bool:
    return isinstance(getattr(layer, QUANTIZED[type(layer)].rounded), keras.Variable)


def _check_exclude(patterns: tuple[str, ...], traced: _Trace, plain: keras.Model) -> None:
    names = [*traced.editor.nodes, *(layer.name for layer in plain.layers)]
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            raise ConfigError(
                f"exclude must name layers of the model or nodes of its graph. Received: exclude={patterns}, where "
                f"{pattern!r} matches none. The report of a run without it lists the names."
            )
