"""Reading and rewriting a GraphDef by node name.

Tensor names are kept in a GraphDef's short form: "conv" is output 0 of the node conv, "split:1" is its output 1.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue as AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef as GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef as NodeDef


class GraphEditor:
    """A GraphDef as a dict of nodes, with the consumers of each and its constants as arrays.

    The given GraphDef is not changed, and the table `FrozenGraph.origins` is copied. Control edges are dropped: a
    frozen inference graph has no side effects that they could order.
    """

    def __init__(self, graph_def: Any, origins: Mapping[str, str] = MappingProxyType({})) -> None:
        self._original = graph_def
        self.origins = dict(origins)
        self.nodes: dict[str, Any] = {}
        self.consumers: dict[str, list[str]] = {}
        for node in graph_def.node:
            copy = NodeDef()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(tensor for tensor in node.input if not tensor.startswith("^"))
            self._insert(copy)

    def _insert(self, node: Any) -> None:
        self.nodes[node.name] = node
        for tensor in node.input:
            self.consumers.setdefault(producer(tensor), []).append(node.name)

    def add(
        self, op: str, name: str, inputs: Sequence[str], *, origin: str | None = None, **attributes: AttrValue
    ) -> str:
        """Adds a node and returns its name.

        If the name is taken, the next free name like it is used. The new node computes the values of the node `origin`,
        if it takes the place of one.
        """
        node = NodeDef(op=op, name=self.free_name(name), input=inputs)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(value)
        self._insert(node)
        if origin is not None:
            self.origins[node.name] = origin
        return str(node.name)

    def origin(self, name: str) -> str:
        """Returns the node that the node `name` stands for: itself, if no rewrite added it in place of another one."""
        while name in self.origins:
            name = self.origins[name]
        return name

    def replacement(self, name: str) -> str | None:
        """Returns the node that stands for the node `name`, which may be gone; None if there is none."""
        if name in self.nodes:
            return name
        found = (self.replacement(new) for new, old in self.origins.items() if old == name)
        return next((new for new in found if new is not None), None)

    def add_constant(self, name: str, value: np.ndarray | np.number[Any], dtype: Any = None) -> str:
        """Adds a Const node. A quantized dtype takes the bytes of an array of the same width."""
        proto = tf.make_tensor_proto(value)
        if dtype is not None:
            proto = type(proto)(tensor_shape=proto.tensor_shape, tensor_content=np.ascontiguousarray(value).tobytes())
            proto.dtype = dtype.as_datatype_enum
        return self.add("Const", name, (), dtype=AttrValue(type=proto.dtype), value=AttrValue(tensor=proto))

    def free_name(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        return next(candidate for candidate in candidates if candidate not in self.nodes)

    def remove(self, names: Iterable[str]) -> None:
        """Removes nodes that nothing consumes any more."""
        for name in names:
            for tensor in self.nodes.pop(name).input:
                self.consumers[producer(tensor)].remove(name)

    def remove_unread(self, keep: Collection[str]) -> None:
        """Removes every node that none of `keep` needs."""
        needed = upstream(self.nodes, keep)
        self.remove([name for name in reversed(self.topological()) if name not in needed])

    def redirect(self, old: str, new: str, *, keep: Iterable[str] = ()) -> None:
        """Makes every consumer of tensor `old`, except the nodes in `keep`, read `new`."""
        kept = set(keep)
        for name in [name for name in self.consumers.get(producer(old), []) if name not in kept]:
            self.set_inputs(name, [new if tensor == old else tensor for tensor in self.nodes[name].input])

    def set_inputs(self, name: str, inputs: Sequence[str]) -> None:
        node = self.nodes[name]
        for tensor in node.input:
            self.consumers[producer(tensor)].remove(name)
        del node.input[:]
        node.input.extend(inputs)
        for tensor in inputs:
            self.consumers.setdefault(producer(tensor), []).append(name)

    def become(self, name: str, op: str, inputs: Sequence[str], **attributes: AttrValue) -> None:
        """Turns a node into another op. The node keeps its name, which may be the name of an output."""
        node = self.nodes[name]
        held = NodeDef(attr=attributes)  # copies: the attributes may be those of the node itself
        node.op = op
        node.ClearField("attr")
        node.MergeFrom(held)
        self.set_inputs(name, inputs)

    def constant(self, tensor: str, *, behind: str = "") -> np.ndarray | None:
        """Returns the value of a tensor that is a constant, else None. Nodes of the op `behind` are skipped."""
        while (node := self.nodes[producer(tensor)]).op == behind:
            tensor = node.input[0]
        return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None

    def value(self, tensor: str) -> np.ndarray:
        """Returns the value of a tensor that is known to be a constant."""
        value = self.constant(tensor)
        assert value is not None, tensor
        return value

    def is_number(self, tensor: str) -> bool:
        """Whether a tensor is a constant of one value that no operand is broadcast against."""
        constant = self.constant(tensor)
        return constant is not None and constant.size == 1 and constant.ndim <= 1

    def share_constants(self) -> None:
        """Merges equal constants, so that a weight that is used in several places is stored once."""
        first: dict[bytes, str] = {}
        for name in [name for name, node in self.nodes.items() if node.op == "Const"]:
            value = self.nodes[name].attr["value"].SerializeToString(deterministic=True)
            kept = first.setdefault(hashlib.sha256(value).digest(), name)
            if kept != name:
                self.redirect(name, kept)

    def topological(self) -> list[str]:
        """Returns the node names so that every node follows its inputs."""
        waiting = {name: len(node.input) for name, node in self.nodes.items()}
        ready = [name for name, count in waiting.items() if count == 0]
        for name in ready:  # grows while it is read
            for consumer in self.consumers.get(name, ()):
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    ready.append(consumer)
        return ready

    def ancestors(self, name: str) -> set[str]:
        """Returns every node whose value the node `name` needs, without the node itself."""
        return upstream(self.nodes, self.nodes[name].input)

    def graph_def(self, outputs: Iterable[str], keep: Iterable[str] = ()) -> Any:
        """Returns a GraphDef of the nodes that `outputs` need and of the nodes `keep`, such as unused placeholders."""
        needed = upstream(self.nodes, {*outputs, *keep})
        result = GraphDef(versions=self._original.versions, library=self._original.library)
        result.node.extend(self.nodes[name] for name in self.topological() if name in needed)
        return result


def producer(tensor: str) -> str:
    """Returns the name of the node that a tensor comes from, or that a control edge waits for.

    Example:
        >>> producer("split:1"), producer("conv"), producer("^update")
        ('split', 'conv', 'update')
    """
    return tensor.lstrip("^").split(":")[0]


def upstream(nodes: Mapping[str, Any], tensors: Iterable[str], *, control: bool = False) -> set[str]:
    """Returns the nodes that tensors are computed from. With `control` also those that they wait for."""
    waiting, found = [producer(tensor) for tensor in tensors], set[str]()
    while waiting:
        name = waiting.pop()
        if name in nodes and name not in found:
            found.add(name)
            waiting += [producer(tensor) for tensor in nodes[name].input if control or not tensor.startswith("^")]
    return found


def functions_of(node: Any) -> list[str]:
    """Returns the names of the functions that are attributes of a node, such as the bodies of a loop."""
    named = (function.name for value in node.attr.values() for function in (value.func, *value.list.func))
    return [name for name in named if name]


def attribute(node: Any, name: str) -> AttrValue:
    """Returns a node's attribute, or an empty one. Reading `node.attr[name]` would add the missing attribute."""
    return node.attr[name] if name in node.attr else AttrValue()


def is_nhwc(node: Any) -> bool:
    """Whether a node's data format is NHWC, which is the default."""
    return attribute(node, "data_format").s in (b"", b"NHWC")


def types(*dtypes: Any) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in dtypes]))


def dtype_attr(dtype: Any) -> AttrValue:
    return AttrValue(type=dtype.as_datatype_enum)


FLOAT32, INT32 = dtype_attr(tf.float32), dtype_attr(tf.int32)


def strings(values: Iterable[str]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(s=[value.encode() for value in values]))


def integers(values: Iterable[int]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(i=list(values)))


def text(value: str) -> AttrValue:
    return AttrValue(s=value.encode())


def copy_attributes(node: Any, names: Iterable[str]) -> Mapping[str, AttrValue]:
    """Returns the attributes `names` of a node, without those that it lacks."""
    return {name: node.attr[name] for name in names if name in node.attr}
