"""The bytes that the operations of a graph move between memory and processor, and the kernels that a device starts.

Assumption: each operation reads its inputs once and writes its outputs once, and no value stays in a cache from one
operation to the next. There are two estimates.

- Unfused: every operation is a kernel of its own, as TensorFlow runs them without XLA.
- Fused: elementwise operations in a chain are one kernel, also with the reductions at its end, as XLA fuses them. Only
  the values that leave the kernel are written, and what enters it is read once. Matrix products, convolutions and other
  operations stay kernels of their own.

A chain ends where a value has to go through another kernel first: the level of an operation is the number of kernels
before it on the longest path, and only operations of one level fuse. An elementwise operation at the begin of a chain
moves up to the level of its first reader, as XLA computes cheap operations where they are read. Both are estimates. XLA
decides by the device whether a fusion pays, and kernels read some inputs more than once.

Reference:
    Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures", CACM 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.profiling.cost.liveness import OVERWRITES_INPUT, SHARES_INPUT, WRITES_NOTHING
from tfopt.profiling.cost.multiply_adds import multiply_adds
from tfopt.profiling.cost.walk import Scope, branches, called, loop, needed_operations
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
# Of a table, or of the whole, they read only what they return.
READS_A_PART = frozenset({"Gather", "GatherNd", "GatherV2", "ResourceGather", "Slice", "Split", "StridedSlice"})
# They read the variable, read the value and write the variable.
UPDATES = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub"})


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """One kernel: an operation, or several that are fused.

    Attributes:
        name: Name of the operation; of a fusion, of its last operation.
        kinds: The kinds of its operations.
        multiply_adds: Multiply-adds of one execution.
        moved_bytes: Bytes that one execution reads and writes.
        dtype: Floating-point type in which it computes; "" without one.
        executions: Number of executions in one pass: the rounds of the loops around it.
    """

    name: str
    kinds: tuple[str, ...]
    multiply_adds: int
    moved_bytes: int
    dtype: str
    executions: int = 1


@dataclass
class _Part:
    """An operation of a graph while kernels are formed."""

    operation: Any
    multiply_adds: int
    level: int
    group: int


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
    parts: list[_Part] = []
    levels: dict[Any, int] = {}
    for operation in needed_operations(scope.graph):
        before = max((levels[tensor.op] for tensor in operation.inputs), default=0)
        inner = list(_inside(operation, scope, executions, fused))
        is_kernel = not inner and _is_kernel(operation)
        # The reader of an elementwise result may be in the same kernel; the reader of any other result cannot.
        ends = bool(inner) or (is_kernel and operation.type not in ELEMENTWISE)
        levels[operation] = before + ends
        yield from inner
        if is_kernel:
            parts.append(_Part(operation, multiply_adds(operation) or 0, before, len(parts)))
    if fused:
        _move_up(parts)
        _join(parts)
    yield from _formed(parts, executions, scope)


def _inside(operation: Any, scope: Scope, executions: int, fused: bool) -> Iterator[Kernel]:
    function = called(operation, scope)
    if function is not None:
        yield from _kernels(function, executions, fused)
    elif choices := branches(operation, scope):
        yield from max((list(_kernels(choice, executions, fused)) for choice in choices), key=moved_bytes)
    elif repeated := loop(operation, scope):
        yield from _kernels(repeated.body, executions * (repeated.rounds or 1), fused)


def _is_kernel(operation: Any) -> bool:
    if operation.type in MOVES_NOTHING:
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return any(each.dtype.is_floating or _bytes(each) > 64 for each in tensors if each.dtype != tf.resource)


def _move_up(parts: Sequence[_Part]) -> None:
    """Gives an elementwise operation that begins a chain the level of its first reader."""
    of = {part.operation: part for part in parts}
    for part in reversed(parts):
        if part.operation.type not in ELEMENTWISE or part.operation.type in UPDATES:
            continue
        before = [of.get(_source(tensor).op) for tensor in part.operation.inputs]
        if any(each and each.level == part.level and each.operation.type in ELEMENTWISE for each in before):
            continue
        readers = [of.get(reader) for tensor in part.operation.outputs for reader in _readers(tensor)]
        if readers and all(readers):
            part.level = max(part.level, min(each.level for each in readers if each))


def _readers(tensor: Any) -> Iterator[Any]:
    """Yields the operations that read a tensor, also where its memory is passed on."""
    for reader in tensor.consumers():
        if reader.type in SHARES_INPUT and reader.outputs:
            yield from _readers(reader.outputs[0])
        else:
            yield reader


def _join(parts: Sequence[_Part]) -> None:
    """Gives the parts that fuse the same group: a chain of elementwise operations of one level, and its reductions."""
    places = {part.operation: place for place, part in enumerate(parts)}
    for part in parts:
        if part.operation.type not in ELEMENTWISE and part.operation.type not in REDUCTIONS:
            continue
        for tensor in part.operation.inputs:
            place = places.get(_source(tensor).op)
            other = None if place is None else parts[place]
            if other is None or other.operation.type not in ELEMENTWISE or other.level != part.level:
                continue
            first, second = _root(parts, part.group), _root(parts, other.group)
            parts[max(first, second)].group = min(first, second)


def _root(parts: Sequence[_Part], group: int) -> int:
    while parts[group].group != group:
        group = parts[group].group
    return group


def _source(tensor: Any) -> Any:
    """Returns the tensor in whose memory a tensor lies."""
    while tensor.op.type in SHARES_INPUT and len(tensor.op.inputs) > tensor.value_index:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _formed(parts: Sequence[_Part], executions: int, scope: Scope) -> Iterator[Kernel]:
    groups: dict[int, list[_Part]] = {}
    for part in parts:
        groups.setdefault(_root(parts, part.group), []).append(part)
    readers: dict[int, list[Any]] = {}
    for operation in scope.graph.get_operations():
        if operation.type not in MOVES_NOTHING or operation.type == "AssignVariableOp":
            for tensor in operation.inputs:
                readers.setdefault(id(_source(tensor)), []).append(operation)
    results = {id(_source(tensor)) for tensor in scope.graph.outputs}
    for members in groups.values():
        inside = {part.operation for part in members}
        yield Kernel(
            name=members[-1].operation.name,
            kinds=tuple(part.operation.type for part in members),
            multiply_adds=sum(part.multiply_adds for part in members),
            moved_bytes=_moved(inside, readers, results) if len(members) > 1 else _moved_alone(members[0].operation),
            dtype=next((dtype for part in members if (dtype := _dtype(part.operation))), ""),
            executions=executions,
        )


def _moved_alone(operation: Any) -> int:
    written = sum(_bytes(tensor) for tensor in operation.outputs)
    if operation.type in UPDATES:
        return 3 * _bytes(operation.inputs[-1])
    if operation.type in READS_A_PART:
        return 2 * written
    return written + sum(_bytes(tensor) for tensor in operation.inputs)


def _moved(inside: set[Any], readers: dict[int, list[Any]], results: set[int]) -> int:
    """Returns the bytes that enter a fusion, each tensor once, and those that leave it."""
    entering = {
        id(source): source for each in inside for tensor in each.inputs if (source := _source(tensor)) is not None
    }
    moved = sum(_bytes(tensor) for tensor in entering.values() if tensor.op not in inside)
    for operation in inside:
        if operation.type in UPDATES:
            moved += 2 * _bytes(operation.inputs[-1])
        for tensor in operation.outputs:
            if id(tensor) in results or any(reader not in inside for reader in readers.get(id(tensor), ())):
                moved += _bytes(tensor)
    return moved


def _dtype(operation: Any) -> str:
    floating = (each.dtype.name for each in (*operation.inputs, *operation.outputs) if each.dtype.is_floating)
    return next(floating, "")


def _bytes(tensor: Any) -> int:
    known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return math.prod(tensor.shape) * tensor.dtype.size if known else 0
