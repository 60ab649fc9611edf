"""Finds the layers whose width does not fit the tiles that tensor cores multiply.

In half precision, a width that is not a multiple of 8 is padded, or the product runs without tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import direct_layers, layers_inside, output_projection
from tfopt.errors import ConfigError
from tfopt.models.structure import layer_path, output_layers
from tfopt.report import Record


@dataclass(frozen=True, kw_only=True)
class Misalignment(Record):
    """A width that is not a multiple of the tile of the tensor cores.

    Attributes:
        name: Path of the layer.
        kind: Class of the layer.
        what: The argument that sets the width, for example "units".
        width: Value of that argument.
        padded: The next multiple.
        extra_parameters_percent: Growth of the layer's own parameters with the padded width, in per cent.
        is_output: Whether the width is an output of the model, which the task fixes.
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
        output = "; an output: pad it only if the loss ignores the padding" if self.is_output else ""
        return f"{self.name} ({self.kind}): {change}{output}"


@dataclass(frozen=True, kw_only=True)
class Alignment(Record):
    """The layers without tensor-core alignment, and the cost of padding them.

    Attributes:
        multiple: Number of which a width should be a multiple.
        layers: Number of widths checked.
        rows: The widths that are not a multiple.
    """

    multiple: int
    layers: int
    rows: tuple[Misalignment, ...]

    def __str__(self) -> str:
        head = f"alignment: {len(self.rows)} of {self.layers} widths are not a multiple of {self.multiple}"
        return "\n".join([head, *(f"  {row}" for row in self.rows)])


def tensor_core_alignment(model: keras.Model, multiple: int = 8) -> Alignment:
    """Lists the layers whose output width is not a multiple of the tile of the tensor cores.

    The channels of the model's input are data and are not checked. Depthwise convolutions use no tensor cores.

    Args:
        model: A built model. Layers inside layers are checked too.
        multiple: 8 for half precision, 16 for int8.
    Raises:
        ConfigError: The multiple is not a whole number of at least 1.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(30, name="a"), keras.layers.Dense(10)])
        >>> tensor_core_alignment(model).rows[0].padded
        32
    """
    check_keras_3(model)
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ConfigError(
            f"multiple must be a whole number of at least 1. Received: multiple={multiple!r}. "
            "Use 8 for half precision, 16 for int8."
        )
    outputs = {id(part) for layer in output_layers(model) for part in layers_inside(layer)}
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
    """Yields each layer of a model once. Attention and recurrent layers set the widths of the layers inside them."""
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
            waiting = direct_layers(current) + waiting


def _widths(layer: keras.Layer) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """Yields each width: its argument, its value, and how many parameters grow with which power of the width."""
    everything = [(layer.count_params(), 1)]  # each parameter of these layers belongs to one output channel
    match layer:
        case layers.MultiHeadAttention():
            queries_and_keys = layer.query_dense.count_params() + layer.key_dense.count_params()
            values = layer.value_dense.count_params() + _size(layer.output_dense.kernel)
            yield "key_dim", layer.key_dim, [(queries_and_keys, 1)]
            yield "value_dim", layer.value_dim, [(values, 1)]
        case layers.GroupQueryAttention():
            bias = output_projection(layer).bias
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
            groups = getattr(layer, "groups", 1)  # each group is a separate product
            yield "filters" if groups == 1 else "filters per group", layer.filters // groups, everything


def _size(variable: Any) -> int:
    return math.prod(variable.shape)
