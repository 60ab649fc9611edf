"""Leaves out of an inference graph the updates of variables that its outputs do not need.

Some layers change a variable at each call, at inference too: a recurrent layer with dropout draws a seed before it
knows that it will not drop anything, and a layer may count its calls. If no output depends on what the variable holds,
the graph without the update computes the same. A frozen graph cannot hold an update, since its variables are constants.

The outputs depend on a variable where they are computed from an op that reads it. Such an op may be in the body of a
loop or branch, whose arguments are followed to the variables that the caller passes. An op counts there if any result
of the body is computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedModelError
from tfopt.graph.edit import functions_of, producer, upstream

UPDATE = re.compile(
    r"Assign(Add|Sub)?VariableOp|ResourceScatter|ResourceStridedSliceAssign|ResourceApply|ResourceSparseApply"
    r"|RngReadAndSkip|RngSkip|Stateful(Uniform|StandardNormal|TruncatedNormal|RandomBinomial)"
    r"|LookupTable(Insert|Import|Remove)"
)
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")  # their first input selects the branch
RESOURCE = tf.resource.as_datatype_enum


def drop_updates(graph_def: Any, outputs: Iterable[str], name: str) -> dict[str, Any]:
    """Removes updates from a graph and from the bodies of its loops and branches.

    The variables are the graph's placeholders of resources; `outputs` are the tensors that it returns. The result has a
    node that reads it for each variable and table on which the outputs depend.

    Raises:
        UnsupportedModelError: An output depends on a variable that the graph updates.
    """
    variables = {
        node.name: node.name
        for node in graph_def.node
        if node.op == "Placeholder" and node.attr["dtype"].type == RESOURCE
    }
    uses = _Uses(graph_def)
    uses.add(graph_def.node, variables, list(outputs), live=True)
    needed = {variable: node for variable, node in uses.updates if variable in uses.read}
    if needed:
        shown = "; ".join(
            f"{node.name!r} ({node.op}) updates what {uses.read[variable].name!r} reads"
            for variable, node in list(needed.items())[:3]
        )
        raise UnsupportedModelError(
            "The outputs of a frozen model must not depend on a variable that the model changes when it runs. "
            f"Received: {name!r} ({shown}). Stateful recurrent layers, counters and random layers that run at "
            "inference cannot be frozen; make them stateless or leave them outside the exported part."
        )
    removed = {id(node) for _, node in uses.updates}
    _remove(graph_def.node, removed)
    for function in graph_def.library.function:
        gone = _remove(function.node_def, removed)
        for key in [key for key, node in function.control_ret.items() if node in gone]:
            del function.control_ret[key]
            function.signature.control_output.remove(key)
    return uses.read


class _Uses:
    """The ops that use variables: one that reads each variable on which the outputs depend, and each update."""

    def __init__(self, graph_def: Any) -> None:
        self.bodies = {function.signature.name: function for function in graph_def.library.function}
        self.read: dict[str, Any] = {}
        self.updates: list[tuple[str, Any]] = []

    def add(self, nodes: Iterable[Any], variables: Mapping[str, str], results: Iterable[str], *, live: bool) -> None:
        """Adds the uses in a graph or a body.

        `variables` has the variable that each placeholder or argument stands for. A body is `live` if an output of the
        whole graph depends on its results.
        """
        by_name = {node.name: node for node in nodes}
        needed = upstream(by_name, results) if live else set()
        for node in by_name.values():
            passed = {
                place: variable
                for place, tensor in enumerate(node.input)
                if (variable := _variable(tensor, by_name, variables)) is not None
            }
            if not passed or node.op == "Identity":
                continue
            called = [name for name in functions_of(node) if name in self.bodies]
            for body in (self.bodies[name] for name in called):
                first = 1 if node.op in BRANCHES else 0
                names = [argument.name for argument in body.signature.input_arg]
                inner = {names[place - first]: variable for place, variable in passed.items() if place >= first}
                self.add(body.node_def, inner, body.ret.values(), live=node.name in needed)
            if called:
                continue
            if UPDATE.match(node.op):
                self.updates += [(variable, node) for variable in passed.values()]
            if node.name in needed:
                self.read |= dict.fromkeys(passed.values(), node)


def _variable(tensor: str, nodes: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Returns the variable that a tensor is the handle of, or None."""
    name = producer(tensor)
    while name not in variables and name in nodes and nodes[name].op == "Identity":
        name = producer(nodes[name].input[0])
    return None if tensor.startswith("^") else variables.get(name)


def _remove(nodes: Any, removed: set[int]) -> set[str]:
    """Removes nodes and all that is computed from them from a graph or body, and returns their names."""
    gone = {node.name for node in nodes if id(node) in removed}
    if not gone:
        return gone
    count = 0
    while len(gone) > count:
        count = len(gone)
        gone |= {node.name for node in nodes if any(t[0] != "^" and producer(t) in gone for t in node.input)}
    kept = [type(node).FromString(node.SerializeToString()) for node in nodes if node.name not in gone]
    for node in kept:
        inputs = [tensor for tensor in node.input if producer(tensor) not in gone]
        del node.input[:]
        node.input.extend(inputs)
    del nodes[:]
    nodes.extend(kept)
    return gone
