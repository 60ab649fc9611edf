"""A graph with the bodies of called functions in place of the calls, made from the protobufs alone.

TensorFlow inlines calls too, but only in a graph that it has loaded. Loops and branches stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfopt.compat.tensorflow import op_definition
from tfopt.graph.edit import NodeDef, attribute, producer, upstream

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
DEEPEST = 64  # calls inside of calls
# A few functions that call each other twice could make more than memory holds.
MOST_NODES, MOST_CALLS = 1_000_000, 100_000


class Inlined:
    """A graph's nodes in an order in which each follows those that it reads.

    Attributes:
        nodes: The nodes by their new names, which are unique. Tensors have the short form of a GraphDef.
        origins: The function that each node is in, and its name there. The function of the graph itself is "".
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        self.nodes: dict[str, Any] = {}
        self.origins: dict[str, tuple[str, str]] = {}
        self.calls = 0

    def add_graph(self, nodes: Mapping[str, Any], ends: Iterable[str]) -> list[str]:
        """Adds what tensors of a graph need. Returns these tensors."""
        ends = list(ends)
        needed = upstream(nodes, ends, control=True)
        body = _Body(self, "", "", [node for name, node in nodes.items() if name in needed], {}, 0)
        return self._finish(body, ends)

    def add_function(self, name: str, arguments: Sequence[str]) -> list[str]:
        """Adds a function, whose arguments are tensors. Returns its results."""
        function = self.functions[name]
        return self._finish(_body_of(self, function, "", arguments, 0), _results(function))

    def _finish(self, body: _Body, ends: Iterable[str]) -> list[str]:
        found = [body.tensor(end) for end in ends]
        ordered = _ordered(self.nodes)
        self.nodes = {name: self.nodes[name] for name in ordered}
        return found

    def add(self, node: Any, name: str, origin: tuple[str, str], inputs: Sequence[str]) -> None:
        if len(self.nodes) >= MOST_NODES:
            raise ValueError(f"its functions hold more than {MOST_NODES:,} nodes")
        copy = NodeDef()
        copy.CopyFrom(node)
        copy.name, copy.device = name, ""
        del copy.input[:]
        copy.input.extend(inputs)
        copy.attr.pop("_class", None)  # it names another node by its old name
        self.nodes[name], self.origins[name] = copy, origin


class _Body:
    """A function, or the graph itself, of which each node is added once. Its calls are replaced by what they return."""

    def __init__(
        self,
        result: Inlined,
        function: str,
        prefix: str,
        nodes: Iterable[Any],
        arguments: Mapping[str, str],
        depth: int,
    ) -> None:
        result.calls += 1
        if depth > DEEPEST or result.calls > MOST_CALLS:
            raise ValueError(f"its functions call each other more than {DEEPEST} deep or {MOST_CALLS:,} times")
        self.result, self.function, self.prefix = result, function, prefix
        self.nodes, self.arguments, self.depth = {node.name: node for node in nodes}, arguments, depth
        self.returned: dict[str, list[str]] = {}
        for node in self.nodes.values():
            if self._called(node) is None:
                result.add(node, prefix + node.name, (function, node.name), self._inputs(node))
            else:
                self._call(node)

    def _called(self, node: Any) -> str | None:
        name = attribute(node, "f").func.name if node.op in CALLS else node.op
        return name if name in self.result.functions else None

    def _inputs(self, node: Any) -> list[str]:
        return [self.tensor(each) for each in node.input if not each.startswith("^")]

    def _call(self, node: Any) -> list[str]:
        if node.name not in self.returned:
            function = self.result.functions[self._called(node) or ""]
            prefix = f"{self.prefix}{node.name}/"
            body = _body_of(self.result, function, prefix, self._inputs(node), self.depth + 1)
            self.returned[node.name] = [body.tensor(each) for each in _results(function)]
        return self.returned[node.name]

    def tensor(self, name: str) -> str:
        """Returns a tensor under its new name. In a function it is "node:result:place", in a graph "node:place"."""
        first, *rest = name.split(":")
        if first in self.arguments:
            return self.arguments[first]
        node = self.nodes[first]
        place = int(rest[-1]) if rest and rest[-1].isdecimal() else 0
        if len(rest) == 2 or (rest and not rest[-1].isdecimal()):
            place += _offset(node, rest[0], self.result.functions)
        if self._called(node) is not None:
            return self._call(node)[place]
        return f"{self.prefix}{first}:{place}" if place else f"{self.prefix}{first}"


def _body_of(result: Inlined, function: Any, prefix: str, arguments: Sequence[str], depth: int) -> _Body:
    names = [each.name for each in function.signature.input_arg]
    given = dict(zip(names, arguments, strict=True))
    return _Body(result, function.signature.name, prefix, function.node_def, given, depth)


def _results(function: Any) -> list[str]:
    return [function.ret[each.name] for each in function.signature.output_arg]


def _offset(node: Any, result: str, functions: Mapping[str, Any]) -> int:
    """Returns the place of an op's named result among all tensors that the op returns."""
    definition = functions[node.op].signature if node.op in functions else op_definition(node.op)
    if definition is None:
        raise ValueError(f"TensorFlow has no op {node.op}")
    place = 0
    for each in definition.output_arg:
        if each.name == result:
            return place
        if each.number_attr:
            place += attribute(node, each.number_attr).i
        elif each.type_list_attr:
            place += len(attribute(node, each.type_list_attr).list.type)
        else:
            place += 1
    raise ValueError(f"{node.op} has no result {result!r}")


def _ordered(nodes: Mapping[str, Any]) -> list[str]:
    """Returns the names so that each node follows its inputs."""
    waiting, readers = dict[str, int](), dict[str, list[str]]()
    for name, node in nodes.items():
        sources = {producer(tensor) for tensor in node.input} & nodes.keys()
        waiting[name] = len(sources)
        for source in sources:
            readers.setdefault(source, []).append(name)
    ready = [name for name, count in waiting.items() if count == 0]
    for name in ready:  # grows while it is read
        for reader in readers.get(name, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return ready
