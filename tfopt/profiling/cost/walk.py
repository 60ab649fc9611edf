"""Lists the operations that a graph executes, also in its functions, its loops and its branches.

An operation in a loop is executed as often as the loop has rounds. Which of several branches is executed is unknown
before the run, so the caller chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.compat.tensorflow import function_graph

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}


@dataclass(frozen=True)
class Scope:
    """A graph that another operation calls."""

    graph: Any  # the graph, whose inputs are the inputs of the operation
    operation: Any = None  # the operation; None for the outermost graph
    outer: Scope | None = None  # the scope of the operation


def needed_operations(graph: Any) -> list[Any]:
    """Returns the operations that the outputs of a graph need, and those with an effect, each after those it needs.

    TensorFlow does not execute the others. The order is that of the trace, where that is possible: TensorFlow gives the
    loop of a forward pass more inputs when it traces the gradient.
    """
    ends = [each if isinstance(each, tf.Operation) else each.op for each in (*graph.outputs, *graph.control_outputs)]
    needed = set(_with_sources(ends))
    order: dict[Any, None] = {}
    for operation in graph.get_operations():
        waiting = [operation] if operation in needed else []
        while waiting:
            current = waiting[-1]
            missing = [each for each in _sources(current) if each not in order]
            if missing and current not in order:
                waiting += missing
            else:
                order[waiting.pop()] = None
    return list(order)


def _sources(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _with_sources(operations: Iterable[Any]) -> Iterator[Any]:
    """Yields operations and all operations that they need."""
    waiting, found = list(operations), set()
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += _sources(current)
            yield current


def inner(operation: Any, scope: Scope) -> tuple[list[Scope], int | None]:
    """Returns the graphs that an operation may execute, and how often it executes one of them.

    They are the function that it calls, its branches, or the body of a loop. An operation without any executes itself.
    The number is None for a loop whose rounds are unknown before the run.
    """
    if operation.type in LOOPS:
        return [_scope(operation, operation.get_attr("body"), scope)], _rounds(operation, scope)
    # The first input chooses the branch; the others are the inputs of the branches.
    attributes = ("f",) if operation.type in CALLS else BRANCHES.get(operation.type, ())
    functions = [operation.get_attr(attribute) for attribute in attributes]
    flat = [function for each in functions for function in (each if isinstance(each, list) else [each])]
    return [_scope(operation, function, scope) for function in flat], 1


def _scope(operation: Any, function: Any, outer: Scope) -> Scope:
    return Scope(function_graph(outer.graph, function.name), operation, outer)


def _rounds(operation: Any, scope: Scope) -> int | None:
    """Returns the most rounds of a loop.

    TensorFlow's loops have a counter as the first input and the most rounds as the second. Keras' recurrent layers,
    `tf.map_fn` and `for` over `tf.range` give it. A loop that ends before is counted with too many rounds.
    """
    most = value_of(operation.inputs[1], scope) if len(operation.inputs) > 1 else None
    return int(most) if most is not None and most.ndim == 0 and most >= 0 else None


def value_of(tensor: Any, scope: Scope) -> Any:
    """Returns the value of a tensor as an array if it depends on constants and shapes only, otherwise None."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    inputs = list(scope.graph.inputs)
    place = next((number for number, each in enumerate(inputs) if each is tensor), None)
    if place is not None:
        if scope.outer is None or _changes(scope, place):
            return None
        skipped = int(scope.operation.type in BRANCHES)
        return value_of(scope.operation.inputs[place + skipped], scope.outer)
    return _computed(tensor, scope)


def _changes(scope: Scope, place: int) -> bool:
    """Returns whether an input of a loop's body has another value in the next round."""
    if scope.operation.type not in LOOPS:
        return False
    result = scope.graph.outputs[place]
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    return result is not scope.graph.inputs[place]


def _computed(tensor: Any, scope: Scope) -> Any:
    """Computes a tensor from the inputs of its graph that are known."""
    known: dict[Any, Any] = {}
    for operation in _with_sources([tensor.op]):
        given = next((each for each in scope.graph.inputs if each.op is operation), None)
        if given is None:
            continue
        value = value_of(given, scope)
        if value is None:
            return None
        known[given] = value
    try:
        with tf.compat.v1.Session(graph=scope.graph) as session:
            return session.run(tensor, known)
    except (tf.errors.OpError, ValueError, TypeError):  # it depends on a variable or on random numbers
        return None
