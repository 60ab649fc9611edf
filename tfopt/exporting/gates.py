"""Gates in int8 for other runtimes: swish, and the factors of squeeze-and-excite.

Both multiply values by a sigmoid. TensorFlow has no int8 kernel for either, so the annotated graph rounds only what a
convolution reads. ONNX Runtime and LiteRT have them, where each operand and the result is rounded. OpenVINO computes a
swish or a sigmoid in the kernel of the convolution before it, where the result is rounded and nothing in between.

The ranges follow from those that are known: a sigmoid is between 0 and 1, and the swish of a range is between its own
ends and its lowest value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfopt.graph import GraphEditor
from tfopt.graph.edit import producer
from tfopt.quantization.annotation.annotate import AnnotatedGraph, add_fake_quant
from tfopt.quantization.annotation.fusion import FAKE_QUANT
from tfopt.quantization.annotation.grids import Range, covering

SIGMOID = Range(limit=1.0, signed=False)
SIGMOID_OF_LITERT = Range(limit=255 / 256, signed=False)  # the steps of its kernel; others would be rounded once more
READERS = {FAKE_QUANT, "Mul", "Mean"}  # of a swish in int8


def with_rounded_gates(graph: AnnotatedGraph, sigmoids: Range = SIGMOID) -> AnnotatedGraph:
    """Returns the graph with fake quantization of the sigmoids and products of gates whose operands are rounded."""
    editor = GraphEditor(graph.graph_def)
    for name in [name for name in editor.topological() if editor.nodes[name].op == "Sigmoid"]:
        products = [each for each in editor.consumers.get(name, ()) if editor.nodes[each].op == "Mul"]
        if len(products) == len(editor.consumers.get(name, ())) == 1 and name not in graph.output_nodes:
            _round(editor, name, products[0], graph.output_nodes, sigmoids)
    return replace(graph, graph_def=graph.edited(editor).graph_def)


def with_float_arguments(graph: AnnotatedGraph) -> AnnotatedGraph:
    """Returns the graph without fake quantization of what only sigmoids and the products of a swish read."""
    editor = GraphEditor(graph.graph_def)
    for name in [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT]:
        readers = editor.consumers.get(name, [])
        if readers and name not in graph.output_nodes and all(_is_gate(editor, name, each) for each in readers):
            editor.redirect(name, editor.nodes[name].input[0])
    return replace(graph, graph_def=graph.edited(editor).graph_def)


def _is_gate(editor: GraphEditor, name: str, reader: str) -> bool:
    """Whether a reader of a node is a sigmoid, the product of a swish, or a `beta` of 1 before the sigmoid."""
    node = editor.nodes[reader]
    if node.op != "Mul":
        return node.op == "Sigmoid"
    if _times_one(editor, reader) == name:
        return all(editor.nodes[each].op == "Sigmoid" for each in editor.consumers.get(reader, ()))
    sigmoids = [each for each in map(producer, node.input) if editor.nodes[each].op == "Sigmoid"]
    return [_times_one(editor, editor.nodes[each].input[0]) for each in sigmoids] == [name]


def _round(editor: GraphEditor, sigmoid: str, product: str, outputs: frozenset[str], sigmoids: Range) -> None:
    """Rounds a sigmoid, and the product if it is a swish, where an int8 kernel then computes both."""
    entering = _times_one(editor, editor.nodes[sigmoid].input[0])
    scaled = next(iter({*map(producer, editor.nodes[product].input)} - {sigmoid}), sigmoid)
    readers = {reader: editor.nodes[reader].op for reader in editor.consumers.get(product, ())}
    rounding = [reader for reader, op in readers.items() if op == FAKE_QUANT]
    allowed = READERS if scaled == entering else {FAKE_QUANT}
    both = [editor.nodes[each].op for each in (entering, scaled)]
    if both != [FAKE_QUANT] * 2 or product in outputs or not readers or not allowed.issuperset(readers.values()):
        return
    editor.set_inputs(sigmoid, [entering])
    rounded = add_fake_quant(editor, sigmoid, sigmoids)
    editor.redirect(sigmoid, rounded, keep=[rounded])
    if len(rounding) < len(readers):
        result = (rounding or [add_fake_quant(editor, product, _swish(editor.nodes[entering]))])[0]
        editor.redirect(product, result, keep=[*rounding, result])


def _times_one(editor: GraphEditor, tensor: str) -> str:
    """Returns the node whose values a tensor has; tf.nn.silu multiplies them by a `beta` of 1 before the sigmoid."""
    node = editor.nodes[producer(tensor)]
    factors = [each for each in node.input if not editor.is_number(each) or editor.value(each) != 1]
    return producer(factors[0] if node.op == "Mul" and len(factors) == 1 else tensor)


def _swish(entering: Any) -> Range:
    """Returns the range of the swish of rounded values."""
    values = np.linspace(entering.attr["min"].f, entering.attr["max"].f, 256)
    with np.errstate(over="ignore"):  # of infinity, the quotient is 0, as it should be
        swish = values / (1 + np.exp(-values))
    return covering(float(swish.min()), float(swish.max()))
