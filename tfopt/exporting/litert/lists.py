"""Turns the lists of tensors that loops read and write into tensors with one more axis.

LiteRT has no lists. Its converter replaces those whose elements have a known size, but the elements of a recurrent
layer have the open batch size. A list of n elements of the shape s becomes a tensor of the shape (n, *s): an element is
read by Gather, and written between two slices. A new list holds zeros. Where the shape of its elements is open, their
sizes are those of the elements that the same loop reads: in a recurrent layer both begin with the batch axis. A list of
one element, which a loop writes again and again for its last output, is that element, unless it may grow: slices of
nothing are wrong in LiteRT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import op_definition
from tfopt.graph.edit import AttrValue, GraphDef, NodeDef, attribute, dtype_attr, producer

LOOPS = ("While", "StatelessWhile")
LIST = tf.variant.as_datatype_enum
INT32 = dtype_attr(tf.int32)


def without_lists(graph_def: Any) -> Any:
    """Returns the graph with tensors in place of lists, or the same graph if one is used in another way.

    Example:
        >>> without_lists(GraphDef()).node
        []
    """
    changed = GraphDef()
    changed.CopyFrom(graph_def)
    functions = {function.signature.name: function for function in changed.library.function}
    _Body(changed.node, {}, functions, separator="").rewrite()
    bodies = (function.node_def for function in changed.library.function)
    return graph_def if any(_has_list(node) for node in (*changed.node, *chain(*bodies))) else changed


def _has_list(node: Any) -> bool:
    types = (kind for value in node.attr.values() for kind in (value.type, *value.list.type))
    return node.op.startswith("TensorList") or LIST in types


class _Body:
    """The nodes of the graph or of a function. `lists` has the type of the elements of each argument that is a list.

    `single` has the arguments that are lists of one element. In a function a tensor has the name of its node and of the
    op's output, as in "add:z:0".
    """

    def __init__(
        self,
        nodes: Any,
        lists: Mapping[str, int],
        functions: Mapping[str, Any],
        *,
        separator: str,
        single: Collection[str] = (),
    ) -> None:
        self.nodes, self.lists, self.functions, self.separator = nodes, lists, functions, separator
        self.single = single
        self.by_name = {node.name: node for node in nodes}
        self.changed: set[str] = set()

    def rewrite(self) -> None:
        loops = [node for node in self.nodes if node.op in LOOPS]
        reserved = {
            producer(tensor): source
            for loop in loops
            for tensor in loop.input
            if self._op(tensor) == "TensorListReserve" and (source := self._read_by(loop)) is not None
        }
        types = {loop.name: [self._elements(tensor) for tensor in loop.input] for loop in loops}
        single = {loop.name: [self._holds_one(tensor) for tensor in loop.input] for loop in loops}
        handed_on = {node.name: self._elements(node.name) for node in self.nodes if node.op == "Identity"}
        for node in list(self.nodes):
            elements = attribute(node, "element_dtype").type
            if (found := handed_on.get(node.name)) is not None:
                node.attr["T"].type = found
            elif node.op in ("TensorListFromTensor", "TensorListStack"):
                self._become(node, "Identity", node.input[:1], T=AttrValue(type=elements))
            elif node.op == "TensorListGetItem":
                self._become(node, "Gather", node.input[:2], Tparams=AttrValue(type=elements), Tindices=INT32)
            elif node.op == "TensorListSetItem":
                self._write(node, AttrValue(type=elements))
            elif node.op == "TensorListReserve":
                self._reserve(node, AttrValue(type=elements), reserved.get(node.name))
        for loop in loops:
            self._rewrite_loop(loop, types[loop.name], single[loop.name])

    def outputs(self, tensors: Mapping[str, str]) -> dict[str, str]:
        """Returns tensors of a function with the names of the outputs of the new ops."""
        return {key: self._renamed(tensor) for key, tensor in tensors.items()}

    def _rewrite_loop(self, loop: Any, elements: list[int | None], single: list[bool]) -> None:
        for place, found in enumerate(elements):
            if found is not None and loop.attr["T"].list.type[place] == LIST:
                loop.attr["T"].list.type[place] = found
        loop.attr["output_shapes"].list.ClearField("shape")
        for key in ("cond", "body"):
            name = loop.attr[key].func.name
            function = self.functions[name]
            # TensorFlow registers functions by their names, and has the one with lists already.
            loop.attr[key].func.name = f"{name}_without_lists"
            if function.signature.name != name:  # two loops have the same
                continue
            function.signature.name = loop.attr[key].func.name
            arguments = function.signature.input_arg
            lists = {
                argument.name: found
                for argument, found in zip(arguments, elements, strict=True)
                if argument.type == LIST and found is not None
            }
            ones = [argument.name for argument, one in zip(arguments, single, strict=True) if one]
            body = _Body(function.node_def, lists, self.functions, separator=":output:0", single=ones)
            body.rewrite()
            returned = body.outputs(dict(function.ret))
            for key, tensor in returned.items():
                function.ret[key] = tensor
            function.ClearField("arg_attr")
            for argument in arguments:
                argument.type = lists.get(argument.name, argument.type)
            if len(function.signature.output_arg) == len(elements):  # the body, not the condition
                for argument, found in zip(function.signature.output_arg, elements, strict=True):
                    argument.type = found if argument.type == LIST and found is not None else argument.type

    def _op(self, tensor: str) -> str:
        node = self.by_name.get(producer(tensor))
        return "" if node is None else str(node.op)

    def _elements(self, tensor: str) -> int | None:
        """Returns the type of a list's elements, or None for another tensor."""
        while True:
            if tensor in self.lists:
                return self.lists[tensor]
            node = self.by_name.get(producer(tensor))
            if node is None:
                return None
            if node.op in ("TensorListFromTensor", "TensorListReserve", "TensorListSetItem"):
                return int(node.attr["element_dtype"].type)
            if node.op in LOOPS:
                tensor = node.input[int(tensor.rsplit(":", 1)[1]) if ":" in tensor else 0]
            elif node.op == "Identity":
                tensor = node.input[0]
            else:
                return None

    def _holds_one(self, tensor: str) -> bool:
        """Returns whether a tensor is a new list of one element."""
        node = self.by_name.get(producer(tensor))
        count = None if node is None or node.op != "TensorListReserve" else self.by_name.get(producer(node.input[1]))
        return count is not None and count.op == "Const" and int(tf.make_ndarray(count.attr["value"].tensor)) == 1

    def _read_by(self, loop: Any) -> str | None:
        """Returns the tensor whose slices are the elements of the first list that a loop reads."""
        found = (self.by_name[producer(tensor)] for tensor in loop.input if self._op(tensor) == "TensorListFromTensor")
        return next((str(node.input[0]) for node in found), None)

    def _become(self, node: Any, op: str, inputs: Iterable[str], **attributes: AttrValue) -> None:
        node.CopyFrom(_node(node.name, op, list(inputs), attributes))
        self.changed.add(node.name)
        for reader in self.nodes:
            for place, tensor in enumerate(reader.input):
                reader.input[place] = self._renamed(tensor)

    def _renamed(self, tensor: str) -> str:
        return producer(tensor) + self.separator if ":" in tensor and producer(tensor) in self.changed else tensor

    def _add(self, op: str, name: str, inputs: Iterable[str], **attributes: AttrValue) -> str:
        self.nodes.append(_node(name, op, list(inputs), attributes))
        self.by_name[name] = self.nodes[-1]
        return name + (":output:0" if self.separator and op != "AddV2" else ":z:0" if self.separator else "")

    def _constant(self, name: str, value: Any) -> str:
        proto = tf.make_tensor_proto(np.asarray(value))
        return self._add("Const", name, (), dtype=AttrValue(type=proto.dtype), value=AttrValue(tensor=proto))

    def _write(self, node: Any, elements: AttrValue) -> None:
        """Makes a list with another element: what lies before it, the element, and what lies behind."""
        held, place, item = node.input[:3]
        if held in self.single and not attribute(node, "resize_if_index_out_of_bounds").b:
            axis = self._constant(f"{node.name}/axis", np.int32(0))
            self._become(node, "ExpandDims", [item, axis], T=elements, Tdim=INT32)
            return
        zero, zeros, one, ones = (
            self._constant(f"{node.name}/{name}", np.asarray(value, np.int32))
            for name, value in (("zero", 0), ("zeros", [0]), ("one", 1), ("ones", [1]))
        )
        following = self._add("AddV2", f"{node.name}/next", [place, one], T=INT32)
        begin, end = (
            self._add("ExpandDims", f"{node.name}/{name}", [tensor, zero], T=INT32, Tdim=INT32)
            for name, tensor in (("begin", place), ("end", following))
        )
        last = AttrValue(i=1)
        before = self._add("StridedSlice", f"{node.name}/before", [held, zeros, begin, ones], T=elements, Index=INT32)
        behind = self._add(
            "StridedSlice", f"{node.name}/behind", [held, end, zeros, ones], T=elements, Index=INT32, end_mask=last
        )
        element = self._add("ExpandDims", f"{node.name}/element", [item, zero], T=elements, Tdim=INT32)
        parts = [before, element, behind, zero]
        self._become(node, "ConcatV2", parts, N=AttrValue(i=3), T=elements, Tidx=INT32)

    def _reserve(self, node: Any, elements: AttrValue, source: str | None) -> None:
        """Makes a list of zeros. Open sizes of its elements are those of the slices of `source`."""
        wanted, count = node.input[:2]
        shape = self.by_name[producer(wanted)]
        known = tf.make_ndarray(shape.attr["value"].tensor) if shape.op == "Const" else None
        if known is None or known.ndim != 1 or (source is None and (known < 0).any()):
            return
        sizes = [count]
        for axis, size in enumerate(known):
            name = f"{node.name}/size_{axis}"
            if size >= 0:
                sizes.append(self._constant(name, np.int32(size)))
                continue
            of_source = self._add("Shape", f"{name}/shape", [str(source)], T=elements, out_type=INT32)
            ends = [
                self._constant(f"{name}/{key}", np.asarray([value], np.int32))
                for key, value in (("begin", axis + 1), ("end", axis + 2), ("step", 1))
            ]
            shrink = AttrValue(i=1)
            sizes.append(
                self._add("StridedSlice", name, [of_source, *ends], T=INT32, Index=INT32, shrink_axis_mask=shrink)
            )
        packed = self._add("Pack", f"{node.name}/sizes", sizes, N=AttrValue(i=len(sizes)), T=INT32)
        zero = self._constant(f"{node.name}/zero", np.zeros((), tf.as_dtype(elements.type).as_numpy_dtype))
        self._become(node, "Fill", [packed, zero], T=elements, index_type=INT32)


def _node(name: str, op: str, inputs: list[str], attributes: Mapping[str, AttrValue]) -> Any:
    """Returns a node with the defaults of its other attributes, which a function does not add."""
    given = op_definition(op).attr
    defaults = {each.name: each.default_value for each in given if each.HasField("default_value")}
    return NodeDef(name=name, op=op, input=inputs, attr=defaults | dict(attributes))
