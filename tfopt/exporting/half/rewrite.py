"""Converts a frozen float32 graph so that its products compute in half precision. Inputs and outputs stay float32.

What a half node reads from a float32 node passes a Cast, and the reverse; each tensor is converted once. The constants
of half nodes are stored in the half type. In an int8 graph, products whose kernels write float32 for half nodes write
bfloat16 instead, which takes no Cast; but not on a machine on which such a kernel ends the process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf

from tfopt.exporting.half.sides import PRODUCTS, SHAPE_ONLY, choose_sides, float_inputs, type_attribute
from tfopt.exporting.int8.weights import PRODUCT as INT8_PRODUCT
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, attribute, dtype_attr, producer, types
from tfopt.hardware import writes_bfloat16
from tfopt.report import Change, PassReport, Skip


def compute_in_half(graph: FrozenGraph, compute: str, keep: Collection[str] = ()) -> tuple[FrozenGraph, PassReport]:
    """Returns the graph with its products and what lies between them in a half type, and the report.

    The type is "bfloat16" or "float16". The report names the products that changed, and those that stay in float32.
    Nodes keep their names. The products `keep` stay in float32 too.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> graph = freeze(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="relu")]))
        >>> print(compute_in_half(graph, "bfloat16")[1].headline)
        compute in bfloat16: 1 changed, 0 skipped, conversions 2
    """
    dtype = tf.as_dtype(compute)
    editor = GraphEditor(graph.graph_def)
    sides = choose_sides(graph, editor, dtype, keep)
    conversions = _Conversions(editor, sides.half, dtype, graph.output_nodes)
    for name in list(editor.nodes):
        conversions.of_inputs(name)
    moved = {tensor: conversions.in_float32(tensor) for tensor, _ in graph.outputs.values()}
    changed = [
        Change(name=name, kind=node.op, detail=compute)
        for name, node in editor.nodes.items()
        if name in sides.half and node.op in PRODUCTS
    ]
    report = PassReport(
        name=f"compute in {compute}",
        changed=changed,
        skipped=[*sides.skipped, *_in_functions(graph.graph_def)],
        metrics={"conversions": float(conversions.count)},
    )
    return graph.edited(editor, moved), report


class _Conversions:
    """Gives the nodes of `half` their type, and converts the tensors that cross to the other side."""

    def __init__(self, editor: GraphEditor, half: frozenset[str], dtype: tf.DType, outputs: frozenset[str]) -> None:
        self._editor, self._half, self._dtype, self._outputs = editor, half, dtype, outputs
        self._converted: dict[tuple[str, tf.DType], str] = {}
        self._writes = writes_bfloat16()

    @property
    def count(self) -> int:
        """The number of Cast nodes."""
        return sum(self._editor.nodes[name].op == "Cast" for name in self._converted.values())

    def of_inputs(self, name: str) -> None:
        node = self._editor.nodes[name]
        inputs = list(node.input)
        if name in self._half:
            for place, tensor in float_inputs(node):
                inputs[place] = self._in_half(tensor)
            node.attr[type_attribute(node)].CopyFrom(dtype_attr(self._dtype))
        elif node.op in SHAPE_ONLY:
            if producer(inputs[0]) in self._half:
                node.attr["T"].CopyFrom(dtype_attr(self._dtype))
        else:
            inputs = [self.in_float32(tensor) for tensor in inputs]
        if inputs != list(node.input):
            self._editor.set_inputs(name, inputs)

    def in_float32(self, tensor: str) -> str:
        """Returns the tensor of the same values outside of the half nodes."""
        return self._cast(tensor, self._dtype, tf.float32) if producer(tensor) in self._half else tensor

    def _in_half(self, tensor: str) -> str:
        if producer(tensor) in self._half:
            return tensor
        constant = self._editor.constant(tensor)
        if constant is None and self._is_rounded_by_its_kernel(tensor):
            return tensor
        if constant is None:
            return self._cast(tensor, tf.float32, self._dtype)
        if (tensor, self._dtype) not in self._converted:
            rounded = constant.astype(self._dtype.as_numpy_dtype)
            name = f"{producer(tensor)}/{self._dtype.name}"
            self._converted[tensor, self._dtype] = self._editor.add_constant(name, rounded)
        return self._converted[tensor, self._dtype]

    def _is_rounded_by_its_kernel(self, tensor: str) -> bool:
        """Lets an int8 product write its float result in bfloat16 where all readers want that, and says whether."""
        node, readers = self._editor.nodes[producer(tensor)], self._editor.consumers[producer(tensor)]
        if node.op != INT8_PRODUCT or self._dtype != tf.bfloat16 or tensor in self._outputs or not self._writes:
            return False
        if attribute(node, "Tout").type == FLOAT32.type and self._half.issuperset(readers):
            node.attr["Tout"].CopyFrom(dtype_attr(self._dtype))
            node.attr["Tdevice_outputs"].CopyFrom(types(self._dtype))
        return attribute(node, "Tout").type == dtype_attr(self._dtype).type

    def _cast(self, tensor: str, given: tf.DType, wanted: tf.DType) -> str:
        if (tensor, wanted) not in self._converted:
            kinds = {"SrcT": dtype_attr(given), "DstT": dtype_attr(wanted)}
            name = f"{tensor.replace(':', '_')}/in_{wanted.name}"
            self._converted[tensor, wanted] = self._editor.add("Cast", name, [tensor], **kinds)
        return self._converted[tensor, wanted]


def _in_functions(graph_def: Any) -> Iterator[Skip]:
    for function in graph_def.library.function:
        for node in function.node_def:
            if node.op in PRODUCTS and node.attr["T"].type == FLOAT32.type:
                yield Skip(name=node.name, kind=node.op, reason="in a loop or branch, whose body stays in float32")
