"""Which precision to train in, and whether a model is fit for it.

Half precision is for the matrix products. A softmax, a sigmoid or the logits that a loss reads need more: float16 has
11 significant bits and ends at 65,504, bfloat16 has 8, so that probabilities such as 0.9961 and 1.0 become one. The
outputs therefore stay float32, at the price of one small layer. Tensor cores multiply tiles: in half precision a width
that is no multiple of 8 is padded, or misses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError, unknown_name
from tfopt.hardware import Hardware
from tfopt.report import Change, PassReport, Record, Skip
from tfopt.training.config import PRECISIONS

HALF = ("float16", "bfloat16")
# These hand on what they are given, but cast it to their own compute dtype: as the last layer they hide the one that
# computes the output, and both have to be float32.
HANDS_ON = (
    layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector, layers.Dropout, layers.Identity,
    layers.Cropping1D, layers.Cropping2D, layers.Cropping3D, layers.Activation, layers.Softmax, layers.ReLU,
)  # fmt: skip


def choose_precision(requested: str, hardware: Hardware) -> tuple[str, str]:
    """Decides the dtype policy and gives the reason.

    A CPU gets bfloat16 only where it has AMX for it. Without, training was measured at 0.98x to 1.14x the speed of
    float32 with avx512_bf16, and 2.5 times slower with neither.

    Args:
        requested: "auto", or the policy to keep; where the hardware does not carry it, the reason says so.
        hardware: What to decide for.
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
    """Returns why a precision that was asked for gains nothing on this hardware, or None."""
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

    In a functional or Sequential model these are the layers behind each output, with those that only reshape or
    activate in between. Of a subclassed model the outputs are not known; the layers it owns that end in a softmax are
    returned, and none where there are none.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="logits", dtype="mixed_float16")])
        >>> [layer.name for layer in half_outputs(model)]
        ['logits']
    """
    return [layer for layer in _output_layers(model) if any(part.compute_dtype in HALF for part in _parts(layer))]


def float32_outputs(model: keras.Model) -> PassReport:
    """Makes the layers that `half_outputs` finds compute in float32, in place.

    Only their dtype policy changes: weights stay (they were float32 under a mixed policy), nothing is rebuilt, and a
    saved model keeps it. Call it before `compile`, or compile again, since a traced step keeps the old dtype.

    Args:
        model: A built model. In a layer of your own that holds other layers, those change too; its `get_config` must
            carry them if the change is to outlive saving.
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
        for part in _parts(layer):
            part.dtype_policy = "float32"
    if to_change and not skipped:
        _declare_float32(model)
    report = PassReport(name="float32 outputs", changed=tuple(changed), skipped=tuple(skipped))
    report.warn_if_unchanged()
    return report


def _why_not(layer: keras.Layer) -> str | None:
    if any(part.quantization_mode for part in _parts(layer)):
        return "it is quantized, and its policy holds the quantization"
    if any(weight.dtype in HALF for weight in layer.weights):
        return "its weights are half precision; build it under a mixed_ policy, which keeps them float32"
    return None


def _declare_float32(model: keras.Model) -> None:
    """Sets the dtype that `model.outputs` announces. Keras fixed it when the model was built and offers no setter."""
    for output in keras.tree.flatten(getattr(model, "outputs", None) or []):
        if output.dtype in HALF:
            output._dtype = "float32"


def layer_path(model: keras.Model, layer: keras.Layer) -> str:
    """Names of the layers it is in, without the model's own, which only a Sequential model puts in front."""
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


def _parts(layer: keras.Layer) -> list[keras.Layer]:
    """A layer with those inside it, such as the one a TimeDistributed wraps."""
    return list(layer._flatten_layers())


def _output_layers(model: keras.Model) -> list[keras.Layer]:
    """The layers that compute the outputs, first the one nearest to the output, each once."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if outputs:
        return list({id(layer): layer for output in outputs for layer in _behind(output)}.values())
    return [layer for layer in model.layers if _is_softmax(layer)]


def _behind(tensor: Any) -> Iterator[keras.Layer]:
    """Walks from a symbolic output to the layers that compute it, through what only hands values on."""
    operation, node_index, tensor_index = tensor._keras_history
    if isinstance(operation, layers.InputLayer):
        return
    if isinstance(operation, keras.Model):  # a model used as a layer
        inner = keras.tree.flatten(getattr(operation, "outputs", None) or [])
        yield from _behind(inner[tensor_index]) if inner else _output_layers(operation)
        return
    is_layer = isinstance(operation, keras.Layer)
    if is_layer:
        yield operation
    # An operation such as keras.ops.softmax has no policy of its own: it computes in the dtype it is given.
    if not is_layer or isinstance(operation, HANDS_ON):
        for source in operation._inbound_nodes[node_index].input_tensors:
            yield from _behind(source)


def _is_softmax(layer: keras.Layer) -> bool:
    return isinstance(layer, layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax


@dataclass(frozen=True, kw_only=True)
class Misalignment(Record):
    """A width that is no multiple of the tensor cores' tile.

    Attributes:
        name: The layer's path.
        kind: Its class.
        what: The argument that sets the width, for example "units".
        width: Its value.
        padded: The next multiple.
        extra_parameters_percent: Growth of this layer's own parameters if it were padded, in per cent.
        is_output: Whether the width is the model's output, which its task decides.
    """

    name: str
    kind: str
    what: str
    width: int
    padded: int
    extra_parameters_percent: float
    is_output: bool

    def __str__(self) -> str:
        change = f"{self.what}={self.width} -> {self.padded}, +{self.extra_parameters_percent:.1f}% of its parameters"
        output = "; an output, so pad it only if the loss ignores the rest" if self.is_output else ""
        return f"{self.name} ({self.kind}): {change}{output}"


@dataclass(frozen=True, kw_only=True)
class Alignment(Record):
    """Which layers miss tensor-core alignment, and what padding would cost.

    Attributes:
        multiple: What a width should be a multiple of.
        layers: How many widths were looked at.
        rows: Those that miss it.
    """

    multiple: int
    layers: int
    rows: tuple[Misalignment, ...]

    def __str__(self) -> str:
        head = f"alignment: {len(self.rows)} of {self.layers} widths are no multiple of {self.multiple}"
        return "\n".join([head, *(f"  {row}" for row in self.rows)])


def tensor_core_alignment(model: keras.Model, multiple: int = 8) -> Alignment:
    """Lists the layers whose output width is no multiple of what tensor cores multiply at once.

    The channels of the model's input are data and are not looked at; a depthwise convolution uses no tensor cores.

    Args:
        model: A built model; layers in layers are looked at too.
        multiple: 8 for half precision, 16 for int8.
    Raises:
        ConfigError: The multiple is not a whole number of at least 1.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(30, name="a"), keras.layers.Dense(10)])
        >>> tensor_core_alignment(model).rows[0].padded
        32
    """
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ConfigError(
            f"multiple must be a whole number of at least 1. Received: multiple={multiple!r}. "
            "Use 8 for half precision, 16 for int8."
        )
    outputs = {id(part) for layer in _output_layers(model) for part in _parts(layer)}
    widths = [(layer, *width) for layer in _layers_with_widths(model) for width in _widths(layer)]
    rows = []
    for layer, what, width, shares in widths:
        padded = math.ceil(width / multiple) * multiple
        if padded == width:
            continue
        grown = sum(count * ((padded / width) ** power - 1) for count, power in shares)
        rows.append(
            Misalignment(
                name=layer_path(model, layer),
                kind=type(layer).__name__,
                what=what,
                width=width,
                padded=padded,
                extra_parameters_percent=100 * grown / max(layer.count_params(), 1),
                is_output=id(layer) in outputs,
            )
        )
    return Alignment(multiple=multiple, layers=len(widths), rows=tuple(rows))


def _layers_with_widths(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layers of a model, each once; attention and recurrent layers as a whole, for they set their parts' widths."""
    seen: set[int] = set()
    waiting = [layer]
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current is not layer and current.built:
            yield current
        if not isinstance(current, layers.MultiHeadAttention | layers.GroupQueryAttention | layers.RNN):
            waiting = list(current._layers) + waiting


def _widths(layer: keras.Layer) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """Each width with the argument that sets it and its shares: how many parameters grow with which power of it."""
    everything = [(layer.count_params(), 1)]  # each parameter of these layers belongs to one output channel
    match layer:
        case layers.MultiHeadAttention():
            queries_and_keys = layer._query_dense.count_params() + layer._key_dense.count_params()
            values = layer._value_dense.count_params() + _size(layer._output_dense.kernel)
            yield "key_dim", layer.key_dim, [(queries_and_keys, 1)]
            yield "value_dim", layer.value_dim, [(values, 1)]
        case layers.GroupQueryAttention():
            bias = layer._output_dense.bias
            yield "head_dim", layer.head_dim, [(layer.count_params() - (0 if bias is None else _size(bias)), 1)]
        case layers.LSTM() | layers.GRU() | layers.SimpleRNN():
            recurrent = _size(layer.cell.recurrent_kernel)
            yield "units", layer.units, [(recurrent, 2), (layer.count_params() - recurrent, 1)]
        case layers.Dense():
            yield "units", layer.units, everything
        case layers.EinsumDense():
            inputs, kernel = layer.equation.split("->")[0].split(",")
            new = {
                letter: size for letter, size in zip(kernel, layer.kernel.shape, strict=True) if letter not in inputs
            }
            grows = [layer.kernel] + ([layer.bias] if set(layer.bias_axes or "") & set(new) else [])
            if new:
                yield "output_shape", math.prod(new.values()), [(_size(variable), 1) for variable in grows]
        case layers.Embedding():
            yield "output_dim", layer.output_dim, everything
        case layers.SeparableConv1D() | layers.SeparableConv2D():
            depthwise = _size(layer.depthwise_kernel)
            yield "filters", layer.filters, [(layer.count_params() - depthwise, 1)]
        case layers.DepthwiseConv1D() | layers.DepthwiseConv2D():
            return
        case (
            layers.Conv1D() | layers.Conv2D() | layers.Conv3D()
            | layers.Conv1DTranspose() | layers.Conv2DTranspose() | layers.Conv3DTranspose()
        ):  # fmt: skip
            groups = getattr(layer, "groups", 1)  # each group is a product of its own
            yield "filters" if groups == 1 else "filters per group", layer.filters // groups, everything


def _size(variable: Any) -> int:
    return math.prod(variable.shape)
