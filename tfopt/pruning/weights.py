"""The prunable weights of a model: the arrays of its matrix products, convolutions and embeddings.

The choice is that of tfmot, and in addition EinsumDense, which Keras 3 uses inside MultiHeadAttention. Biases are not
pruned and not reported, because they are few compared with the kernel.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import layers

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import attached_layers, direct_layers, layers_inside, own_trainable_variables
from tfopt.errors import ConfigError, UnsupportedLayerError, UnsupportedModelError
from tfopt.report import Change, PassReport, Skip

# Attributes that hold the prunable weights, by layer class. The first matching class is used.
PRUNED: dict[tuple[type, ...], tuple[str, ...]] = {
    (layers.Dense, layers.EinsumDense): ("kernel",),
    (layers.Conv1D, layers.Conv2D, layers.Conv3D): ("kernel",),
    (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose): ("kernel",),
    (layers.SeparableConv1D, layers.SeparableConv2D): ("pointwise_kernel",),
    (layers.Embedding,): ("embeddings",),
    (layers.SimpleRNNCell, layers.GRUCell, layers.LSTMCell): ("kernel", "recurrent_kernel"),
}

DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)

# The same for layers that are pruned only if `include` names them.
PRUNED_IF_NAMED: dict[tuple[type, ...], tuple[str, ...]] = {DEPTHWISE: ("kernel",)}

KEPT: dict[tuple[type, ...], str] = {
    DEPTHWISE: "a depthwise kernel has few weights, and only these for each channel",
    (
        layers.BatchNormalization,
        layers.LayerNormalization,
        layers.GroupNormalization,
        layers.RMSNormalization,
    ): "a normalization holds a scale and an offset per channel",
}

# The name, path or class of layers, a class, or a function from a layer to True or False.
LayerPattern: TypeAlias = str | Callable[..., Any]

NOT_BUILT = "it is not built, because the model never called it"


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One prunable weight of a model.

    Attributes:
        path: Names of the layers around it, the outermost first, for example "encoder/dense".
        kind: Class of its layer, for example "Dense".
        attribute: Name of the weight in that layer, for example "kernel".
        variable: The `keras.Variable` itself.
        reduction: Axes over which the layer's product sums. Patterns lie along the last one.
    """

    path: str
    kind: str
    attribute: str
    variable: Any
    reduction: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        return f"{self.attribute} {tuple(self.variable.shape)} {self.variable.dtype} of {self.path!r} ({self.kind})"

    def read(self) -> np.ndarray:
        """Returns the values as float32, of the variable's shape.

        Raises:
            UnsupportedLayerError: A value is NaN or infinite. Such weights cannot be ranked.
        """
        values = np.asarray(self.variable.numpy(), dtype=np.float32)
        if not np.isfinite(values).all():
            raise UnsupportedLayerError(
                f"Weights must be finite to be pruned or clustered. Received: NaN or infinity in the {self}. "
                "Training diverged; a lower learning rate or gradient clipping may help."
            )
        return values


def find_weights(
    model: Any, exclude: Sequence[LayerPattern] = (), include: Sequence[LayerPattern] = ()
) -> tuple[list[Weight], list[Skip]]:
    """Returns the prunable weights of a built Keras 3 model, and the skipped layers with the reasons.

    A weight that several layers share is returned once. The arguments are those of `PruningConfig`.

    Raises:
        UnsupportedModelError: The model is not a Keras 3 model or is not built.
        ConfigError: A pattern in `exclude` or `include` names no layer.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), layers.Dense(2, name="b")])
        >>> weights, skipped = find_weights(model, exclude=("b",))
        >>> [str(weight) for weight in weights]
        ["kernel (4, 3) float32 of 'a' (Dense)"]
        >>> skipped[0].reason
        'excluded'
    """
    _check_model(model)
    found = list(_walk(model, "", {id(layer) for layer in attached_layers(model)}))
    excluded, included = _named(found, exclude, "exclude"), _named(found, include, "include")
    weights: dict[int, Weight] = {}
    skipped: list[Skip] = []
    for path, layer in found:
        kind = type(layer).__name__
        attributes = _attributes(layer, PRUNED)
        reason = _reason_to_keep(layer, attributes, id(layer) in excluded)
        if include and (attributes or id(layer) in included) and id(layer) not in excluded:
            # A layer that is kept otherwise, a depthwise convolution, is pruned if it is named.
            attributes = attributes or _attributes(layer, PRUNED_IF_NAMED)
            reason = "not included" if id(layer) not in included else _reason_to_keep(layer, attributes, excluded=False)
        if reason:
            skipped.append(Skip(name=path, kind=kind, reason=reason))
            continue
        for attribute in attributes:
            variable, reduction = getattr(layer, attribute), _reduction(layer, attribute)
            weight = Weight(path=path, kind=kind, attribute=attribute, variable=variable, reduction=reduction)
            weights.setdefault(id(weight.variable), weight)
    if not weights and any(skip.reason == NOT_BUILT for skip in skipped):
        # Keras' model.build marks a subclassed model as built, but does not build its layers.
        raise UnsupportedModelError(
            f"model must be built, and its layers too. Received: {model.name!r}, whose layers have no weights. "
            "Call the model once on a batch first."
        )
    return list(weights.values()), skipped


def select_weights(model: Any, config: Any) -> tuple[list[Weight], list[Skip]]:
    """Returns what `find_weights` finds for a `PruningConfig`, whose `sparsities` must name pruned layers too."""
    weights, skipped = find_weights(model, config.exclude, config.include)
    for weight in weights:
        constraint = weight.variable.constraint
        if any(getattr(each, "shares_values", False) for each in (constraint, getattr(constraint, "inner", None))):
            raise UnsupportedModelError(
                f"model must be pruned before it is clustered. Received: {model.name!r}, whose {weight} shares values "
                "that zeros would change. Load the model anew, prune it, and then call tfopt.cluster."
            )
    for end, keep, name in ((0, config.keep_first, "first"), (-1, config.keep_last, "last")):
        if keep and weights:
            left_out = weights[end]
            reason = f"it is the {name} layer, and keep_{name} is set"
            skipped.append(Skip(name=left_out.path, kind=left_out.kind, reason=reason))
            weights = [each for each in weights if each.path != left_out.path]
    for pattern in config.sparsities:
        if not any(is_matched(weight.path, pattern, weight.kind) for weight in weights):
            raise ConfigError(f"sparsities must name layers that are pruned. Received: {pattern!r}, which none has.")
    return weights, skipped


def layer_sparsities(weights: Sequence[Weight], config: Any, sparsity: float) -> list[float] | None:
    """Returns the sparsity of each weight when the schedule is at `sparsity`; None if all layers have the same."""
    if not config.sparsities:
        return None
    targets = [
        next((share for each, share in config.sparsities.items() if is_matched(weight.path, each, weight.kind)), None)
        for weight in weights
    ]
    progress = sparsity / config.target_sparsity if config.target_sparsity else 1.0
    return [sparsity if target is None else progress * target for target in targets]


def make_report(
    weights: Sequence[Weight], skipped: Sequence[Skip], masks: Sequence[np.ndarray] | None = None
) -> PassReport:
    """Returns the report of a pruning pass: the zeros of each weight, now or of its mask, and the skipped layers."""
    masks = masks or [weight.variable.numpy() != 0 for weight in weights]
    zeros = [int(np.count_nonzero(~mask)) for mask in masks]
    changed, unchanged = [], []
    for weight, mask, count in zip(weights, masks, zeros, strict=True):
        what = f"{weight.attribute} {tuple(weight.variable.shape)}"
        if count:
            detail = f"{count / mask.size:.1%} zeros in {what}"
            changed.append(Change(name=weight.path, kind=weight.kind, detail=detail))
        else:
            unchanged.append(Skip(name=weight.path, kind=weight.kind, reason=f"the sparsity gives no zero in {what}"))
    metrics = {"sparsity": sum(zeros) / sum(mask.size for mask in masks)} if weights else {}
    return PassReport(name="prune", changed=tuple(changed), skipped=(*skipped, *unchanged), metrics=metrics)


def _walk(layer: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields a layer and all layers inside it, each once and in order, with their paths."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield path or layer.name, layer
    for inner in direct_layers(layer):
        yield from _walk(inner, f"{path}/{inner.name}" if path else inner.name, seen)


def _check_model(model: Any) -> None:
    check_keras_3(model)
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(f"model must be a Keras model. Received: {type(model).__name__}.")
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Call it once on a batch first."
        )


def _named(found: list[tuple[str, Any]], patterns: Sequence[LayerPattern], setting: str) -> set[int]:
    """Returns the ids of the layers that a pattern names, and of all layers inside them."""
    chosen: set[int] = set()
    for pattern in patterns:
        named = [layer for path, layer in found if _matches(layer, path, pattern)]
        if not named:
            known = [path for path, _ in found]
            close = difflib.get_close_matches(pattern, known, n=1) if isinstance(pattern, str) else []
            remedy = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{setting} must name layers of the model. Received: {pattern!r}, which no layer has.{remedy}"
            )
        chosen.update(id(inner) for layer in named for inner in layers_inside(layer))
    return chosen


def _matches(layer: Any, path: str, pattern: LayerPattern) -> bool:
    if isinstance(pattern, str):
        return any(fnmatchcase(name, pattern) for name in (layer.name, path, type(layer).__name__))
    return isinstance(layer, pattern) if isinstance(pattern, type) else bool(pattern(layer))


def is_matched(path: str, pattern: str, *kind: str) -> bool:
    """Returns whether a pattern is the path, the name or the class of a layer, or those of a model around it."""
    parts = path.split("/")
    names = (*kind, *parts, *("/".join(parts[: end + 1]) for end in range(len(parts))))
    return any(fnmatchcase(name, pattern) for name in names)


def _attributes(layer: Any, table: dict[tuple[type, ...], tuple[str, ...]]) -> tuple[str, ...]:
    return next((names for classes, names in table.items() if isinstance(layer, classes)), ())


def _reduction(layer: Any, attribute: str) -> tuple[int, ...]:
    """Returns the axes of a weight over which its product sums."""
    rank = len(getattr(layer, attribute).shape)
    if isinstance(layer, layers.EinsumDense):
        terms, result = layer.equation.split("->")
        kernel = terms.split(",")[1]
        summed = tuple(axis for axis, letter in enumerate(kernel) if letter not in result)
        return summed or (0,)
    if attribute == "embeddings":
        return (1,)
    if isinstance(layer, DEPTHWISE):
        return tuple(range(rank - 2))
    if isinstance(layer, TRANSPOSED):  # [window, outputs, inputs]
        return (*range(rank - 2), rank - 1)
    return tuple(range(rank - 1)) if rank > 2 else (0,)


def _reason_to_keep(layer: Any, attributes: tuple[str, ...], excluded: bool) -> str | None:
    """Returns why a layer is not pruned; None if it is pruned or has no weights to prune."""
    if attributes:
        if excluded:
            return "excluded"
        if not layer.built:
            return NOT_BUILT
        # With LoRA, the attribute is a sum that every access computes.
        variables = [getattr(layer, attribute) for attribute in attributes]
        if not all(isinstance(each, keras.Variable) and keras.backend.is_float_dtype(each.dtype) for each in variables):
            return "its weights are quantized or have a LoRA part"
        return None
    for classes, reason in KEPT.items():
        if isinstance(layer, classes):
            return reason
    # The layer's own variables only: the layers inside it are checked separately.
    if any(len(variable.shape) > 1 for variable in own_trainable_variables(layer)):
        return "tfopt does not know the weights of this class"
    return None
