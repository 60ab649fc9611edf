"""Ops that ONNX does not have, or that tf2onnx gets wrong, as expressions of ops that ONNX has.

The expressions are exact but for rounding. log(1 + x) and exp(x) - 1 lose all digits of a small x, because 1 + x rounds
it away. With u = 1 + x as it was rounded, x / (u - 1) is the factor by which the rounding changed x, and log(u) changes
by nearly the same factor, so log(u) * (x / (u - 1)) is right to a few units in the last place. With u = exp(x), so is
(u - 1) * (x / log(u)).

Reference:
    Kahan's method, in Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002, section 1.14.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from itertools import count
from typing import Any, Self

import numpy as np
import onnx

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64


class _Expression:
    """The nodes in place of an op. `inputs` are its inputs; a node has its shape and type unless told otherwise."""

    def __init__(self, context: Any, node: Any) -> None:
        self.context, self.node, self.inputs = context, node, list(node.input)
        self.shape, self.dtype = context.get_shape(node.output[0]), context.get_dtype(node.output[0])
        self.source_dtype = context.get_dtype(node.input[0])
        self.numbers = count(1)
        context.remove_node(node.name)

    def like(self, tensor: str) -> Self:
        """Returns the same for nodes of the shape of a tensor."""
        other = copy(self)
        other.shape = self.context.get_shape(tensor)
        return other

    def constant(self, value: Any, dtype: int | None = None) -> str:
        kind = onnx.helper.tensor_dtype_to_np_dtype(self.dtype if dtype is None else dtype)
        return str(self.context.make_const(self._name("constant"), np.asarray(value, kind)).output[0])

    def __call__(self, kind: str, *inputs: str, dtype: int | None = None, shape: Any = (), **attributes: Any) -> str:
        made = self.context.make_node(
            kind,
            list(inputs),
            attr=attributes,
            name=self._name(kind.lower()),
            shapes=[self.shape if shape == () else shape],
            dtypes=[self.dtype if dtype is None else dtype],
        )
        return str(made.output[0])

    def become(self, result: str) -> None:
        """Makes a tensor the result of the op."""
        shapes, dtypes = [self.shape], [self.dtype]
        self.context.make_node(
            "Identity", [result], name=self.node.name, outputs=[self.node.output[0]], shapes=shapes, dtypes=dtypes
        )

    def _name(self, kind: str) -> str:
        return f"{self.node.name}/{kind}_{next(self.numbers)}"


def _handler(write: Callable[[_Expression], str]) -> Callable[..., None]:
    """Returns a handler of tf2onnx for a function that writes an expression and returns its last tensor."""

    @wraps(write)
    def handle(context: Any, node: Any, name: str, arguments: Sequence[Any]) -> None:
        expression = _Expression(context, node)
        expression.become(write(expression))

    return handle


def _erfc(make: _Expression) -> str:
    """1 - erf(x), in Keras' GELU."""
    return make("Sub", make.constant(1), make("Erf", make.inputs[0]))


def _floor_div(make: _Expression) -> str:
    """Rounds down, as the op says. tf2onnx divides integers towards zero."""
    x, y = make.inputs
    if make.dtype in FLOATS:
        return make("Floor", make("Div", x, y))
    rest = make("Mod", x, y)  # of the divisor's sign
    return make("Div", make("Sub", x, rest), y)


def _floor_mod(make: _Expression) -> str:
    """Returns the rest of rounding down, which has the divisor's sign, as ONNX' Mod of integers."""
    x, y = make.inputs
    if make.dtype not in FLOATS:
        return make("Mod", x, y)
    return make("Sub", x, make("Mul", make("Floor", make("Div", x, y)), y))


def _log1p(make: _Expression) -> str:
    return _log_of_one_and(make, make.inputs[0])


def _log_of_one_and(make: _Expression, x: str) -> str:
    one = make.constant(1)
    rounded = make("Add", x, one)
    value = make("Mul", make("Log", rounded), make("Div", x, make("Sub", rounded, one)))
    infinite = make("Equal", rounded, make.constant(np.inf), dtype=BOOL)
    itself = make("Or", make("Equal", rounded, one, dtype=BOOL), infinite, dtype=BOOL)
    return make("Where", itself, x, value)


def _expm1(make: _Expression) -> str:
    (x,), one = make.inputs, make.constant(1)
    power = make("Exp", x)
    less = make("Sub", power, one)  # exact enough of a large x
    value = make("Mul", less, make("Div", x, make("Log", power)))
    near = make("Where", make("Equal", power, one, dtype=BOOL), x, value)
    return make("Where", make("Less", make("Abs", x), one, dtype=BOOL), near, less)


def _unless_zero(make: _Expression, factor: str, value: str) -> str:
    """Returns a value, or 0 where the factor is 0, even if the value is no number there."""
    zero = make.constant(0)
    return make("Where", make("Equal", factor, zero, dtype=BOOL), zero, value)


def _xlogy(make: _Expression) -> str:
    x, y = make.inputs
    return _unless_zero(make, x, make("Mul", x, make.like(y)("Log", y)))


def _xlog1py(make: _Expression) -> str:
    x, y = make.inputs
    return _unless_zero(make, x, make("Mul", x, _log_of_one_and(make.like(y), y)))


def _xdivy(make: _Expression) -> str:
    x, y = make.inputs
    return _unless_zero(make, x, make("Div", x, y))


def _mul_no_nan(make: _Expression) -> str:
    x, y = make.inputs
    return _unless_zero(make, y, make("Mul", x, y))


def _bucketize(make: _Expression) -> str:
    """The number of boundaries that a value reaches, as Keras' Discretization counts them."""
    boundaries = make.node.get_attr("boundaries").floats
    kind = make.source_dtype if make.source_dtype in FLOATS else onnx.TensorProto.FLOAT
    value = make("Cast", make.inputs[0], dtype=kind, to=kind)
    value = make("Unsqueeze", value, make.constant([-1], INT64), dtype=kind, shape=None)
    return _number(make, make("GreaterOrEqual", value, make.constant(boundaries, kind), dtype=BOOL, shape=None))


def _number(make: _Expression, reached: str) -> str:
    """Returns how often the last axis is true."""
    ones = make("Cast", reached, shape=None, to=make.dtype)
    return make("ReduceSum", ones, make.constant([-1], INT64), keepdims=0)


def _bound(below: str) -> Callable[[_Expression], str]:
    """The number of sorted values below each value, with or without equal ones."""

    def write(make: _Expression) -> str:
        kind = make.source_dtype
        held, value = (
            make("Unsqueeze", each, make.constant([axis], INT64), dtype=kind, shape=None)
            for each, axis in zip(make.inputs, (1, 2), strict=True)
        )
        return _number(make, make(below, held, value, dtype=BOOL, shape=None))

    return write


def _cross(make: _Expression) -> str:
    places = [make.constant(each, INT64) for each in ([1, 2, 0], [2, 0, 1])]
    (a, b), axis = make.inputs, len(make.shape) - 1
    (a1, a2), (b1, b2) = ([make("Gather", each, place, axis=axis) for place in places] for each in (a, b))
    return make("Sub", make("Mul", a1, b2), make("Mul", a2, b1))


def _broadcast_args(make: _Expression) -> str:
    """The shape of the result of two shapes, of which one may be longer."""
    lengths = [make.context.get_shape(each)[0] for each in make.inputs]
    one, other = (
        make("Concat", make.constant([1] * (max(lengths) - length)), each, axis=0) if length < max(lengths) else each
        for each, length in zip(make.inputs, lengths, strict=True)
    )
    return make("Where", make("Equal", one, make.constant(1), dtype=BOOL), other, one)


HANDLERS: dict[str, tuple[Callable[..., None], list[str]]] = {
    op: (_handler(write), [])
    for op, write in {
        "BroadcastArgs": _broadcast_args,
        "Bucketize": _bucketize,
        "Cross": _cross,
        "Erfc": _erfc,
        "Expm1": _expm1,
        "FloorDiv": _floor_div,
        "FloorMod": _floor_mod,
        "Log1p": _log1p,
        "LowerBound": _bound("Less"),
        "MulNoNan": _mul_no_nan,
        "UpperBound": _bound("LessOrEqual"),
        "Xdivy": _xdivy,
        "Xlog1py": _xlog1py,
        "Xlogy": _xlogy,
    }.items()
}
