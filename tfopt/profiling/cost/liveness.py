"""The largest sum of the tensors that exist at the same time while a graph runs.

The operations run in the order of the trace. A tensor exists from the operation that writes it to the last one that
reads it. Some operations write no new memory: those that only pass a tensor on share its memory, and elementwise
operations write over an input that nothing else reads.

Not in the sum: the inputs of the graph, its constants and variables, the work space of kernels, and tensors of unknown
size. Operations that run at the same time on several threads may need more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.profiling.cost.walk import Scope, branches, called, loop, needed_operations

SHARES_INPUT = frozenset({
    "Identity", "IdentityN", "ReadVariableOp", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient",
    "EnsureShape", "CheckNumerics",
})  # fmt: skip
WRITES_NOTHING = frozenset({"Const", "Placeholder", "NoOp", "VarHandleOp", "Shape", "ShapeN"})
OVERWRITES_INPUT = frozenset({
    "Add", "AddV2", "AddN", "BiasAdd", "Cast", "Elu", "EluGrad", "Erf", "Exp", "GreaterEqual", "LeakyRelu", "Log",
    "Log1p", "LogSoftmax", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv", "Reciprocal", "Relu",
    "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid",
    "SigmoidGrad", "Softmax", "Softplus", "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub",
    "Tanh", "TanhGrad", "Xdivy",
})  # fmt: skip


@dataclass(frozen=True, order=True)
class Peak:
    """The tensors at the moment of the largest sum.

    Attributes:
        total_bytes: The sum.
        marked_bytes: The part of it in marked tensors.
    """

    total_bytes: int = 0
    marked_bytes: int = 0

    def plus(self, buffer: Buffer, sign: int) -> Peak:
        """Returns the sums after a buffer was taken (1) or freed (-1)."""
        change = sign * buffer.size
        return Peak(self.total_bytes + change, self.marked_bytes + change * buffer.marked)


@dataclass
class Buffer:
    """A piece of memory, which one or more tensors share. Inputs, constants and variables have the size 0 here."""

    size: int = 0
    marked: bool = False
    readers: int = 0
    is_free: bool = False


def peak_memory(graph: Any, marked: Iterable[Any] = ()) -> Peak:
    """Returns the largest sum of the tensors of a graph that exist at the same time.

    Args:
        graph: The graph of a concrete function.
        marked: Tensors of the graph whose part of the sum is asked for, such as the gradients.
    Example:
        >>> import tensorflow as tf
        >>> product = tf.function(lambda x: tf.nn.relu(x @ x)).get_concrete_function(tf.TensorSpec((100, 100)))
        >>> peak_memory(product.graph).total_bytes
        40000
    """
    return _peak(Scope(graph), frozenset(id(tensor) for tensor in marked))


def _peak(scope: Scope, marked: frozenset[int] = frozenset()) -> Peak:
    operations = needed_operations(scope.graph)
    # The readers of a tensor: operations, and the caller that gets it as an output and keeps it.
    readers = Counter(id(tensor) for operation in operations for tensor in operation.inputs)
    readers.update(id(tensor) for tensor in scope.graph.outputs)
    buffers: dict[int, Buffer] = {}
    live, peak = Peak(), Peak()
    for operation in operations:
        inputs = [buffers[id(tensor)] for tensor in operation.inputs]
        for place, tensor in enumerate(operation.outputs):
            buffer = _shared(operation, place, inputs) or _overwritten(operation, tensor, inputs)
            if buffer is None:
                buffer = Buffer(_size(operation, tensor, scope))
                live = live.plus(buffer, 1)
            if id(tensor) in marked and not buffer.marked:
                live = live.plus(buffer, -1)
                buffer.marked = True
                live = live.plus(buffer, 1)
            buffer.readers += readers[id(tensor)]
            buffers[id(tensor)] = buffer
        inside = _inside(operation, scope)
        peak = max(peak, Peak(live.total_bytes + inside.total_bytes, live.marked_bytes + inside.marked_bytes))
        for buffer in inputs:
            buffer.readers -= 1
        for buffer in (*inputs, *(buffers[id(tensor)] for tensor in operation.outputs)):
            if buffer.readers == 0 and not buffer.is_free:
                live = live.plus(buffer, -1)
                buffer.is_free = True
    return peak


def _shared(operation: Any, place: int, inputs: Sequence[Buffer]) -> Buffer | None:
    return inputs[place] if operation.type in SHARES_INPUT else None


def _overwritten(operation: Any, tensor: Any, inputs: Sequence[Buffer]) -> Buffer | None:
    """Returns the memory of an input that this operation alone still reads, and that has the size of the output."""
    if operation.type not in OVERWRITES_INPUT:
        return None
    size = _bytes(tensor)
    fitting = (buffer for buffer in inputs if buffer.size == size and buffer.readers == 1)
    return next(fitting, None) if size else None


def _size(operation: Any, tensor: Any, scope: Scope) -> int:
    if operation.type in WRITES_NOTHING:
        return 0
    if tensor.dtype == tf.variant:
        return _list_bytes(operation, tensor, scope)
    return _bytes(tensor)


def _bytes(tensor: Any) -> int:
    """Returns the size of a tensor; 0 for a tensor of unknown size, for a variable and for a list of tensors."""
    known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return math.prod(tensor.shape) * tensor.dtype.size if known else 0


def _list_bytes(operation: Any, tensor: Any, scope: Scope) -> int:
    """Returns the size of a list of tensors: that of the tensor it is made from, or what a loop adds to it."""
    if operation.type == "TensorListFromTensor":
        return _bytes(operation.inputs[0])
    repeated = loop(operation, scope)
    if repeated is None:
        return 0
    result = repeated.body.graph.outputs[tensor.value_index].op
    while result.type == "Identity":
        result = result.inputs[0].op
    if result.type not in ("TensorListPushBack", "TensorListSetItem"):
        return 0
    added = result.inputs[-1]
    return 0 if _is_variable(added) else (repeated.rounds or 1) * _bytes(added)


def _is_variable(tensor: Any) -> bool:
    """Returns whether a tensor shares the memory of a variable: a loop keeps the weights for its gradient."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return bool(operation.type == "ReadVariableOp")


def _inside(operation: Any, scope: Scope) -> Peak:
    """Returns the peak inside the functions that an operation calls, besides its inputs and outputs."""
    function, repeated = called(operation, scope), loop(operation, scope)
    inner = [*branches(operation, scope), *([function] if function else []), *([repeated.body] if repeated else [])]
    return max((_peak(each) for each in inner), default=Peak())
