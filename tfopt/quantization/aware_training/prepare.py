"""Prepares a model for quantization-aware training: a copy that computes with the values of int8.

The export decides which tensors need a range. So the float model is frozen and folded as for the export, and its
fusions are found as for the export. Each tensor that needs a range is then traced back to the layer that computes it.
So the trained ranges are the ranges that the int8 kernels need.
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
from tfopt.graph.keras_file import load_keras
from tfopt.models.copy_check import check_copy, check_quantized, first_examples
from tfopt.models.copying import plain_copy
from tfopt.quantization.annotation.fusion import Fusion, FusionSearch
from tfopt.quantization.annotation.grids import Range, WeightGrid
from tfopt.quantization.annotation.ranged_tensors import tensors_of_fusion, tensors_with_ranges
from tfopt.quantization.aware_training.fake_quant import FakeQuantize
from tfopt.quantization.aware_training.layers import QUANTIZED, WITHOUT_KERNEL, FrozenLateBatchNormalization
from tfopt.quantization.aware_training.rebuild import Place, check_rebuildable, rebuild, split_layer
from tfopt.quantization.aware_training.trained_ranges import folded_tensor
from tfopt.quantization.calibration.calibrate import calibrate, computable, read_calibration_data
from tfopt.quantization.calibration.range_use import examine
from tfopt.quantization.config import QuantizationConfig, check_exclude, matches
from tfopt.report import Change, PassReport, Skip

ATTRIBUTE = "_tfopt_quantization_report"


@computable()
def quantize_for_training(
    model: Any, config: QuantizationConfig, calibration_data: Any, *, trusted: bool = False
) -> keras.Model:
    """Returns a copy of the model that trains with fake quantization; see `tfopt.quantize`."""
    if isinstance(model, (str, Path)) and Path(model).suffix == ".keras":
        model = load_keras(Path(model), trusted)
    check_rebuildable(model)
    if any(isinstance(layer, FakeQuantize) for layer in layers_inside(model)):
        raise UnsupportedModelError(
            f"model must not be quantized already. Received: {model.name!r}, which holds fake quantization. "
            "Continue its training, or export it."
        )
    pairs: list[tuple[Any, Any]] = []
    flat = rebuild(model, split_layer, pairs=pairs)
    examples = first_examples(model, calibration_data)
    check_copy(model, flat, pairs, examples)
    # A place holds the number of a layer's call. The calls of the flat model can have another order than those of the
    # nested model. So the flat model is used both to find the places and to insert the ranges.
    tensors: dict[Place, Any] = {}

    def note(place: Place, tensor: Any) -> None:
        if tensor.dtype != "string":  # strings need no range, and a frozen graph cannot return them
            tensors[place] = tensor

    plain = rebuild(flat, lambda layer: (plain_copy(layer),), note)
    traced = _trace(plain, tensors)
    check_exclude(config.exclude, [*traced.editor.nodes, *(layer.name for layer in plain.layers)])
    operations = {operation.name: operation for operation in plain.operations}

    def obstacle(fusion: Fusion) -> str | None:
        layer: Any = operations.get(traced.owner(fusion.op))
        if type(layer) not in QUANTIZED:
            return f"computed by a {type(layer).__name__}, which has no quantized form"
        if matches(layer.name, config.exclude):
            return "excluded by the configuration"
        if not fusion.per_channel:
            return "grouped convolution: its int8 kernel has one range for all channels, and training one for each"
        if not _has_float_weights(layer):
            return "its weights are quantized or have a LoRA part"
        missing = [tensor for tensor in tensors_of_fusion(traced.editor, fusion) if tensor not in traced.places]
        return f"{missing[0]!r} needs a range and is inside a layer" if missing else None

    fusions, skipped = FusionSearch(traced.graph, traced.editor, config.exclude).find(obstacle=obstacle)
    observed = tensors_with_ranges(traced.editor, fusions)
    batches = read_calibration_data(traced.graph, calibration_data, config=config).inputs
    measured = calibrate(traced.graph, observed, batches, config)
    # FakeQuantize has no zero point.
    ranges = {tensor: value_range.symmetric() for tensor, value_range in measured.items()}
    lowered = {traced.owner(fusion.op) for fusion in fusions}
    rounded = lowered | {
        layer.name
        for layer in plain.layers
        if type(layer) in WITHOUT_KERNEL and not matches(layer.name, config.exclude) and _has_float_weights(layer)
    }
    notes = examine(traced.graph, batches, ranges)
    report = replace(_report(plain, traced, rounded, lowered, skipped, config), notes=notes)
    report.warn_if_unchanged()
    found = {traced.places[tensor]: ranges[tensor] for tensor in observed}
    grid = WeightGrid(bits=config.weight_bits, reduce_range=config.reduce_range)
    bits = dict.fromkeys(rounded, config.weight_bits)
    for fusion in fusions:  # several kernels may read the weights of one layer
        layer = traced.owner(fusion.op)
        bits[layer] = min(bits[layer], grid.bits_of(traced.editor, fusion, ranges))
    result = _assemble(flat, bits, found, config)
    if examples is not None:  # others may lie outside of the ranges
        check_quantized(model, result, [], examples)
    setattr(result, ATTRIBUTE, report)
    return result


def quantization_report(model: keras.Model) -> PassReport:
    """Returns the report of `tfopt.quantize` with training=True: how each layer is rounded, or why it stays float.

    Args:
        model: The model that `tfopt.quantize` returned in this process. A saved model does not hold the report.
    Raises:
        UnsupportedModelError: The model does not come from `tfopt.quantize` with training=True.
    Example:
        >>> import numpy as np
        >>> from tfopt.quantization import quantize
        >>> model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="head")])
        >>> config = QuantizationConfig(training=True)
        >>> data = np.random.default_rng(0).random((32, 4), dtype="float32")
        >>> print(quantization_report(quantize(model, config, calibration_data=data)))
        quantize: 1 changed, 0 skipped
          changed  head (Dense): int8 weights (4, 2) per channel
          note     keras_tensor... (range): 0.00% of the values saturated, ...
    """
    found = getattr(model, ATTRIBUTE, None)
    if found is None:
        raise UnsupportedModelError(
            f"model must come from tfopt.quantize with training=True, in this process. "
            f"Received: {getattr(model, 'name', model)!r}, which does not. Look at its layers instead: quantized "
            "layers have classes named Quantized..., and each range is a FakeQuantize layer."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """A model's folded graph, with the operations of the model that its tensors and nodes come from.

    Attributes:
        places: The first place of each tensor that is an input of the model or an output of a layer.
        owners: The operation that computes each node of the graph before folding, and each function.
    """

    graph: FrozenGraph
    editor: GraphEditor
    places: dict[str, Place]
    owners: dict[str, str]

    def owner(self, name: str) -> str:
        """Returns the operation that a node belongs to. A node inside a function is given as "function/node"."""
        function = name.partition("/")[0]
        return self.owners.get(self.editor.origin(name)) or self.owners.get(function, "")


def _trace(model: keras.Model, tensors: dict[Place, Any]) -> _Trace:
    """Freezes a model with all its tensors as outputs, records their places, and folds it with its own outputs only."""
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
    editor = GraphEditor(graph.graph_def, graph.origins)
    places: dict[str, Place] = {}
    for place, name in zip(tensors, names, strict=False):
        origin = folded_tensor(editor, name, held)
        if origin is not None:
            places.setdefault(origin, place)
    return _Trace(graph=graph, editor=editor, places=places, owners=owners)


def _computed(editor: GraphEditor, tensor: str) -> str:
    """Returns the tensor before Identity and IdentityN nodes. IdentityN holds a custom gradient, as in swish."""
    while (node := editor.nodes[producer(tensor)]).op in ("Identity", "IdentityN"):
        tensor = node.input[int(tensor.partition(":")[2] or 0)]
    return tensor


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
                    "freeze_batch_norm_after cannot freeze batch norms that are synchronized: replicas cannot "
                    f"synchronize inside a conditional op. Received: {layer.name!r}. "
                    "Build it without synchronized=True."
                )
            return (
                FrozenLateBatchNormalization.from_config(
                    {**layer.get_config(), "freeze_after": config.freeze_batch_norm_after}
                ),
            )
        return (plain_copy(layer),)

    def ranged(place: Place, tensor: Any) -> Any:
        value_range = ranges.get(place)
        if value_range is None:
            return None
        layer = FakeQuantize(
            signed=value_range.signed,
            learned=config.learned_ranges,
            freeze_after=freeze_after,
            dtype=tensor.dtype,
            name=f"{place}_range",
        )
        layer.build(tensor.shape)
        layer.limit.assign(value_range.limit)
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
