"""The bytes that the operations of a graph move between memory and processor, and the kernels that a device starts.

Assumption: each operation reads its inputs once and writes its outputs once, and no value stays in a cache from one
operation to the next. There are two estimates.

- Unfused: every operation is a kernel of its own, as TensorFlow runs them without XLA.
- Fused: as XLA fuses. The result of an elementwise operation is written only if something else reads it: a matrix
  product, a convolution, another kernel, or the caller. Otherwise each reader computes it again from what is in memory.
  Reductions are the ends of such chains. Results that are computed from the same values at the same point of the graph
  come from one kernel, which reads these once. Matrix products, convolutions and other operations stay kernels of their
  own.

The level of an operation is the number of kernels before it on the longest path. Only results of one level come from
one kernel. Both are estimates. XLA decides by the device whether a fusion pays, and kernels read some inputs more than
once.

Reference:
    Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.profiling.cost.flops import multiply_adds
from tfopt.profiling.cost.memory import OVERWRITES_INPUT, SHARES_INPUT, WRITES_NOTHING, tensor_bytes
from tfopt.profiling.cost.walk import Scope, inner, needed_operations
from tfopt.report import Record

# Operations with one result for each value, besides those that may write over their input. Softmax is none of them.
ELEMENTWISE = (OVERWRITES_INPUT - {"Softmax", "LogSoftmax", "AddN"}) | {
    "AddN", "Abs", "BroadcastTo", "Ceil", "ClipByValue", "Equal", "Erfc", "Expm1", "Floor", "FloorDiv", "FloorMod",
    "Greater", "IsFinite", "IsNan", "LeakyReluGrad", "Less", "LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr",
    "DivNoNan", "NotEqual", "OnesLike", "Pad", "PadV2", "Round", "Sign", "Softsign", "SoftsignGrad", "Tile", "Xlogy",
    "ZerosLike", "AssignAddVariableOp", "AssignSubVariableOp",
}  # fmt: skip
REDUCTIONS = frozenset({"All", "Any", "BiasAddGrad", "Max", "Mean", "Min", "Prod", "Sum"})
# They pass memory on, or only look at a shape. A variable takes over the memory of the value that is assigned to it.
MOVES_NOTHING = SHARES_INPUT | WRITES_NOTHING | {
    "Assert", "AssignVariableOp", "BroadcastGradientArgs", "InvertPermutation", "IteratorGetNext", "Rank", "Size",
    "TensorListElementShape", "TensorListFromTensor", "TensorListGetItem", "TensorListLength", "TensorListReserve",
    "VariableShape",
}  # fmt: skip
LOOKS_ONLY = MOVES_NOTHING - {"AssignVariableOp"}
# Of a table, or of the whole, they read only what they return.
READS_A_PART = frozenset({"Gather", "GatherNd", "GatherV2", "ResourceGather", "Slice", "Split", "StridedSlice"})
# They read the variable, read the value and write the variable.
UPDATES = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub"})
# Two results that share a smaller value, such as the learning rate, are not computed in one kernel for that.
SHARED_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """One kernel: an operation, or several that are fused."""

    name: str  # name of the operation; of a fusion, of its last operation
    kinds: tuple[str, ...]  # the kinds of its operations; of a fusion, of those whose results it writes
    multiply_adds: int  # multiply-adds of one execution
    moved_bytes: int  # bytes that one execution reads and writes
    dtype: str  # floating-point type in which it computes; "" without one
    executions: int = 1  # number of executions in one pass: the rounds of the loops around it


def kernels(graph: Any, *, fused: bool) -> list[Kernel]:
    """Returns the kernels that a graph starts, in the order of the trace.

    An operation in a loop counts for each round; of several branches, the one that moves the most bytes counts.
    Operations on single integers, which TensorFlow keeps on the host, are no kernels. Operations whose size is unknown
    move nothing.

    Args:
        graph: The graph of a concrete function.
        fused: Whether chains of elementwise operations are one kernel, as under XLA.
    Example:
        >>> chain = tf.function(lambda x: tf.nn.relu(x * 2.0 + 1.0)).get_concrete_function(tf.TensorSpec((1000,)))
        >>> [kernel.moved_bytes for kernel in kernels(chain.graph, fused=False)]
        [8004, 8004, 8000]
        >>> [kernel.moved_bytes for kernel in kernels(chain.graph, fused=True)]
        [8008]
    """
    return list(_kernels(Scope(graph), 1, fused))


def moved_bytes(found: Sequence[Kernel]) -> int:
    """Returns the bytes that kernels move in all their executions.

    Example:
        >>> moved_bytes([Kernel(name="a", kinds=("Add",), multiply_adds=0, moved_bytes=12, dtype="", executions=3)])
        36
    """
    return sum(kernel.moved_bytes * kernel.executions for kernel in found)


def _kernels(scope: Scope, executions: int, fused: bool) -> Iterator[Kernel]:
    operations = needed_operations(scope.graph)
    levels: dict[Any, int] = {}
    for operation in operations:
        before = max((levels[tensor.op] for tensor in operation.inputs), default=0)
        graphs, rounds = inner(operation, scope)
        inside = [list(_kernels(graph, executions * (rounds or 1), fused)) for graph in graphs]
        found = max(inside, key=moved_bytes, default=[])
        is_kernel = not found and _is_kernel(operation)
        # The reader of an elementwise result may be in the same kernel; the reader of any other result cannot.
        ends = bool(found) or (is_kernel and operation.type not in ELEMENTWISE)
        levels[operation] = before + ends
        yield from found
        if is_kernel and not (fused and operation.type in ELEMENTWISE | REDUCTIONS):
            yield _kernel([operation], _moved_alone(operation), executions)
    if fused:
        for members, moved in _Fusions(scope, operations, levels).found():
            yield _kernel(members, moved, executions)


def _kernel(members: Sequence[Any], moved: int, executions: int) -> Kernel:
    tensors = (tensor for operation in members for tensor in (*operation.inputs, *operation.outputs))
    return Kernel(
        name=members[-1].name,
        kinds=tuple(operation.type for operation in members),
        multiply_adds=sum(multiply_adds(operation) or 0 for operation in members),
        moved_bytes=moved,
        dtype=next((tensor.dtype.name for tensor in tensors if tensor.dtype.is_floating), ""),
        executions=executions,
    )


def _is_kernel(operation: Any) -> bool:
    if operation.type in MOVES_NOTHING:
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return any(each.dtype.is_floating or tensor_bytes(each) > 64 for each in tensors if each.dtype != tf.resource)


def _moved_alone(operation: Any) -> int:
    written = sum(tensor_bytes(tensor) for tensor in operation.outputs)
    if operation.type in UPDATES:
        return 3 * tensor_bytes(operation.inputs[-1])
    if operation.type in READS_A_PART:
        return 2 * written
    return written + sum(tensor_bytes(tensor) for tensor in operation.inputs)


class _Fusions:
    """The fusions of one graph: the operations whose results are written, by kernel.

    The operations come each after those it needs. A kernel's own level is that of its readers.
    """

    def __init__(self, scope: Scope, operations: Sequence[Any], levels: dict[Any, int]) -> None:
        self._needed = set(operations)
        self._levels = levels
        self._results = {id(_source(tensor)) for tensor in scope.graph.outputs}
        # Each in the order of the graph, so that the values that an operation is computed from are known before it.
        self._written: dict[Any, dict[int, Any]] = {}
        self._values: dict[Any, dict[int, Any]] = {}
        for operation in operations:
            if operation.type not in ELEMENTWISE | REDUCTIONS or not _is_kernel(operation):
                continue
            values: dict[int, Any] = {}
            for tensor in map(_source, operation.inputs):
                if tensor.op in self._values and tensor.op not in self._written:
                    values |= self._values[tensor.op]
                else:
                    values[id(tensor)] = tensor
            self._values[operation] = values
            if operation.type in REDUCTIONS | UPDATES or self._is_read(operation):
                self._written[operation] = values

    def found(self) -> Iterator[tuple[list[Any], int]]:
        """Yields the operations whose results a kernel writes, and the bytes that it moves."""
        groups: dict[Any, Any] = {operation: operation for operation in self._written}

        def root(operation: Any) -> Any:
            while groups[operation] is not operation:
                operation = groups[operation]
            return operation

        readers: dict[tuple[int, int], Any] = {}
        for operation, values in self._written.items():
            level = self._levels[operation] - (operation.type in REDUCTIONS)
            outputs = {id(tensor): tensor for tensor in operation.outputs}
            for key, tensor in {**values, **outputs}.items():
                if tensor_bytes(tensor) >= SHARED_BYTES:
                    groups[root(operation)] = root(readers.setdefault((key, level), operation))
        members: dict[Any, list[Any]] = {}
        for operation in self._written:
            members.setdefault(root(operation), []).append(operation)
        for each in members.values():
            yield each, self._moved(each)

    def _moved(self, members: Sequence[Any]) -> int:
        inside = set(members)
        values = {key: tensor for each in members for key, tensor in self._written[each].items()}
        moved = sum(tensor_bytes(tensor) for tensor in values.values() if tensor.op not in inside)
        for operation in members:  # an update reads and writes its variable
            moved += 2 * tensor_bytes(operation.inputs[-1]) if operation.type in UPDATES else 0
            moved += sum(tensor_bytes(tensor) for tensor in operation.outputs)
        return moved

    def _is_read(self, operation: Any) -> bool:
        """Returns whether something else than fused operations reads a result."""
        waiting = list(operation.outputs)
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._results:
                return True
            for reader in tensor.consumers():
                if reader.type in SHARES_INPUT:
                    waiting += reader.outputs
                elif reader in self._needed and reader.type not in ELEMENTWISE | REDUCTIONS | LOOKS_ONLY:
                    return True
        return False


def _source(tensor: Any) -> Any:
    """Returns the tensor in whose memory a tensor lies."""
    while tensor.op.type in SHARES_INPUT and len(tensor.op.inputs) > tensor.value_index:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
