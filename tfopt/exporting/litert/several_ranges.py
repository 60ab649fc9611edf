"""Keeps ops in float that read tensors of several ranges, such as a concatenation of convolutions' results.

LiteRT has one range for all that an int8 concatenation reads and writes. Where the graph has no range for the result,
TensorFlow's converter takes that of the first input, and the values of the others saturate in it or become coarse. An
op without an int8 kernel before each input keeps the converter from that. It is taken out of the file again.

A softmax or sigmoid that the model gives is held too: in int8, LiteRT gives probabilities in steps of 1/256.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tfopt.errors import UnsupportedModelError
from tfopt.graph import GraphEditor
from tfopt.graph.edit import FLOAT32, producer
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, FAKE_QUANT, consumers_of

OPERATOR = schema.BuiltinOperator
WITHOUT_KERNEL, BUILTIN = "Floor", OPERATOR.FLOOR
HELD = "held_in_float"  # in the names of these ops
# The inputs of an op that the converter gives one range.
VALUES = {
    "ConcatV2": slice(None, -1),
    "Pack": slice(None),
    "SelectV2": slice(1, None),
    "Maximum": slice(None),
    "Minimum": slice(None),
}
ANSWERS = ("Softmax", "Sigmoid")
CLIPS = ("Maximum", "Minimum")  # of a constant, what saturates has no effect


def hold_in_float(editor: GraphEditor, outputs: Collection[str]) -> None:
    """Puts an op before each input of these ops, unless the result has a range."""
    for name in [name for name, node in editor.nodes.items() if node.op in VALUES and node.attr["T"] == FLOAT32]:
        node, readers = editor.nodes[name], editor.consumers.get(name, [])
        sources = list(node.input[VALUES[node.op]])
        changing = [each for each in sources if editor.nodes[producer(each)].op != "Const"]
        if name not in outputs and {editor.nodes[reader].op for reader in readers} == {FAKE_QUANT}:
            continue
        if len(sources) < 2 or (node.op in CLIPS and len(changing) < 2):
            continue
        found = {each: hold(editor, each) for each in changing}
        editor.set_inputs(name, [found.get(each, each) for each in node.input])
        # Otherwise the range of what is read rounded reaches those that read it in float too.
        moving = (FAKE_QUANT, *DATA_MOVEMENT_OPS)
        rounding = [reader for reader in readers if editor.nodes[reader].op in moving and reader not in outputs]
        if rounding:
            editor.redirect(name, hold(editor, name), keep=set(readers) - set(rounding))

    for name in [name for name, node in editor.nodes.items() if node.op in ANSWERS and node.attr["T"] == FLOAT32]:
        if all(editor.nodes[reader].op in DATA_MOVEMENT_OPS for reader in consumers_of(editor, name)):
            editor.set_inputs(name, [hold(editor, editor.nodes[name].input[0])])


def hold(editor: GraphEditor, tensor: str) -> str:
    """Adds such an op behind a tensor, and returns its result."""
    return editor.add(WITHOUT_KERNEL, f"{tensor.replace(':', '_')}/{HELD}", [tensor], T=FLOAT32)


def release(model: Any, graph_def: Any) -> None:
    """Takes these ops out of the file of a graph.

    Raises:
        UnsupportedModelError: One is left, because the converter gave it another name.
    """
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    own, left = sum(WITHOUT_KERNEL in node.op and HELD not in node.name for node in nodes), 0
    for subgraph in model.subgraphs:
        sources, kept = dict[int, int](), []
        for operator in subgraph.operators:
            code = model.operatorCodes[operator.opcodeIndex].builtinCode
            if code == BUILTIN and HELD.encode() in subgraph.tensors[operator.outputs[0]].name:
                source = int(operator.inputs[0])
                sources[int(operator.outputs[0])] = sources.get(source, source)
            else:
                kept.append(operator)
                left += code == BUILTIN
                if operator.inputs is not None:
                    operator.inputs = np.array([sources.get(int(each), each) for each in operator.inputs], np.int32)
        subgraph.operators = kept
    if left > own:
        raise UnsupportedModelError(
            f"Each tensor that is held in float must be found in the LiteRT file. Received: {left - own} more ops "
            f"{WITHOUT_KERNEL} than in the graph. Write format='saved_model'."
        )
