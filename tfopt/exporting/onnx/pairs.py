"""The int8 numbers of an ONNX model: its weights and biases as integers, each with the pair's dequantize behind it.

The model was converted with weights that are rounded already. A weight has only been moved since, so it is found by its
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.onnx.convert import all_nodes
from tfopt.exporting.paired import rounded_weights
from tfopt.graph import GraphEditor
from tfopt.quantization.annotation.annotate import AnnotatedGraph

Key = tuple[tuple[int, ...], bytes]
PRODUCTS = {"Conv": 0, "MatMul": 1, "Gemm": 1}  # the axis of a weight's output channels
MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze")
LARGEST_BIAS = 2**30  # half of what 32 bits hold, so that no rounding exceeds it


def quantize_weights(model: onnx.ModelProto, graph: AnnotatedGraph, *, biases: bool) -> None:
    """Stores the weights of int8 nodes as int8 with a step per output channel. With `biases`, biases become int32 too.

    Raises:
        UnsupportedModelError: A weight is not where it was expected.
    """
    known = _known_weights(graph)
    held = {each.name: each for each in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    found = set()
    new: list[onnx.NodeProto] = []
    stored: dict[tuple[object, ...], str] = {}
    _join_biases(model, known)
    for node in model.graph.node:
        if node.op_type not in PRODUCTS or node.input[1] not in held:
            continue
        values = numpy_helper.to_array(held[node.input[1]])
        steps, key = known.get(_key(values)), _key(values)
        if steps is None:
            continue
        found.add(key)
        axis = PRODUCTS[node.op_type]
        bias = numpy_helper.to_array(held[node.input[2]]) if len(node.input) > 2 and node.input[2] in held else None
        source = made.get(node.input[0])
        scale = 0.0
        if bias is not None and source is not None and source.op_type == "DequantizeLinear":
            scale = float(numpy_helper.to_array(held[source.input[1]]))
            # The bias must fit 32 bits, also where a runtime makes it an integer by itself. Weights that are too small
            # for that add nothing to it.
            steps = np.maximum(steps, (np.abs(bias) / (scale * LARGEST_BIAS)).astype(np.float32))
        shape = [1] * values.ndim
        shape[axis] = -1
        integers = np.rint(values / steps.reshape(shape)).astype(np.int8)
        node.input[1] = _add_pair(model, new, stored, f"{node.name}/weights", integers, steps, axis)
        if biases and scale and bias is not None:
            step = steps * np.float32(scale)
            integers = np.rint(bias / step.astype(np.float64)).astype(np.int32)
            node.input[2] = _add_pair(model, new, stored, f"{node.name}/bias", integers, step, 0)
    if missing := known.keys() - found:
        raise UnsupportedModelError(
            f"Each int8 weight must be in the ONNX graph. Received: {graph.name!r}, in which weights of the shape "
            f"{next(iter(missing))[0]} are missing. Exclude the node from the quantization, or write a SavedModel."
        )
    nodes = [*new, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in all_nodes(model.graph) for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def close_pairs(model: onnx.ModelProto) -> None:
    """Moves each quantize next to its dequantize, behind the transpositions that tf2onnx has put between the two.

    OpenVINO finds no int8 kernel otherwise. ONNX Runtime does, and transposes bytes faster than floats.
    """
    made = {name: node for node in model.graph.node for name in node.output}
    readers = Counter(name for node in all_nodes(model.graph) for name in node.input)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            first, source = node, made.get(node.input[0])
            while source is not None and source.op_type in MOVES and readers[source.output[0]] == 1:
                first, source = source, made.get(source.input[0])
            if source is not None and source.op_type == "QuantizeLinear" and first is not node:
                moved, grid = f"{node.input[0]}/quantized", source.input[1:]
                nodes.append(helper.make_node("QuantizeLinear", [node.input[0], *grid], [moved], name=moved))
                first.input[0], node.input[0] = source.input[0], moved
                readers.update({moved: 1, source.output[0]: -1})
        nodes.append(node)
    kept = [node for node in nodes if node.op_type != "QuantizeLinear" or readers[node.output[0]]]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def own_zero_points(model: onnx.ModelProto) -> None:
    """Gives each quantize and dequantize a zero point of its own.

    OpenVINO takes a dequantize over a Pad by padding its zero point, and so changes that of each node that shares it.
    """
    held = {each.name: each for each in model.graph.initializer}
    taken = set()
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            shared = node.input[2]
            if shared in taken:
                node.input[2] = f"{node.output[0]}/zero_point"
                own = model.graph.initializer.add()
                own.CopyFrom(held[shared])
                own.name = node.input[2]
            taken.add(shared)


def change_steps_of_one(model: onnx.ModelProto) -> None:
    """Gives activations whose step is 1, as that of images from 0 to 255, the next number as their step.

    OpenVINO leaves out the product with 1, sees no dequantize then, and computes the convolution behind it in float32.
    """
    ones = {each.name for each in model.graph.initializer if not each.dims and numpy_helper.to_array(each) == 1}
    readers = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    if readers := [node for node in readers if node.input[1] in ones]:
        step = numpy_helper.from_array(np.nextafter(np.float32(1), np.float32(2)), "step_of_one")
        model.graph.initializer.append(step)
        for node in readers:
            node.input[1] = step.name


def _join_biases(model: onnx.ModelProto, known: Mapping[Key, np.ndarray]) -> None:
    """Makes one Gemm of a product of two matrices and its bias, which are two ops in the converted graph.

    Only so does a runtime see that the bias belongs to the product, and compute it in int8. Other products than those
    of the int8 nodes stay.
    """
    held = {each.name: each for each in model.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in all_nodes(model.graph):
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {each.name for each in model.graph.output}
    joined = set()
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in held or node.output[0] in outputs:
            continue
        weights, following = held[node.input[1]], readers.get(node.output[0], [])
        if [each.op_type for each in following] != ["Add"] or _key(numpy_helper.to_array(weights)) not in known:
            continue
        (bias,) = set(following[0].input) - {node.output[0]} or {""}
        if bias in held and list(held[bias].dims) == list(weights.dims[1:]):
            node.op_type = "Gemm"
            node.input.append(bias)
            joined.add(following[0].name)
            node.output[0] = following[0].output[0]
    kept = [node for node in model.graph.node if node.name not in joined]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _add_pair(
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    stored: dict[tuple[object, ...], str],
    name: str,
    integers: np.ndarray,
    steps: np.ndarray,
    axis: int,
) -> str:
    """Adds integers and the node that dequantizes them. Returns the tensor of that.

    `stored` names the tensors that are in the model, so that a weight that is used in several places is stored once.
    Two weights share neither a scale nor a zero point: where they do, OpenVINO computes both products in float.
    """
    key = (integers.dtype.str, integers.shape, integers.tobytes(), steps.tobytes(), axis)
    if key in stored:
        return stored[key]
    values = (integers, steps.astype(np.float32), np.zeros(steps.shape, integers.dtype))
    names = [f"{name}/{kind}" for kind in ("integers", "scale", "zero_point")]
    model.graph.initializer.extend(map(numpy_helper.from_array, values, names))
    output = stored[key] = f"{name}/dequantized"
    nodes.append(helper.make_node("DequantizeLinear", names, [output], name=output, axis=axis))
    return output


def _key(values: np.ndarray) -> Key:
    """Returns what tells a weight from others: its shape without axes of size 1, and its values."""
    return tuple(size for size in values.shape if size != 1), np.ascontiguousarray(values, np.float32).tobytes()


def _known_weights(graph: AnnotatedGraph) -> Mapping[Key, np.ndarray]:
    """Returns the steps of each rounded weight, by its values in the order in which ONNX holds them."""
    editor = GraphEditor(graph.graph_def)
    known = {}
    for fusion in graph.fusions:
        values, steps = rounded_weights(editor, editor.nodes[fusion.op].input[1])
        if editor.nodes[fusion.op].op == "DepthwiseConv2dNative":
            values = np.moveaxis(values, -1, 0)
        elif values.ndim > 2:
            values = np.moveaxis(np.moveaxis(values, -1, 0), -1, 1)  # output channels, input channels, places
        known[_key(values)] = steps
    return known
