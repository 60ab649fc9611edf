"""Operations on each value alone, or on the values at the same place of several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import activations, layers

from tfopt.models.layers import LayerScale, LearnedPositions
from tfopt.pruning.channels.call import Axis, Fixed, LayerCall, Rule, Tensor

# Functions of one value. Others, such as softmax, compute with all values of an axis.
OF_ONE_VALUE = {
    activations.get(name)
    for name in (
        "celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu",
        "linear", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_shrink", "softplus",
        "softsign", "sparse_plus", "sparse_sigmoid", "squareplus", "tanh", "tanh_shrink", "threshold",
    )
}  # fmt: skip


def activated(call: LayerCall, axis: Axis, activation: Any) -> Axis:
    """Returns the axis of a layer's output after its activation function."""
    if activation is None or activation in OF_ONE_VALUE or type(activation) in ELEMENTWISE:
        return axis
    name = getattr(activation, "__name__", type(activation).__name__)
    return call.fix(axis, f"has the activation {name!r}, which may compute with all values of the axis")


def unchanged(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """The output has the axes of the first input."""
    return [call.x.axes]


def activation(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    x = call.x
    return [(*x.axes[:-1], activated(call, x.channels, call.operation.activation))]


def broadcast(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Values at the same place of all inputs. A size of 1 is repeated along the axis of the others."""
    args, _ = call.arguments
    operands = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if not any(isinstance(each, Tensor) for each in operands):  # they are given by name
        operands = call.tensors
    given = [each if isinstance(each, Tensor) else _constant(np.shape(each)) for each in operands]
    rank = max(len(tensor.shape) for tensor in given)
    return [tuple(_broadcast_axis(call, given, number) for number in range(rank, 0, -1))]


def _constant(shape: tuple[int, ...]) -> Tensor:
    return Tensor(shape, (Fixed("it meets a constant"),) * len(shape), shape)


def _broadcast_axis(call: LayerCall, given: Sequence[Tensor], number: int) -> Axis:
    """Returns the output's axis, counted from the last, which is 1."""
    present = [(tensor.shape[-number], tensor.axes[-number]) for tensor in given if number <= len(tensor.shape)]
    full = [axis for size, axis in present if size != 1]
    if not full:
        full = [axis for _, axis in present]
    else:
        for size, axis in present:
            if size == 1:
                call.fix(axis, "repeats this one channel for all others")
    return call.same(full)


def where(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    return broadcast(call) if len(call.arguments[0]) == 3 else call.fix_all("is not followed in this form")


def softmax(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    x = call.x
    axis = getattr(call.operation, "axis", -1)
    over = {each % len(x.shape) for each in ([axis] if isinstance(axis, int) else axis)}
    return [
        tuple(
            call.fix(each, "computes with all values of the axis") if number in over else each
            for number, each in enumerate(x.axes)
        )
    ]


def prelu(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Each trained slope belongs to an index of each axis that is not shared."""
    layer, x = call.operation, call.x
    for number, axis in enumerate(x.axes[1:]):
        if layer.alpha.shape[number] != 1 or x.shape[number + 1] == 1:
            call.follow(layer.alpha, axis, at=number)
    return [x.axes]


def rescaling(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    numbers = np.ndim(call.operation.scale) == 0 == np.ndim(call.operation.offset)
    return unchanged(call) if numbers else call.fix_all("has a number for each channel")


def _vectors(name: str) -> Rule:
    """Returns the rule of a layer that scales all positions by a trained vector, or adds one of its own to each."""

    def follow(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
        call.follow(getattr(call.operation, name), call.x.channels)
        return [call.x.axes]

    return follow


ELEMENTWISE: dict[type, Rule] = {
    **dict.fromkeys(
        (
            layers.ActivityRegularization, layers.AlphaDropout, layers.Dropout, layers.ELU, layers.GaussianDropout,
            layers.GaussianNoise, layers.Identity, layers.LeakyReLU, layers.Masking, layers.ReLU,
            layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D,
        ),
        unchanged,
    ),
    **dict.fromkeys(
        (layers.Add, layers.Average, layers.Maximum, layers.Minimum, layers.Multiply, layers.Subtract), broadcast
    ),
    layers.Activation: activation,
    layers.Softmax: softmax,
    layers.PReLU: prelu,
    layers.Rescaling: rescaling,
    LayerScale: _vectors("factors"),
    LearnedPositions: _vectors("positions"),
}  # fmt: skip

OPERATIONS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "Absolute", "Cast", "Celu", "Ceil", "Clip", "ConvertToTensor", "Cos", "Elu", "Erf", "Exp", "Expm1",
            "Floor", "Gelu", "HardSigmoid", "HardSilu", "HardTanh", "Identity", "LeakyRelu", "Log", "Log1p",
            "LogSigmoid", "LogicalNot", "Mish", "Negative", "Reciprocal", "Relu", "Relu6", "Round", "Rsqrt", "Selu",
            "Sigmoid", "Sign", "Silu", "Sin", "Softplus", "Softsign", "Sqrt", "Square", "StopGradient", "Tanh",
            "TanhShrink", "ZerosLike", "OnesLike",
        ),
        unchanged,
    ),
    **dict.fromkeys(
        (
            "Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Power", "Mod", "Equal",
            "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
        ),
        broadcast,
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    "Where": where,
}  # fmt: skip
