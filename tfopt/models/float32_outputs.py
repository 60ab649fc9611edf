"""Finds the outputs of a model that must stay float32, and makes them so.

Half precision is good for matrix products. A softmax, a sigmoid or the logits of a loss need more precision: float16
has 11 significant bits and ends at 65,504; bfloat16 has 8 significant bits, so that 0.9961 and 1.0 become the same
probability. So the outputs stay float32. That costs little, since it concerns one small layer.
"""

from __future__ import annotations

import keras

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import layers_inside, set_dtype
from tfopt.errors import UnsupportedModelError
from tfopt.models.copying import finalize
from tfopt.models.structure import can_follow_outputs, layer_path, output_layers
from tfopt.report import Change, PassReport, Skip

HALF = ("float16", "bfloat16")


def half_outputs(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that compute the model's outputs in float16 or bfloat16.

    These are the layers that compute each output, and the layers after them that only reshape or activate. A
    subclassed model must have been called once. If its `call` cannot be followed, its own layers that end in a softmax
    are returned.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="logits", dtype="mixed_float16")])
        >>> [layer.name for layer in half_outputs(model)]
        ['logits']
    """
    check_keras_3(model)
    return [layer for layer in output_layers(model) if any(part.compute_dtype in HALF for part in layers_inside(layer))]


def float32_outputs(model: keras.Model) -> PassReport:
    """Makes the layers that `half_outputs` finds compute in float32, in place.

    Only their dtype policy changes. The weights stay, since a mixed policy keeps them in float32. No layer is rebuilt,
    and a saved model keeps the change. Call this before `compile`, or compile again: a traced step keeps the old dtype.

    Args:
        model: A built model. If your own layer holds other layers, they change too. A saved model keeps that change
            only if the layer's `get_config` includes them.
    Raises:
        UnsupportedModelError: The model is not built.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="logits", dtype="mixed_float16")])
        >>> print(float32_outputs(model))
        float32 outputs: 1 changed, 0 skipped
          changed  logits (Dense): mixed_float16 -> float32
    """
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: model={model.name!r}, which has no weights yet. "
            "Call it on one batch first."
        )
    report = keep_float32(model)
    report.warn_if_unchanged()
    return report


def keep_float32(model: keras.Model) -> PassReport:
    """Does what `float32_outputs` does, without a warning if there is nothing to change."""
    changed, skipped, to_change = [], [], []
    for layer in half_outputs(model):
        path, kind = layer_path(model, layer), type(layer).__name__
        if reason := _why_not(layer):
            skipped.append(Skip(name=path, kind=kind, reason=reason))
        else:
            to_change.append(layer)
            changed.append(Change(name=path, kind=kind, detail=f"{layer.dtype_policy.name} -> float32"))
    if model.built and not can_follow_outputs(model):
        reason = "its call cannot be followed to its outputs; give the layers that compute them dtype='float32'"
        skipped.append(Skip(name=model.name, kind=type(model).__name__, reason=reason))
    for layer in to_change:
        for part in layers_inside(layer):
            part.dtype_policy = "float32"
            finalize(part)  # a Normalization keeps its statistics in the dtype that it computes with
    if to_change and not skipped:
        for output in keras.tree.flatten(getattr(model, "outputs", None) or []):
            if output.dtype in HALF:  # Keras set it when the model was built, and has no public way to change it
                set_dtype(output, "float32")
    return PassReport(name="float32 outputs", changed=tuple(changed), skipped=tuple(skipped))


def _why_not(layer: keras.Layer) -> str | None:
    if any(part.quantization_mode for part in layers_inside(layer)):
        return "it is quantized, and its policy holds the quantization"
    if any(weight.dtype in HALF for weight in layer.weights):
        return "its weights are half precision; build it under a mixed_ policy, which keeps them float32"
    return None
