"""Reads an ONNX file. Shapes are inferred by onnx itself; no runtime loads the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from tfopt.exporting.inspection.contents import (
    BITS,
    Contents,
    Node,
    Operator,
    Storage,
    Weight,
    assumed,
    attention,
    convolution,
    packed_bytes,
    without_formula,
)
from tfopt.exporting.inspection.inlined import MOST_NODES
from tfopt.exporting.inspection.onnx_loops import bodies_of, constants_of, rounds_of, with_carried_shapes
from tfopt.exporting.manifest import TensorRecord
from tfopt.exporting.onnx.external import lies_beside, locations
from tfopt.profiling.cost.flops import einsum_multiply_adds

Shape = Sequence[int]
PAIR = ("QuantizeLinear", "DequantizeLinear")
STORED_TYPES = ("float", "double", "bfloat", "int8", "uint8", "int4", "uint4", "int2", "uint2")
INTERNAL = ("Constant", "Identity")
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators


def read(path: Path, open_size: int) -> Contents:
    """Reads the main graph and the bodies of its loops and branches."""
    model = onnx.load(str(path), load_external_data=False)
    if not model.graph.node or not model.opset_import:
        raise ValueError("it holds no graph of ONNX")
    model = _without_functions(model)
    graph = model.graph
    held = {each.name for each in graph.initializer}
    inputs = {each.name: _record(each) for each in graph.input if each.name not in held}
    sizes = {name: assumed(record.shape, open_size) for name, record in inputs.items() if record.shape is not None}
    external = locations(model)
    notes = [f"weights are in {', '.join(external)}, which is not read"] if external else []
    inferred, reason = _inferred(model, sizes)
    notes += [reason] if reason else []
    found = _Graph(inferred.graph, {}, {})
    domains = {each.domain: each.version for each in model.opset_import}
    return Contents(
        inputs=inputs,
        outputs={each.name: _record(each) for each in graph.output},
        operators=tuple(found.operators()),
        weights=tuple(found.weights.values()),
        versions={
            "ONNX": f"opset {', '.join(_opset(name, number) for name, number in domains.items())}, IR "
            f"{model.ir_version}",
            "written by": f"{model.producer_name} {model.producer_version}".strip() or "unknown",
        },
        sizes=sizes,
        outside=tuple(f"weights of {each!r} touch files" for each in external if not lies_beside(path, each)),
        open_loops=tuple(found.open_loops),
        notes=tuple(notes),
    )


def _without_functions(model: Any) -> Any:
    """Returns a model with the nodes of its functions in place of their calls."""
    if not model.functions:
        return model
    bodies = {(each.domain, each.name): each.node for each in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[Any], around: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in around:
                raise ValueError(f"its function {node.op_type} calls itself")
            if key in bodies and key not in sizes:
                sizes[key] = size(bodies[key], (*around, key))
            total += sizes.get(key, 1)
            total += sum(size(body.node, around) for body in bodies_of(node))
        return total

    if size(model.graph.node, ()) > MOST_NODES:
        raise ValueError(f"its functions hold more than {MOST_NODES:,} nodes")
    return onnx.inliner.inline_local_functions(model)


def _opset(domain: str, version: int) -> str:
    return f"{version} of {domain}" if domain else str(version)


def _record(value: Any) -> TensorRecord:
    tensor = value.type.tensor_type
    known = tensor.HasField("shape")
    shape = tuple(size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim)
    return TensorRecord(shape=shape if known else None, dtype=_dtype(tensor.elem_type))


def _dtype(number: int) -> str:
    """Returns the name of a type as NumPy has it."""
    name = TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64", "undefined": ""}.get(name, name)


def _inferred(model: Any, sizes: Mapping[str, Shape]) -> tuple[Any, str]:
    """Returns the model with the shapes of its tensors for one example, or as it is and why there are none."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for value in light.graph.input:
        for axis, size in enumerate(sizes.get(value.name, ())):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    del light.graph.value_info[:]
    try:
        return with_carried_shapes(light, partial(onnx.shape_inference.infer_shapes, data_prop=True)), ""
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return model, f"shapes are unknown: {str(error).splitlines()[0]}"


class _Graph:
    """One graph with its weights, and with the shapes and types of its tensors and of those around it."""

    def __init__(
        self,
        graph: Any,
        shapes: Mapping[str, Shape],
        types: Mapping[str, str],
        executions: int = 1,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph, self.executions = graph, executions
        self.shapes, self.types = dict(shapes), dict(types)
        self.dequantized: dict[str, str] = {}
        self.open_loops: list[str] = []
        self.inner: list[Operator] = []
        for value in (*graph.input, *graph.output, *graph.value_info):
            record = _record(value)
            self.types[value.name] = record.dtype
            if record.shape is not None and None not in record.shape:
                self.shapes[value.name] = tuple(size for size in record.shape if size is not None)
        names = [text for node in graph.node for text in (node.name, node.op_type, *node.input, *node.output)]
        if not all(isinstance(text, str) for text in names):
            raise ValueError("a name in it is not text")
        self.constants = constants_of(graph)
        self.known = {**(constants or {}), **self.constants}
        for name, tensor in self.constants.items():
            self.shapes[name], self.types[name] = tuple(tensor.dims), _dtype(tensor.data_type)
        self.weights = {each.name: each for each in self._weights()}

    def _weights(self) -> Iterator[Weight]:
        grids = {name for node in self.graph.node if node.op_type in PAIR for name in node.input[1:]}
        points = {
            node.input[0]: node.input[2] for node in self.graph.node if len(node.input) > 2 and node.op_type in PAIR
        }
        biases = {node.input[0] for node in self.graph.node if node.op_type == "DequantizeLinear"}
        for name, tensor in self.constants.items():
            dtype, count = self.types[name], math.prod(tensor.dims)
            if count < 2 or name in grids or not (dtype.startswith(STORED_TYPES) or name in biases):
                continue
            if tensor.data_location == TensorProto.EXTERNAL:
                bits = BITS.get(dtype, 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
                size = packed_bytes(count, bits)
                yield Weight(name=name, shape=tuple(tensor.dims), dtype=dtype, size_bytes=size)
            else:
                point = self.constants.get(points.get(name, ""))
                known = point is not None and point.data_location != TensorProto.EXTERNAL
                zero = np.unique(numpy_helper.to_array(point)) if known else np.zeros(1)
                values = numpy_helper.to_array(tensor)
                yield Weight.of(name, values, dtype, int(zero[0]) if zero.size == 1 else 0)

    def operators(self, around: Mapping[str, Iterable[str]] | None = None) -> list[Operator]:
        """Returns the operators. `around` has the weights of the tensors that a loop gives to its body."""
        own = self.weights.keys() & self.constants.keys()
        storage = Storage({**(around or {}), **{name: [name] if name in own else [] for name in self.constants}})
        found = []
        for node in self.graph.node:
            if node.output[0] in self.constants:
                continue
            operator = storage.operator(self._node(node))
            bodies = bodies_of(node)
            for body in bodies:
                self._enter(node, body, storage)
            if node.op_type not in INTERNAL:
                found.append(replace(operator, weights=()) if bodies else operator)
        return [*found, *self.inner]

    def _enter(self, node: Any, body: Any, storage: Storage) -> None:
        """Reads the body of a loop or a branch, which also sees the tensors around it."""
        inner = _Graph(body, self.shapes, self.types, self.executions * self._rounds(node), self.known)
        given = zip([each.name for each in body.input], node.input, strict=False)
        held = {name: weights for name, tensor in given if (weights := storage.of(tensor))}
        self.inner += inner.operators(storage.known | held)
        self.weights |= inner.weights
        self.open_loops += inner.open_loops

    def _node(self, node: Any) -> Node:
        if node.op_type == "DequantizeLinear":
            self.dequantized[node.output[0]] = self.types.get(node.input[0], "")
        return Node(
            name=node.name or node.output[0],
            kind=node.op_type,
            dtype=self._computes_in(node),
            reads=list(node.input),
            writes=list(node.output),
            multiply_adds=self._multiply_adds(node),
            executions=self.executions,
        )

    def _computes_in(self, node: Any) -> str:
        operands = [name for name in node.input if self.types.get(name, "float32").startswith(("float", "bfloat"))]
        operands = operands[:2] if node.op_type in COUNTED else operands
        if node.op_type not in PAIR and operands and all(name in self.dequantized for name in operands):
            return self.dequantized[operands[-1]]
        return self.types.get(node.output[0], "")

    def _rounds(self, node: Any) -> int:
        """Returns the rounds of a loop; 1 for any other node."""
        if node.op_type not in ("Loop", "Scan"):
            return 1
        if node.op_type == "Loop" and (rounds := rounds_of(node, self.graph, self.known)) is not None:
            return rounds
        scanned = next((each.i for each in node.attribute if each.name == "num_scan_inputs"), 0)
        if scanned and node.input[-1] in self.shapes:
            return int(self.shapes[node.input[-1]][0])
        self.open_loops.append(node.name or node.output[0])
        return 1

    def _multiply_adds(self, node: Any) -> int | None:
        count = COUNTED.get(f"{node.domain}.{node.op_type}", COUNTED.get(node.op_type))
        if count is None:
            return without_formula(node.op_type)
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        try:
            reads = [self.shapes[name] if name else () for name in node.input]
            return count(reads, self.shapes.get(node.output[0]), attributes)
        except (KeyError, IndexError, ZeroDivisionError, TypeError, ValueError):
            return None


Counter = Callable[[Sequence[Shape], Any, Mapping[str, Any]], int]
"""A formula for the shapes of the inputs, that of the result (None if onnx infers none), and the attributes."""


def _convolution(place: int) -> Counter:
    return lambda reads, result, _: convolution(result, reads[place], reads[place][0])


def _transposed(reads: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]) -> int:
    return convolution(reads[0], reads[1], reads[1][0])


def _product(reads: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]) -> int:
    return math.prod(result) * reads[0][-2 if attributes.get("transA") else -1]


def _recurrent(reads: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]) -> int:
    return reads[0][0] * reads[0][1] * (math.prod(reads[1]) + math.prod(reads[2]))


def _with_matrix(place: int) -> Counter:
    """Counts a product with the matrix of an input, whose result has no shape that onnx infers."""

    def count(reads: Sequence[Shape], result: Shape | None, attributes: Mapping[str, Any]) -> int:
        rows, columns = reads[place]
        return math.prod(reads[0]) * (rows if attributes.get("transB") else columns)

    return count


def _few_bits(reads: Sequence[Shape], result: Shape | None, attributes: Mapping[str, Any]) -> int:
    return math.prod(reads[0][:-1]) * int(attributes["K"]) * int(attributes["N"])


def _attention(reads: Sequence[Shape], result: Shape | None, attributes: Mapping[str, Any]) -> int:
    """Counts ONNX' attention, of heads on an axis of their own or side by side. What a cache holds is unknown."""
    query, key, value = reads[:3]
    if any(reads[4:6]):
        raise IndexError
    if len(query) == 4:
        return attention(query, key, value)
    heads = int(attributes["q_num_heads"])
    return attention(query, key, (heads * value[-1] // int(attributes["kv_num_heads"]),))


def _microsoft_attention(reads: Sequence[Shape], result: Shape | None, attributes: Mapping[str, Any]) -> int:
    """Counts attention after the product with the weights of queries, keys and values."""
    if any(reads[4:5]):
        raise IndexError
    (batch, steps, values), (_, columns) = reads[:2]
    query, key, value = attributes.get("qkv_hidden_sizes") or [columns // 3] * 3
    shapes = ((batch, steps, size) for size in (query, key, value))
    return batch * steps * values * columns + attention(*shapes)


def _microsoft_heads(reads: Sequence[Shape], result: Shape | None, attributes: Mapping[str, Any]) -> int:
    if any(reads[6:8]) or any(len(shape) != 3 for shape in reads[:3]):
        raise IndexError
    return attention(*reads[:3])


def _einsum(reads: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]) -> int:
    return einsum_multiply_adds(attributes["equation"].decode().replace(" ", ""), [*reads, result])


COUNTED: dict[str, Counter] = {
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "DeformConv"), _convolution(1)),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed,
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulInteger", "QLinearMatMul"), _product),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _with_matrix(1)),
    "QGemm": _with_matrix(3),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _few_bits),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrent),
    "Attention": _attention,
    f"{MICROSOFT}.Attention": _microsoft_attention,
    "MultiHeadAttention": _microsoft_heads,
    "Einsum": _einsum,
}
