"""The stored weights of a .tflite file: int8 with a step for each output channel, or few bits that are decoded.

The converter got rounded weights. Where it left them in float they are as they were. Where it quantized them, with a
step of its own, they are off by at most half of it. It may also have multiplied a channel by a factor that followed. So
weights are known by the integers that each channel is in proportion to, and the largest of a channel gives its step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tfopt.errors import UnsupportedModelError
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.quantization.annotation.annotate import AnnotatedGraph
from tfopt.quantization.annotation.fusion import int8_weights

OPERATOR, TYPE = schema.BuiltinOperator, schema.TensorType
# The axis of the output channels in the weights of an operator, which are its second input, and the version of the
# operator that may have them in int8 beside a float input.
PRODUCTS = {OPERATOR.CONV_2D: (0, 5), OPERATOR.DEPTHWISE_CONV_2D: (3, 6), OPERATOR.FULLY_CONNECTED: (0, 12)}
LARGEST_BIAS = 2**30  # half of what 32 bits hold, so that no rounding exceeds it
SMALLEST = 64  # values; with the operator that decodes it, a smaller constant takes as much space
NEARLY = 1e-3  # of a step; what float32 loses


def quantize_weights(model: Any, graph: AnnotatedGraph) -> None:
    """Stores the weights of int8 nodes as the integers of the annotated graph, and their biases to match.

    A product whose result has no range has a float result. Its kernel quantizes the input row by row when it runs.

    Raises:
        UnsupportedModelError: A weight is not where it was expected.
    """
    known, found = _known_integers(graph), set[int]()
    for subgraph, operator, code in _operators(model):
        if code.builtinCode not in PRODUCTS or not _is_constant(model, subgraph.tensors[operator.inputs[1]]):
            continue
        weights = subgraph.tensors[operator.inputs[1]]
        axis, version = PRODUCTS[code.builtinCode]
        values = np.moveaxis(_values(model, weights), axis, 0)
        rows = values.reshape(len(values), -1)
        near = weights.quantization.scale / 2 if weights.type == TYPE.INT8 else 0.0
        place = next((place for place, held in enumerate(known) if _is_multiple(rows, held, near)), None)
        if place is None:
            continue
        found.add(place)
        largest = np.abs(known[place]).max(axis=1)
        steps = np.where(largest, np.abs(rows).max(axis=1) / np.maximum(largest, 1), 1.0).astype(np.float32)
        integers = np.rint(rows / steps[:, None])
        source, bias = subgraph.tensors[operator.inputs[0]], operator.inputs[2] if len(operator.inputs) > 2 else -1
        if weights.type == TYPE.FLOAT32:
            operator.builtinOptions.asymmetricQuantizeInputs = True
            code.version = max(code.version, version)
        elif bias >= 0:
            steps = _quantize_bias(model, subgraph.tensors[bias], steps, float(source.quantization.scale[0]))
            integers = np.rint(rows / steps[:, None])
        stored = np.moveaxis(integers.reshape(values.shape).astype(np.int8), 0, axis)
        _store(model, weights, stored, TYPE.INT8)
        weights.quantization = schema.QuantizationParametersT(
            scale=steps, zeroPoint=np.zeros(len(steps), np.int64), quantizedDimension=axis
        )
    if missing := [held.shape for place, held in enumerate(known) if place not in found]:
        raise UnsupportedModelError(
            f"Each int8 weight must be in the LiteRT file. Received: {graph.name!r}, in which weights of "
            f"{missing[0][0]} channels with {missing[0][1]} values each are missing. Exclude the node from the "
            "quantization, or write a SavedModel."
        )


def keep_float(model: Any, graph: FrozenGraph) -> None:
    """Gives transposed convolutions, which the converter quantizes unasked, their float weights back."""
    editor = GraphEditor(graph.graph_def)
    kept = [editor.constant(node.input[1]) for node in editor.nodes.values() if node.op == "Conv2DBackpropInput"]
    for subgraph, operator, code in _operators(model):
        weights = subgraph.tensors[operator.inputs[1]] if code.builtinCode == OPERATOR.TRANSPOSE_CONV else None
        if weights is None or weights.type != TYPE.INT8:
            continue
        values, near = _values(model, weights), weights.quantization.scale.reshape(-1, 1, 1, 1) * (0.5 + NEARLY)
        for held in kept:
            exact = None if held is None else held.transpose(2, 0, 1, 3)
            if exact is not None and exact.shape == values.shape and (np.abs(exact - values) <= near).all():
                _store(model, weights, exact, TYPE.FLOAT32)
                weights.quantization = None
                break


def store_in_half(model: Any) -> None:
    """Stores the constants that float16 holds exactly as such, each with an operator behind it that decodes it.

    The conversion has computed the decoding of the graph, so these are the weights that were rounded to float16.
    """
    for subgraph, tensor, values in _large_constants(model):
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values):
            _decode(model, subgraph, tensor, half, TYPE.FLOAT16)


def _known_integers(graph: AnnotatedGraph) -> list[np.ndarray]:
    """Returns the integers of each weight of the graph, as a row for each output channel in LiteRT's order."""
    editor, known = GraphEditor(graph.graph_def), dict[tuple[tuple[int, ...], bytes], np.ndarray]()
    for fusion in graph.fusions:
        integers = int8_weights(editor, editor.nodes[fusion.op].input[1])[0]
        rows = np.moveaxis(integers, -1, 0).reshape(integers.shape[-1], -1)
        known[rows.shape, rows.tobytes()] = rows
    return list(known.values())


def _is_multiple(rows: np.ndarray, integers: np.ndarray, near: np.ndarray | float) -> bool:
    """Whether each row is a multiple of a row of integers, but for errors of the size `near`."""
    if rows.shape != integers.shape:
        return False
    largest = np.abs(integers.astype(np.int16)).max(axis=1)
    factors = np.abs(rows).max(axis=1) / np.maximum(largest, 1)
    turned = np.sign(np.einsum("ij,ij->i", rows, integers.astype(np.float32)))
    differences = np.abs(rows - (turned * factors)[:, None] * integers)
    return bool((differences <= (near + NEARLY * factors)[:, None]).all())


def _quantize_bias(model: Any, bias: Any, steps: np.ndarray, scale: float) -> np.ndarray:
    """Stores the bias of an int8 operator for new steps of its weights, and returns the steps.

    A channel whose bias would exceed 32 bits gets a larger step. Its weights are too small to matter beside it.
    """
    values = _values(model, bias)
    steps = np.maximum(steps, (np.abs(values) / (scale * LARGEST_BIAS)).astype(np.float32))
    step = steps * np.float32(scale)
    _store(model, bias, np.rint(values / step.astype(np.float64)).astype(np.int32), TYPE.INT32)
    bias.quantization = schema.QuantizationParametersT(
        scale=step, zeroPoint=np.zeros(len(step), np.int64), quantizedDimension=0
    )
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
    """Gives a tensor other values, in a buffer of its own: other tensors may have the same buffer."""
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
    subgraph.operators.insert(
        0,
        schema.OperatorT(
            opcodeIndex=_code_of_dequantize(model),
            inputs=[len(subgraph.tensors) - 1],
            outputs=[place],
            builtinOptionsType=schema.BuiltinOptions.DequantizeOptions,
            builtinOptions=schema.DequantizeOptionsT(),
        ),
    )


def _code_of_dequantize(model: Any) -> int:
    code, version = OPERATOR.DEQUANTIZE, 3
    for place, each in enumerate(model.operatorCodes):
        if each.builtinCode == code:
            each.version = max(each.version, version)
            return place
    model.operatorCodes.append(schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=version))
    return len(model.operatorCodes) - 1
