"""The stored weights of a .tflite file: int8 with a step for each output channel, or few bits that are decoded.

The converter got rounded weights. Where it left them in float they are as they were. Where it quantized them, with a
step of its own, they are off by at most half of it. It may also have multiplied a channel by a factor that followed. So
weights are known by the integers that each channel is in proportion to, and the largest of a channel gives its step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tfopt.errors import UnsupportedModelError
from tfopt.graph import GraphEditor
from tfopt.quantization.annotation.annotate import AnnotatedGraph
from tfopt.quantization.annotation.fusion import int8_weights

OPERATOR, OPTIONS, TYPE = schema.BuiltinOperator, schema.BuiltinOptions, schema.TensorType
# The axis of the output channels in the weights of an operator, which are its second input, and the version of the
# operator that may have them in int8 beside a float input.
PRODUCTS = {OPERATOR.CONV_2D: (0, 5), OPERATOR.DEPTHWISE_CONV_2D: (3, 6), OPERATOR.FULLY_CONNECTED: (0, 12)}
# The order of the axes of each node's weights in LiteRT.
FLOAT_ORDER = {
    "Conv2D": (3, 0, 1, 2),
    "DepthwiseConv2dNative": (0, 1, 2, 3),
    "MatMul": (1, 0),
    "Conv2DBackpropInput": (2, 0, 1, 3),
}
VERSIONS = {OPERATOR.DEQUANTIZE: 3, OPERATOR.QUANTIZE: 1}  # of float16, and to int8
LARGEST_BIAS = 2**30  # half of what 32 bits hold, so that no rounding exceeds it
SMALLEST = 64  # values; with the operator that decodes it, a smaller constant takes as much space
NEARLY = 1e-3  # of a step; what float32 loses


def quantize_weights(model: Any, graph: AnnotatedGraph) -> set[int]:
    """Stores the weights of int8 nodes as the integers of the annotated graph, and their biases to match.

    A product whose result has no range has a float result. Its kernel quantizes the input row by row when it runs.

    Returns: The ids of the tensors with these weights.
    Raises:
        UnsupportedModelError: A weight is not where it was expected.
    """
    known, found, stored = _known_integers(graph), set[int](), set[int]()
    for subgraph, operator, code in _operators(model):
        if code.builtinCode not in PRODUCTS or not _is_constant(model, subgraph.tensors[operator.inputs[1]]):
            continue
        weights = subgraph.tensors[operator.inputs[1]]
        axis, version = PRODUCTS[code.builtinCode]
        values = np.moveaxis(_values(model, weights), axis, 0)
        rows = values.reshape(len(values), -1)
        near = weights.quantization.scale / 2 if weights.type == TYPE.INT8 else np.zeros(1)
        places = sorted(range(len(known)), key=found.__contains__)  # weights may have become zeros, which fit any
        found_here = ((place, _factors(rows, known[place][1], near)) for place in places)
        place, factors = next(((place, each) for place, each in found_here if each is not None), (0, None))
        if factors is None:
            continue
        found.add(place)
        exact = np.abs(factors)
        steps = np.where(exact, exact, 1.0).astype(np.float32)
        source, bias = subgraph.tensors[operator.inputs[0]], operator.inputs[2] if len(operator.inputs) > 2 else -1
        if source.type == TYPE.FLOAT32:
            operator.builtinOptions.asymmetricQuantizeInputs = True
            code.version = max(code.version, version)
        elif bias >= 0:
            steps = _quantize_bias(model, subgraph.tensors[bias], steps, float(source.quantization.scale[0]))
        integers = np.rint(known[place][1] * (factors / steps)[:, None]).astype(np.int8)
        integers = np.moveaxis(integers.reshape(values.shape), 0, axis)
        operator.inputs = np.array(operator.inputs)
        operator.inputs[1] = _add_tensor(model, subgraph, weights.name, integers, steps, axis)
        stored.add(id(subgraph.tensors[-1]))
    if missing := [each for place, each in enumerate(known) if place not in found]:
        name, (channels, count) = missing[0][0], missing[0][1].shape
        raise UnsupportedModelError(
            f"Each int8 weight must be in the LiteRT file. Received: {graph.name!r}, in which weights of {channels} "
            f"channels with {count} values each are missing, those of node {name!r}. Exclude the node from the "
            "quantization, or write a SavedModel."
        )
    return stored


def keep_float(model: Any, graph: AnnotatedGraph, in_int8: Collection[int]) -> None:
    """Gives the other nodes their float weights back: the converter quantizes some that lie between two ranges.

    `in_int8` has the ids of the tensors with the weights of int8 nodes.
    """
    editor = GraphEditor(graph.graph_def)
    nodes = [node for node in editor.nodes.values() if node.op in FLOAT_ORDER]
    constants = [(node.op, editor.constant(node.input[1])) for node in nodes]
    held = [np.transpose(value, FLOAT_ORDER[op]) for op, value in constants if value is not None]
    for subgraph in model.subgraphs:
        operators = []
        for operator in subgraph.operators:
            code = model.operatorCodes[operator.opcodeIndex].builtinCode
            place = int(operator.inputs[1]) if code in (*PRODUCTS, OPERATOR.TRANSPOSE_CONV) else -1
            if place < 0 or subgraph.tensors[place].type != TYPE.INT8 or id(subgraph.tensors[place]) in in_int8:
                operators.append(operator)
                continue
            weights = subgraph.tensors[place]
            _store(model, weights, _before_rounding(_values(model, weights), weights.quantization, held), TYPE.FLOAT32)
            weights.quantization = None
            operators += _in_float(model, subgraph, operator)
        subgraph.operators = operators


def _before_rounding(values: np.ndarray, grid: Any, held: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the weights that the converter rounded: those of a node, or each channel of them times a factor.

    The converter multiplies weights by a factor that follows. Its step of a channel is the largest weight / 127, which
    tells the size of the factor. Where the weights are of no node, they stay rounded.
    """
    rows = np.moveaxis(values, grid.quantizedDimension, 0)
    steps = np.broadcast_to(grid.scale, len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    near, channels = (0.5 + NEARLY) * steps, tuple(range(1, rows.ndim))
    for each in held:
        if each.size != values.size:
            continue
        exact = np.moveaxis(each.reshape(values.shape), grid.quantizedDimension, 0)
        largest = np.abs(exact).max(axis=channels, keepdims=True)
        signs = np.sign((exact * rows).sum(axis=channels, keepdims=True))
        factors = signs * 127 * steps / np.where(largest, largest, 1)
        for found in (exact, exact * factors):
            if (np.abs(found - rows) <= near).all():
                return np.asarray(np.moveaxis(found, 0, grid.quantizedDimension), np.float32)
    return np.asarray(values, np.float32)


def _in_float(model: Any, subgraph: Any, operator: Any) -> list[Any]:
    """Returns an operator with float input, bias and result, between those that decode the one and round the other."""
    before, after = [], []
    operator.inputs, operator.outputs = np.array(operator.inputs), np.array(operator.outputs)
    for place, tensor in [(place, subgraph.tensors[at]) for place, at in enumerate(operator.inputs) if at >= 0]:
        if tensor.type == TYPE.INT8:
            decoded = _add_float(subgraph, tensor)
            before = [_operator(model, OPERATOR.DEQUANTIZE, int(operator.inputs[place]), decoded)]
            operator.inputs[place] = decoded
        elif tensor.type == TYPE.INT32 and tensor.quantization is not None and tensor.quantization.scale is not None:
            _store(model, tensor, _values(model, tensor).astype(np.float32), TYPE.FLOAT32)
            tensor.quantization = None
    result = subgraph.tensors[operator.outputs[0]]
    if result.type == TYPE.INT8:
        computed = _add_float(subgraph, result)
        after = [_operator(model, OPERATOR.QUANTIZE, computed, int(operator.outputs[0]))]
        operator.outputs[0] = computed
    return [*before, operator, *after]


def _add_float(subgraph: Any, like: Any) -> int:
    """Returns the place of a new float tensor of the same shape."""
    names = {"name": like.name + b"/float", "shape": like.shape, "shapeSignature": like.shapeSignature, "hasRank": True}
    subgraph.tensors.append(schema.TensorT(type=TYPE.FLOAT32, **names))
    return len(subgraph.tensors) - 1


def store_in_half(model: Any) -> None:
    """Stores the constants that float16 holds exactly as such, each with an operator behind it that decodes it.

    The conversion has computed the decoding of the graph, so these are the weights that were rounded to float16.
    """
    for subgraph, tensor, values in _large_constants(model):
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values):
            _decode(model, subgraph, tensor, half, TYPE.FLOAT16)


def _known_integers(graph: AnnotatedGraph) -> list[tuple[str, np.ndarray]]:
    """Returns each node with the integers of its weights, as a row for each output channel in LiteRT's order."""
    editor, known = GraphEditor(graph.graph_def), dict[tuple[tuple[int, ...], bytes], tuple[str, np.ndarray]]()
    for fusion in graph.fusions:
        integers = int8_weights(editor, editor.nodes[fusion.op].input[1])[0]
        rows = np.moveaxis(integers, -1, 0).reshape(integers.shape[-1], -1)
        known.setdefault((rows.shape, rows.tobytes()), (fusion.op, rows))
    return list(known.values())


def _factors(rows: np.ndarray, integers: np.ndarray, near: np.ndarray) -> np.ndarray | None:
    """Returns the factor between each row and a row of integers; None if one is no multiple, but for errors of `near`.

    A factor is negative where the row has been multiplied by a negative number. It is that of the largest values, which
    the converter rounds by nothing, unless its step is larger than that of the integers, as for a bias that 32 bits do
    not hold otherwise: then it is the one with the least squared error.
    """
    if rows.shape != integers.shape or (rows.any() != integers.any() and not near.any()):
        return None
    if len(rows) > 1 and _factors(rows[:1], integers[:1], near[:1]) is None:  # most others differ here already
        return None
    wide = integers.astype(np.float32)
    squares, products = np.maximum(np.square(wide).sum(axis=1), 1), np.einsum("ij,ij->i", rows, wide)
    largest = np.maximum(np.abs(wide).max(axis=1), 1)
    factors = np.sign(products) * np.abs(rows).max(axis=1) / largest
    coarse = 2 * near > np.abs(products / squares)
    factors = np.where(coarse, products / squares, factors)
    near = near * np.where(coarse, 1 + largest * np.abs(wide).sum(axis=1) / squares, 1)
    differences = np.abs(rows - factors[:, None] * wide)
    return factors if (differences <= (near + NEARLY * np.abs(factors))[:, None]).all() else None


def _add_tensor(model: Any, subgraph: Any, name: bytes, integers: np.ndarray, steps: np.ndarray, axis: int) -> int:
    """Returns the place of a new int8 tensor. Other operators may still read the weights in float."""
    made = schema.TensorT(name=name, hasRank=True, quantization=_quantization(steps, axis))
    _store(model, made, integers, TYPE.INT8)
    subgraph.tensors.append(made)
    return len(subgraph.tensors) - 1


def _quantization(steps: np.ndarray, axis: int) -> Any:
    zeros = np.zeros(len(steps), np.int64)
    return schema.QuantizationParametersT(scale=steps, zeroPoint=zeros, quantizedDimension=axis)


def _quantize_bias(model: Any, bias: Any, steps: np.ndarray, scale: float) -> np.ndarray:
    """Stores the bias of an int8 operator for new steps of its weights, and returns the steps.

    A channel whose bias would exceed 32 bits gets a larger step. Its weights are too small to matter beside it.
    """
    values = _values(model, bias)
    steps = np.maximum(steps, (np.abs(values) / (scale * LARGEST_BIAS)).astype(np.float32))
    step = steps * np.float32(scale)
    _store(model, bias, np.rint(values / step.astype(np.float64)).astype(np.int32), TYPE.INT32)
    bias.quantization = _quantization(step, 0)
    return steps


def _operators(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each operator with its subgraph and its code."""
    for subgraph in model.subgraphs:
        for operator in subgraph.operators:
            yield subgraph, operator, model.operatorCodes[operator.opcodeIndex]


def _is_constant(model: Any, tensor: Any) -> bool:
    return model.buffers[tensor.buffer].data is not None


def _values(model: Any, tensor: Any) -> np.ndarray:
    """Returns the float values of a constant tensor."""
    dtype = {TYPE.FLOAT32: np.float32, TYPE.INT8: np.int8, TYPE.INT32: np.int32}[tensor.type]
    values = np.frombuffer(model.buffers[tensor.buffer].data, dtype).reshape(tensor.shape)
    if tensor.type == TYPE.FLOAT32:
        return values
    axes = [1] * values.ndim
    axes[tensor.quantization.quantizedDimension] = -1
    return values * tensor.quantization.scale.reshape(axes)


def _store(model: Any, tensor: Any, values: np.ndarray, kind: int) -> None:
    """Gives a tensor other values, in a new buffer: other tensors may have the same as it had."""
    model.buffers.append(schema.BufferT(data=np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)))
    tensor.buffer, tensor.type = len(model.buffers) - 1, kind
    tensor.shape = np.asarray(values.shape, np.int32)


def _large_constants(model: Any) -> Iterator[tuple[Any, Any, np.ndarray]]:
    for subgraph in model.subgraphs:
        for tensor in list(subgraph.tensors):
            if tensor.type == TYPE.FLOAT32 and _is_constant(model, tensor) and math.prod(tensor.shape) >= SMALLEST:
                yield subgraph, tensor, _values(model, tensor)


def _decode(model: Any, subgraph: Any, tensor: Any, values: np.ndarray, kind: int) -> None:
    """Makes a constant the result of an operator that decodes `values`."""
    stored = schema.TensorT(name=tensor.name + b"/stored", shape=tensor.shape, hasRank=True)
    _store(model, stored, values, kind)
    subgraph.tensors.append(stored)
    tensor.buffer = 0
    place = next(place for place, each in enumerate(subgraph.tensors) if each is tensor)
    subgraph.operators.insert(0, _operator(model, OPERATOR.DEQUANTIZE, len(subgraph.tensors) - 1, place))


def _operator(model: Any, kind: int, source: int, result: int) -> Any:
    """Returns a new operator that decodes or rounds."""
    made = schema.OperatorT(inputs=[source], outputs=[result])
    if kind == OPERATOR.DEQUANTIZE:
        made.builtinOptionsType, made.builtinOptions = OPTIONS.DequantizeOptions, schema.DequantizeOptionsT()
    else:
        made.builtinOptionsType, made.builtinOptions = OPTIONS.QuantizeOptions, schema.QuantizeOptionsT()
    made.opcodeIndex = next((at for at, each in enumerate(model.operatorCodes) if each.builtinCode == kind), -1)
    if made.opcodeIndex < 0:
        made.opcodeIndex = len(model.operatorCodes)
        model.operatorCodes.append(schema.OperatorCodeT(deprecatedBuiltinCode=kind, builtinCode=kind))
    code = model.operatorCodes[made.opcodeIndex]
    code.version = max(code.version, VERSIONS[kind])
    return made
