"""Finds the operations of a graph that TensorFlow has no kernel for GPUs for.

TensorFlow runs an operation on the GPU if a kernel is registered for it there with the types of its attributes.
Otherwise it runs the operation on the host: in each step the inputs are copied from the GPU, and the results back. The
registry is part of TensorFlow's package for Linux, so it is the same on a machine without a GPU.

Some kernels for GPUs keep arguments in the memory of the host, such as sizes and most integers of 32 bits. They count
as kernels for GPUs: nothing waits for a copy that the GPU would have to make. DEFAULT is a kernel for every device.

XLA has a registry of its own. It compiles a whole function, so within one that it must compile (`jit_compile=True`),
only its own kernels count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.compat.tensorflow import kernels_of, op_definition, register_xla_kernels
from tfopt.profiling.cost.walk import needed_operations
from tfopt.report.audit import OpWithoutKernel

ON_GPU = ("GPU", "DEFAULT")
BY_XLA = ("XLA_GPU_JIT",)
MUST_COMPILE = "_XlaMustCompile"
# What computes nothing in a step: values that pass in and out of functions, and constants, such as an error's text.
COMPUTES_NOTHING = frozenset({"Placeholder", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "NoOp", "Const"})
# Operations on the host that cost a step next to nothing, with the reason.
HARMLESS = {
    (
        "MatrixDiagPartV3",
        "int64",
    ): "the counts of keras.metrics.MeanIoU, classes by classes, in the result of the metric"
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """An operation that a graph executes."""

    path: str  # the names of the calls around it, and its own
    definition: Any  # its NodeDef
    is_compiled: bool  # whether it is in a function that XLA must compile


@dataclass(frozen=True, kw_only=True)
class Placements:
    """The operations of a graph, and those without a kernel."""

    operations: int  # number of operations that the graph executes, in functions too
    on_host: tuple[OpWithoutKernel, ...]  # those without a kernel for GPUs
    not_in_xla: tuple[OpWithoutKernel, ...]  # those that XLA has no kernel for on GPUs


def placements(*graphs: Any) -> Placements:
    """Looks each operation of the graphs of concrete functions up in TensorFlow's registry of kernels.

    Example:
        >>> length = tf.function(lambda x: 2 * tf.strings.length(x))
        >>> found = placements(length.get_concrete_function(tf.TensorSpec((8,), tf.string)).graph)
        >>> found.operations, [each.kind for each in found.on_host]
        (3, ['StringLength'])
    """
    register_xla_kernels()
    nodes = [node for graph in graphs for node in executed_nodes(graph)]
    real = [node for node in nodes if node.definition.op not in COMPUTES_NOTHING]
    on_host = [each for each in real if not has_kernel(each.definition, BY_XLA if each.is_compiled else ON_GPU)]
    return Placements(
        operations=len(real),
        on_host=grouped(on_host),
        not_in_xla=grouped(each for each in real if not has_kernel(each.definition, BY_XLA)),
    )


def executed_nodes(graph: Any) -> list[Node]:
    """Returns the nodes that a graph executes, also in the functions, loops and branches that it calls.

    What an operation without a kernel for GPUs calls is left out: it runs on the host with its caller.
    """
    graph_def = graph.as_graph_def()
    functions = {each.signature.name: each for each in graph_def.library.function}
    needed = {operation.name for operation in needed_operations(graph)}
    seen: set[str] = set()
    return list(_executed([n for n in graph_def.node if n.name in needed], functions, "", False, seen))


def _executed(
    nodes: Iterable[Any], functions: Mapping[str, Any], caller: str, is_compiled: bool, seen: set[str]
) -> Iterator[Node]:
    for node in nodes:
        path = f"{caller}/{node.name}" if caller else node.name
        called = [name for name in called_functions(node) if name in functions]
        if node.op not in functions:
            yield Node(path=path, definition=node, is_compiled=is_compiled)
            if not has_kernel(node, ON_GPU):
                continue
        compiles = is_compiled or (MUST_COMPILE in node.attr and node.attr[MUST_COMPILE].b)
        for name in called:
            if name not in seen:
                seen.add(name)
                yield from _executed(_needed(functions[name]), functions, path, compiles, seen)


def called_functions(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls: those of its attributes, and its own op if it is one."""
    found = [node.op]
    for value in node.attr.values():
        found += [function.name for function in (value.func, *value.list.func) if function.name]
    return found


def _needed(function: Any) -> list[Any]:
    """Returns the nodes of a function that its results need, and those with an effect; the others do not run."""
    nodes = {node.name: node for node in function.node_def}
    waiting = [*function.ret.values(), *function.control_ret.values()]
    found = set()
    while waiting:
        name = waiting.pop().lstrip("^").partition(":")[0]
        if name in nodes and name not in found:
            found.add(name)
            waiting += nodes[name].input
    return [node for node in function.node_def if node.name in found]


def has_kernel(node: Any, devices: Sequence[str]) -> bool:
    """Returns whether a kernel is registered for a node on one of some devices, with the types of its attributes."""
    label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
    return any(
        kernel.device_type in devices
        and kernel.label == label
        and all(_allows(each, node) for each in kernel.constraint)
        for kernel in kernels_of(node.op)
    )


def _allows(constraint: Any, node: Any) -> bool:
    return set(types_of(node, constraint.name)) <= set(constraint.allowed_values.list.type)


def types_of(node: Any, attribute: str) -> list[int]:
    """Returns the numbers of the types that an attribute holds; of one that is left out, its default."""
    if attribute in node.attr:  # to read one that is left out would add it
        values = [node.attr[attribute]]
    else:
        definition = op_definition(node.op)
        values = [each.default_value for each in definition.attr if each.name == attribute] if definition else []
    return [number for value in values for number in ([value.type] if value.type else value.list.type)]


def grouped(nodes: Iterable[Node]) -> tuple[OpWithoutKernel, ...]:
    """Returns the nodes by their kind and types, the most frequent first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.definition.op, _dtypes(node.definition)), []).append(node)
    found = [
        OpWithoutKernel(
            kind=kind,
            dtypes=dtypes,
            count=len(each),
            places=tuple(node.path for node in each),
            harmless=next((HARMLESS[kind, dtype] for dtype in dtypes if (kind, dtype) in HARMLESS), ""),
        )
        for (kind, dtypes), each in groups.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.count, each.kind)))


def _dtypes(node: Any) -> tuple[str, ...]:
    numbers = [number for name in sorted(node.attr) if not name.startswith("_") for number in types_of(node, name)]
    return tuple(dict.fromkeys(tf.as_dtype(number).name for number in numbers))
