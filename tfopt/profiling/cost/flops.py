"""The multiply-adds of a model: the multiplications with an addition of each operation of its graph.

Matrix products, convolutions and their gradients have them. A convolution multiplies each value of its output with one
filter, so it has outputs * filter values / output channels multiply-adds. A product [m, k] x [k, n] has m * k * n. An
einsum of two operands has the product of the sizes of all its letters. The gradient of a convolution for its input, or
for its filter, has as many as the convolution.

TensorFlow computes a dilated convolution on blocks (SpaceToBatchND, Conv2D, BatchToSpaceND). Outputs that it computes
in the padding of the blocks, and then cuts off, do not count.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.profiling.cost.trace import checks_open_size, forward_graph, input_specs
from tfopt.profiling.cost.walk import Scope, inner, needed_operations
from tfopt.report import Record
from tfopt.report.sheet import Sheet, Shown, Table

# Gates of each cell of a recurrent layer that cuDNN computes.
GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


def multiply_adds(operation: Any) -> int | None:
    """Returns the multiply-adds of an operation; None if a shape is unknown. Other kinds of operations have none.

    Example:
        >>> import tensorflow as tf
        >>> product = tf.function(tf.matmul).get_concrete_function(tf.TensorSpec((2, 3)), tf.TensorSpec((3, 4)))
        >>> [multiply_adds(operation) for operation in product.graph.get_operations() if operation.type == "MatMul"]
        [24]
    """
    count = COUNTED.get(operation.type)
    if count is None:
        return 0
    try:
        return count(operation)
    except (TypeError, ValueError):  # TensorFlow raises these for an unknown rank or size
        return None


def _values(tensor: Any) -> int:
    return math.prod(int(size) for size in tensor.shape)


def _filter_values(shape: Any) -> int:
    """Returns the values of a convolution's filter that one value of the output needs: all but the output channels."""
    return math.prod(int(size) for size in shape[:-1])


def _depthwise_values(shape: Any) -> int:
    """Returns the same for a depthwise filter [height, width, channels, multiplier]."""
    return int(shape[0]) * int(shape[1])


def _matmul(operation: Any) -> int:
    transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    return _values(operation.outputs[0]) * int(operation.inputs[0].shape[-2 if transposed else -1])


def _int8_matmul(operation: Any) -> int:
    return _values(operation.outputs[0]) * int(operation.inputs[0].shape[-1])


def _einsum(operation: Any) -> int:
    tensors = (*operation.inputs, *operation.outputs)
    return einsum_multiply_adds(operation.get_attr("equation").decode(), [tensor.shape for tensor in tensors])


def einsum_multiply_adds(equation: str, shapes: Sequence[Any]) -> int:
    """Returns the multiply-adds of an einsum from the shapes of its operands and of its result.

    Example:
        >>> einsum_multiply_adds("bij,jk->bik", [(2, 3, 4), (4, 5), (2, 3, 5)])
        120
    """
    if len(shapes) < 3:
        return 0  # a transposition or a sum
    terms, result = equation.split("->")
    sizes: dict[str, int] = {}
    for term, shape in zip((*terms.split(","), result), shapes, strict=True):
        sizes |= _letters(term, [int(size) for size in shape])
    return math.prod(sizes.values())


def _letters(term: str, sizes: list[int]) -> dict[str, int]:
    """Returns the size of each letter. The dimensions of an ellipsis are numbered from the last."""
    before, _, after = term.partition("...")
    hidden = len(sizes) - len(before) - len(after)
    names = [*before, *(f"...{number}" for number in range(hidden, 0, -1)), *after]
    return dict(zip(names, sizes, strict=True))


def _used_values(output: Any) -> int:
    """Returns the values of a convolution's output that remain."""
    users = output.consumers()
    blocks = len(users) == 1 and users[0].type == "BatchToSpaceND"
    return _values(users[0].outputs[0] if blocks else output)


def _gradient_values(gradient: Any) -> int:
    """Returns the same for the gradient of the output."""
    return _values(gradient.op.inputs[0] if gradient.op.type == "SpaceToBatchND" else gradient)


def _forward(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda operation: _used_values(operation.outputs[0]) * filter_values(operation.inputs[1].shape)


def _of_input(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    """The inputs are the sizes of the input, the filter and the gradient. A transposed convolution is the same op."""
    return lambda operation: _gradient_values(operation.inputs[2]) * filter_values(operation.inputs[1].shape)


def _of_filter(filter_values: Callable[[Any], int]) -> Callable[[Any], int]:
    """The inputs are the input, the sizes of the filter and the gradient."""
    return lambda operation: _gradient_values(operation.inputs[2]) * filter_values(operation.outputs[0].shape)


def _cudnn_rnn(operation: Any) -> int:
    """Counts the layers of a recurrent network [time, batch, features], of one or two directions."""
    time, batch, features = (int(size) for size in operation.inputs[0].shape)
    units_of, units = operation.inputs[1].shape[0], int(operation.inputs[1].shape[-1])
    directions = 2 if operation.get_attr("direction") == b"bidirectional" else 1
    gates = GATES[re.sub(r"\W", "", operation.get_attr("rnn_mode").decode())]
    widths = [features] + [directions * units] * (int(units_of) // directions - 1)
    return time * batch * directions * gates * sum(units * (width + units) for width in widths)


COUNTED: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "Conv2D": _forward(_filter_values),
    "Conv3D": _forward(_filter_values),
    "DepthwiseConv2dNative": _forward(_depthwise_values),
    "Conv2DBackpropInput": _of_input(_filter_values),
    "Conv3DBackpropInputV2": _of_input(_filter_values),
    "DepthwiseConv2dNativeBackpropInput": _of_input(_depthwise_values),
    "Conv2DBackpropFilter": _of_filter(_filter_values),
    "Conv3DBackpropFilterV2": _of_filter(_filter_values),
    "DepthwiseConv2dNativeBackpropFilter": _of_filter(_depthwise_values),
    # oneDNN's int8 kernels, which an exported graph has.
    "_FusedQuantizedConv2D": _forward(_filter_values),
    "_FusedQuantizedDepthwiseConv2D": _forward(_depthwise_values),
    "_QuantizedMatMul": _int8_matmul,
    "CudnnRNN": _cudnn_rnn,
    "CudnnRNNV2": _cudnn_rnn,
    "CudnnRNNV3": _cudnn_rnn,
}


@dataclass(frozen=True, kw_only=True)
class OperationCount(Record):
    """An operation of a graph with its multiply-adds."""

    name: str  # name of the operation
    kind: str  # kind of the operation, for example "Conv2D"
    multiply_adds: int  # multiply-adds of one execution
    executions: int = 1  # number of executions in one pass: the rounds of the loops around the operation

    @property
    def total(self) -> int:
        return self.multiply_adds * self.executions


@dataclass(frozen=True, kw_only=True)
class FlopCount(Record, Shown):
    """The multiply-adds of a graph, with the operations that have them.

    Attributes:
        operations: The operations with multiply-adds.
        uncounted: What could not be counted, with the reason. The sum is too small if there is anything here.
    """

    operations: Sequence[OperationCount]
    uncounted: Sequence[str] = ()

    @property
    def multiply_adds(self) -> int:
        """Sum of the multiply-adds. Publications call this number MACs, and often FLOPs."""
        return sum(operation.total for operation in self.operations)

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication with its addition counts as 2."""
        return 2 * self.multiply_adds

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Sum of the multiply-adds for each kind of operation, the largest first."""
        sums: Counter[str] = Counter()
        for operation in self.operations:
            sums[operation.kind] += operation.total
        return dict(sums.most_common())

    def _sheet(self) -> Sheet:
        counted = Table(rows=[(kind, f"{count:,}") for kind, count in self.by_kind.items()], figures={1})
        uncounted = Table(rows=[("not counted", reason) for reason in self.uncounted])
        return Sheet(title=f"{self.multiply_adds:,} multiply-adds", tables=[counted, uncounted])


def count_flops(
    model: keras.Model, *, batch_size: int = 1, open_size: int | None = None, inputs: Any = None
) -> FlopCount:
    """Counts the multiply-adds of a forward pass in inference.

    The model is traced, not run. Matrix products and convolutions count, as in publications. Elementwise operations,
    reductions, normalization and pooling do not. An operation in a loop counts as often as the loop has rounds. Of
    several branches, the most expensive one counts.

    Args:
        model: A built Keras model: functional, Sequential or subclassed.
        batch_size: Number of examples.
        open_size: Size of the open dimensions besides the batch, such as the length of a sequence.
        inputs: An array or `tf.TensorSpec` for each input, for a subclassed model of several inputs.
    Returns: The count, with `multiply_adds` and `flops`.
    Raises:
        ConfigError: The model has an open dimension, and open_size is None or does not fit the layers.
        UnsupportedModelError: The model is not built, or its inputs are unknown.
    Example:
        >>> model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Conv2D(8, 3, padding="same")])
        >>> count_flops(model).multiply_adds == 32 * 32 * 8 * (3 * 3 * 3)
        True
    """
    specs = input_specs(model, batch_size, open_size, inputs)
    with checks_open_size(open_size):
        graph = forward_graph(model, specs)
    return count_graph(graph)


def count_graph(graph: Any) -> FlopCount:
    """Counts the multiply-adds of the graph of a concrete function, for example of a training step.

    Example:
        >>> import tensorflow as tf
        >>> square = tf.function(lambda x: x @ x).get_concrete_function(tf.TensorSpec((4, 4)))
        >>> count_graph(square.graph).multiply_adds
        64
    """
    uncounted: list[str] = []
    return FlopCount(operations=tuple(_count(Scope(graph), 1, uncounted)), uncounted=tuple(dict.fromkeys(uncounted)))


def _count(scope: Scope, executions: int, uncounted: list[str]) -> Iterator[OperationCount]:
    for operation in needed_operations(scope.graph):
        graphs, rounds = inner(operation, scope)
        if graphs:
            inside = [list(_count(graph, executions * (rounds or 1), uncounted)) for graph in graphs]
            most = max(inside, key=lambda counts: sum(count.total for count in counts))
            if rounds is None and most:
                uncounted.append(f"{operation.name}: the number of rounds is known only in the run; one round counts")
            yield from most
            continue
        count = multiply_adds(operation)
        if count is None:
            uncounted.append(f"{operation.name} ({operation.type}): a shape is unknown")
        elif count:
            yield OperationCount(name=operation.name, kind=operation.type, multiply_adds=count, executions=executions)
