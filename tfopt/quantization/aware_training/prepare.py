"""Quantization-aware training: a model made anew, so that it trains with the values it will have in int8.

Where the ranges go is not decided here. The float model is frozen and folded as for export, the fusions that its int8
kernels will compute are found as for export, and each tensor that these need a range for is traced back to the layer
it comes from. So what is trained is what is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
from keras import layers

from tfopt.compat.layers import layers_inside
from tfopt.errors import UnsupportedLayerError, UnsupportedModelError
from tfopt.graph import FrozenGraph, GraphEditor, freeze
from tfopt.graph.edit import producer
from tfopt.graph.fold import fold_constants
from tfopt.quantization.annotation.fusion import Fusion, check_exclude, find_fusions_where, folded_tensor, matches
from tfopt.quantization.annotation.range import Range
from tfopt.quantization.annotation.ranged_tensors import tensors_of_fusion, tensors_with_ranges
from tfopt.quantization.annotation.weight_grid import WeightGrid
from tfopt.quantization.aware_training.fake_quant import FakeQuantize
from tfopt.quantization.aware_training.layers import QUANTIZED, WITHOUT_KERNEL, FrozenLateBatchNormalization
from tfopt.quantization.aware_training.rebuild import Place, check_rebuildable, plain_copy, rebuild
from tfopt.quantization.aware_training.split_layers import unfused
from tfopt.quantization.calibration.calibrate import calibrate
from tfopt.quantization.config import QuantizationConfig
from tfopt.report import Change, PassReport, Skip

ATTRIBUTE = "_tfopt_quantization_report"


def quantize_for_training(model: Any, config: QuantizationConfig, calibration_data: Any) -> keras.Model:
    """Returns a copy of the model that trains with fake quantization; see `tfopt.quantize`."""
    if isinstance(model, (str, Path)) and Path(model).suffix == ".keras":
        model = keras.saving.load_model(model, compile=False)
    check_rebuildable(model)
    if any(isinstance(layer, FakeQuantize) for layer in layers_inside(model)):
        raise UnsupportedModelError(
            f"model must not be quantized already. Received: {model.name!r}, which holds fake quantization. "
            "Train it on, or export it."
        )
    flat = rebuild(model, unfused)
    # Places count the calls of a layer in the order in which a model is walked, which for the flat model is not that of
    # the nested one. So the ranges are found, and put in, on walks over one and the same model.
    tensors: dict[Place, Any] = {}
    plain = rebuild(flat, lambda layer: (plain_copy(layer),), lambda place, tensor: tensors.update({place: tensor}))
    traced = _trace(plain, tensors)
    check_exclude(config.exclude, [*traced.editor.nodes, *(layer.name for layer in plain.layers)])
    operations = {operation.name: operation for operation in plain.operations}

    def obstacle(fusion: Fusion) -> str | None:
        layer: Any = operations.get(traced.owner(fusion.op))
        if type(layer) not in QUANTIZED:
            return f"computed by a {type(layer).__name__}, which has no quantized form"
        if matches(layer.name, config.exclude):
            return "excluded by the configuration"
        if not _has_float_weights(layer):
            return "its weights are quantized or have a LoRA part"
        missing = [tensor for tensor in tensors_of_fusion(traced.editor, fusion) if tensor not in traced.places]
        return f"{missing[0]!r} needs a range and is inside a layer" if missing else None

    fusions, skipped = find_fusions_where(traced.graph, traced.editor, obstacle, config.exclude)
    observed = tensors_with_ranges(traced.editor, fusions)
    measured = calibrate(traced.graph, observed, calibration_data, config)
    ranges = {tensor: span.symmetric() for tensor, span in measured.items()}  # those that FakeQuantize trains
    lowered = {traced.owner(fusion.op) for fusion in fusions}
    rounded = lowered | {
        layer.name
        for layer in plain.layers
        if type(layer) in WITHOUT_KERNEL and not matches(layer.name, config.exclude) and _has_float_weights(layer)
    }
    report = _report(plain, traced, rounded, lowered, skipped, config)
    report.warn_if_unchanged()
    found = {traced.places[tensor]: ranges[tensor] for tensor in observed}
    result = _assemble(flat, _weight_bits(traced, fusions, ranges, rounded, config), found, config)
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
        owners: Each node of the graph before folding, and each function, to the operation that computes it.
    """

    graph: FrozenGraph
    editor: GraphEditor
    places: dict[str, Place]
    owners: dict[str, str]

    def owner(self, name: str) -> str:
        """Returns the operation that a node belongs to; a node that folding added is named after one that was there."""
        while name and name not in self.owners:
            name = name.rpartition("/")[0]
        return self.owners.get(name, "")


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
    called = {value.func.name: name for name, node in held.nodes.items() for value in node.attr.values()}
    owners |= {function: owners[name] for function, name in called.items() if function and name in owners}
    kept = dict(list(probe.outputs.items())[len(tensors) :])
    graph = fold_constants(replace(probe, outputs=kept).edited(held))
    editor = GraphEditor(graph.graph_def)
    places: dict[str, Place] = {}
    for place, name in zip(tensors, names, strict=False):
        origin = folded_tensor(editor, name, held)
        if origin is not None:
            places.setdefault(origin, place)
    return _Trace(graph=graph, editor=editor, places=places, owners=owners)


def _computed(editor: GraphEditor, tensor: str) -> str:
    """Returns the tensor that identities pass on; an IdentityN carries a custom gradient, as that of swish."""
    while (node := editor.nodes[producer(tensor)]).op in ("Identity", "IdentityN"):
        tensor = node.input[int(tensor.partition(":")[2] or 0)]
    return tensor


def _weight_bits(
    traced: _Trace,
    fusions: Sequence[Fusion],
    ranges: Mapping[str, Range],
    rounded: set[str],
    config: QuantizationConfig,
) -> dict[str, int]:
    """Returns how many bits the weights of each layer use: as many as all the kernels that will read them can take."""
    grid = WeightGrid(bits=config.weight_bits, reduce_range=config.reduce_range)
    bits = dict.fromkeys(rounded, config.weight_bits)
    for fusion in fusions:
        layer = traced.owner(fusion.op)
        bits[layer] = min(bits[layer], grid.bits_of(traced.editor, fusion, ranges))
    return bits


def _assemble(
    flat: keras.Model, weight_bits: Mapping[str, int], ranges: Mapping[Place, Range], config: QuantizationConfig
) -> keras.Model:
    freeze_after = config.freeze_ranges_after

    def quantized(layer: Any) -> Sequence[Any]:
        if layer.name in weight_bits:
            options = {"learned_ranges": config.learned_ranges, "freeze_after": freeze_after}
            kind = QUANTIZED[type(layer)]
            return (kind.from_config({**layer.get_config(), "weight_bits": weight_bits[layer.name], **options}),)
        if type(layer) is layers.BatchNormalization and config.freeze_batch_norm_after is not None:
            if layer.synchronized:
                raise UnsupportedLayerError(
                    "freeze_batch_norm_after cannot freeze batch norms that are synchronized: replicas cannot talk to "
                    f"each other inside a condition. Received: {layer.name!r}. Build it without synchronized=True."
                )
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

    model = rebuild(flat, quantized, ranged)
    for layer in model.layers:
        if type(layer) in QUANTIZED.values():
            layer.start_range()
    return model


def _report(
    plain: keras.Model,
    traced: _Trace,
    rounded: set[str],
    lowered: set[str],
    skipped: Sequence[Skip],
    config: QuantizationConfig,
) -> PassReport:
    changed = []
    operations = {operation.name: operation for operation in plain.operations}
    for layer in plain.layers:
        if layer.name in rounded:
            weights = getattr(layer, QUANTIZED[type(layer)].rounded)
            detail = f"int{config.weight_bits} weights {tuple(weights.shape)} per channel"
            detail += "" if layer.name in lowered else ", its op stays float"
            changed.append(Change(name=layer.name, kind=type(layer).__name__, detail=detail))
    left: dict[str, Skip] = {}
    for skip in skipped:
        operation = operations.get(traced.owner(skip.name))
        if operation is None:
            left[skip.name] = skip
        elif operation.name not in rounded:
            kind = type(operation).__name__
            left.setdefault(operation.name, Skip(name=operation.name, kind=kind, reason=skip.reason))
    return PassReport(name="quantize", changed=changed, skipped=list(left.values()))


def _has_float_weights(layer: Any) -> bool:
    weights = getattr(layer, QUANTIZED[type(layer)].rounded)
    return isinstance(weights, keras.Variable) and keras.backend.is_float_dtype(weights.dtype)
