"""Chooses the precision of training, and finds the outputs of a model that must stay float32.

Half precision is good for matrix products. A softmax, a sigmoid or the logits of a loss need more precision: float16
has 11 significant bits and ends at 65,504; bfloat16 has 8 significant bits, so that 0.9961 and 1.0 become the same
probability. So the outputs stay float32. That costs little, since it concerns one small layer.
"""

from __future__ import annotations

import keras

from tfopt.compat.layers import set_dtype
from tfopt.errors import UnsupportedModelError, unknown_name
from tfopt.hardware import Hardware
from tfopt.models.structure import layer_path, layers_inside, output_layers
from tfopt.report import Change, PassReport, Skip
from tfopt.training.config import PRECISIONS

HALF = ("float16", "bfloat16")


def choose_precision(requested: str, hardware: Hardware) -> tuple[str, str]:
    """Decides the dtype policy and gives the reason.

    A CPU gets bfloat16 only if it has AMX. Measured without AMX: with avx512_bf16, training runs at 0.98x to 1.14x the
    speed of float32; without avx512_bf16, it is 2.5 times slower.

    Args:
        requested: "auto", or the policy to use. If the hardware does not support that policy, the reason says so.
        hardware: The machine to decide for.
    Returns: the name of the Keras dtype policy, and the reason.
    Raises:
        ConfigError: The name is unknown.
    Example:
        >>> from tfopt.hardware import Gpu
        >>> gpu = Gpu(name="NVIDIA H100", compute_capability=(9, 0))
        >>> machine = Hardware(logical_cores=8, memory_bytes=2**36, tensorflow_version="2.21.0", gpus=(gpu,))
        >>> choose_precision("auto", machine)
        ('mixed_bfloat16', 'compute capability 9.0 has bfloat16 tensor cores, and bfloat16 needs no loss scaling')
    """
    if requested not in PRECISIONS:
        raise unknown_name("precision", str(requested), PRECISIONS)
    if requested != "auto":
        drawback = _drawback(requested, hardware)
        return requested, f"as asked; {drawback}" if drawback else "as asked"
    if not hardware.gpus:
        return _for_a_cpu(hardware)
    capabilities = [gpu.compute_capability for gpu in hardware.gpus]
    if any(capability is None for capability in capabilities):
        return "float32", "the GPU's compute capability is unknown"
    least = min(capability for capability in capabilities if capability is not None)  # every replica runs one policy
    name = f"compute capability {least[0]}.{least[1]}"
    if least >= (8, 0):
        return "mixed_bfloat16", f"{name} has bfloat16 tensor cores, and bfloat16 needs no loss scaling"
    if least >= (7, 0):
        return "mixed_float16", f"{name} has float16 tensor cores; the loss is scaled dynamically"
    return "float32", f"{name} has no tensor cores"


def _for_a_cpu(hardware: Hardware) -> tuple[str, str]:
    if "amx_bf16" in hardware.cpu_features:
        return "mixed_bfloat16", "no GPU; the CPU multiplies bfloat16 in AMX tiles"
    if "avx512_bf16" in hardware.cpu_features:
        return "float32", "no GPU; bfloat16 with avx512_bf16 but no AMX was measured at 0.98x to 1.14x of float32"
    return "float32", "no GPU; without AMX or avx512_bf16 bfloat16 slows a CPU down (measured: 2.5 times)"


def _drawback(requested: str, hardware: Hardware) -> str | None:
    """Returns the reason why the requested precision gains nothing on this hardware, or None if it gains."""
    if requested == "float32":
        return None
    if not hardware.gpus:
        if requested == "mixed_float16":
            return "a CPU has no fast float16 and gains nothing from it"
        value, reason = _for_a_cpu(hardware)
        return None if value == requested else reason
    needed, cores = ((7, 0), "float16") if requested == "mixed_float16" else ((8, 0), "bfloat16")
    for gpu in hardware.gpus:
        if gpu.compute_capability is not None and gpu.compute_capability < needed:
            return f"{gpu.name} of compute capability {{}}.{{}} has no {cores} tensor cores".format(
                *gpu.compute_capability
            )
    return None


def half_outputs(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that compute the model's outputs in float16 or bfloat16.

    In a functional or Sequential model, these are the layers that compute each output, and the layers after them that
    only reshape or activate. The outputs of a subclassed model are unknown; its own layers that end in a softmax are
    returned.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="logits", dtype="mixed_float16")])
        >>> [layer.name for layer in half_outputs(model)]
        ['logits']
    """
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
    changed, skipped, to_change = [], [], []
    for layer in half_outputs(model):
        reason = _why_not(layer)
        if reason:
            skipped.append(Skip(name=layer_path(model, layer), kind=type(layer).__name__, reason=reason))
            continue
        to_change.append(layer)
        detail = f"{layer.dtype_policy.name} -> float32"
        changed.append(Change(name=layer_path(model, layer), kind=type(layer).__name__, detail=detail))
    for layer in to_change:
        for part in layers_inside(layer):
            part.dtype_policy = "float32"
    if to_change and not skipped:
        _declare_float32(model)
    report = PassReport(name="float32 outputs", changed=tuple(changed), skipped=tuple(skipped))
    report.warn_if_unchanged()
    return report


def _why_not(layer: keras.Layer) -> str | None:
    if any(part.quantization_mode for part in layers_inside(layer)):
        return "it is quantized, and its policy holds the quantization"
    if any(weight.dtype in HALF for weight in layer.weights):
        return "its weights are half precision; build it under a mixed_ policy, which keeps them float32"
    return None


def _declare_float32(model: keras.Model) -> None:
    """Sets the dtype of `model.outputs`. Keras set it when the model was built, and has no public way to change it."""
    for output in keras.tree.flatten(getattr(model, "outputs", None) or []):
        if output.dtype in HALF:
            set_dtype(output, "float32")
