"""Keeps tensors in float that TensorFlow's converter would round to the range of another one.

LiteRT has one range for all that an int8 concatenation reads and writes. Where the graph has no range for the result,
the converter takes that of the first input, and the values of the others saturate in it or become coarse.

The same holds for poolings, maxima, slices and the like. The converter carries the range of their result to what they
read, and to all else that reads it: what an average pooling reads would end at its largest average, and what a gate
multiplies at its largest maximum.

An op without an int8 kernel in between keeps the converter from that. It is taken out of the file again.

A softmax or sigmoid that nothing rounds is held too: in int8, LiteRT gives probabilities in steps of 1/256.
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
# Ops that LiteRT computes in one range, by the places of the values that have it.
FIRST = slice(1)
ONE_RANGE = VALUES | {
    **dict.fromkeys(("MaxPool", "AvgPool", "Max", "Min", "TopKV2"), FIRST),
    **dict.fromkeys(("Tile", "Transpose", "Reshape", "Squeeze", "ExpandDims", "Identity", "BroadcastTo"), FIRST),
    **dict.fromkeys(("Slice", "StridedSlice", "GatherV2", "GatherNd", "SplitV", "Unpack", "ReverseV2"), FIRST),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth", "BatchToSpaceND", "SpaceToBatchND"), FIRST),
    **dict.fromkeys(("Pad", "MirrorPad", "ResizeBilinear", "ResizeNearestNeighbor"), FIRST),
    "PadV2": slice(0, None, 2),
    "Split": slice(1, None),
    "AddN": slice(None),
}
# Of these the result may span less than what they read, or has no int8 kernel at all.
NARROWER = ("AvgPool", "ResizeBilinear", "AddN", "OneHot")
PROBABILITIES = ("Softmax", "Sigmoid")
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

    for name in [name for name, node in editor.nodes.items() if node.op in PROBABILITIES and node.attr["T"] == FLOAT32]:
        if all(editor.nodes[reader].op != FAKE_QUANT for reader in consumers_of(editor, name)):
            editor.set_inputs(name, [hold(editor, editor.nodes[name].input[0])])
            readers = editor.consumers.get(name, [])
            handing_on = [reader for reader in readers if editor.nodes[reader].op in DATA_MOVEMENT_OPS]
            if len(handing_on) < len(readers):  # in int8 the others, such as top-k, would round it too
                held = hold(editor, name)
                editor.redirect(name, held, keep=[held, *handing_on])
    _keep_ranges_apart(editor, outputs)


def _keep_ranges_apart(editor: GraphEditor, outputs: Collection[str]) -> None:
    """Puts an op where the range of a result would reach values that may be outside of it."""
    rounded = set[str]()
    for name in editor.topological():
        node = editor.nodes[name]
        if node.op in (FAKE_QUANT, "Const") or (node.op in ONE_RANGE and rounded.issuperset(_sources(node))):
            rounded.add(name)
    reached, stack = set[str](), [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT]
    while stack:
        reader = editor.nodes[stack.pop()]
        if reader.name in reached:
            continue
        reached.add(reader.name)
        for tensor in reader.input[ONE_RANGE.get(reader.op, FIRST)]:
            source = editor.nodes[producer(tensor)]
            if source.name in rounded or HELD in source.name:
                continue
            others = {*editor.consumers[source.name]} != {reader.name} or source.name in outputs
            if source.op in NARROWER or (others and (reader.op != FAKE_QUANT or source.op in ONE_RANGE)):
                held = hold(editor, tensor)
                editor.set_inputs(reader.name, [held if each == tensor else each for each in reader.input])
            elif source.op in ONE_RANGE:
                stack.append(source.name)


def _sources(node: Any) -> set[str]:
    """Returns the producers of what an op reads in one range with its result."""
    return {producer(tensor) for tensor in node.input[ONE_RANGE[node.op]]}


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
