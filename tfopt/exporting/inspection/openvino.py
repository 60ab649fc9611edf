"""Reads a model of OpenVINO: an .xml file with a .bin file beside it. OpenVINO infers shapes and compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.exporting.formats import without_telemetry
from tfopt.exporting.inspection.contents import (
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
from tfopt.exporting.manifest import TensorRecord
from tfopt.profiling.cost.flops import einsum_multiply_adds

with without_telemetry():
    from openvino.frontend import FrontEndManager

Shape = Sequence[int]
WEIGHTS = ".bin"
INTERNAL = ("Constant", "Parameter", "Result")
TYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
# Between a product and the integers that it reads: a pair of quantize and dequantize in OpenVINO's own operations.
DEQUANTIZES = ("Convert", "Subtract", "Multiply", "Reshape", "Transpose")
GRIDS = ("Subtract", "Multiply")
PACKED = ("int4", "uint4", "nf4", "uint1", "uint2", "uint3", "uint6")
UNREAD = ("float8", "float4")  # NumPy has no such types

BODIES = ("TensorIterator", "Loop", "If")


def read(path: Path, open_size: int) -> Contents:
    """Reads the main graph. The bodies of loops and branches are not read, and a note says so."""
    if not path.with_suffix(WEIGHTS).is_file():
        raise ValueError(f"{path.with_suffix(WEIGHTS).name} is missing beside it")
    frontend = FrontEndManager().load_by_framework("ir")  # Core.read_model would try other formats too
    model = frontend.convert(frontend.load(str(path)))
    inputs = {_name(port): _record(port) for port in model.inputs}
    outputs = {_name(port): _record(port) for port in model.outputs}
    sizes = {name: assumed(each.shape, open_size) for name, each in inputs.items() if each.shape is not None}
    notes = []
    try:
        model.reshape({place: list(sizes[name]) for place, name in enumerate(inputs) if name in sizes})
    except RuntimeError as error:
        notes.append(f"shapes are unknown: {_reason(error)}")
    graph = _Graph(model)
    found = tuple(graph.operators())
    return Contents(
        inputs=inputs,
        outputs=outputs,
        operators=found,
        weights=tuple(graph.weights.values()),
        versions={"written by": _writer(model)},
        sizes=sizes,
        notes=(*notes, *graph.notes),
    )


def _reason(error: Exception) -> str:
    """Returns the last line of OpenVINO's message; the first name places in its source code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _writer(model: Any) -> str:
    try:
        return f"OpenVINO {model.get_rt_info('Runtime_version').astype(str)}"
    except RuntimeError:
        return "OpenVINO, unknown version"


def _name(port: Any) -> str:
    names = sorted(port.get_names())
    return names[0] if names else port.get_node().get_friendly_name()


def _dtype(port: Any) -> str:
    name = port.get_element_type().get_type_name()
    if name in TYPES:
        return TYPES[name]
    if name.startswith(("f8", "f4")):
        return f"float{name[1:]}"
    return f"{'int' if name[0] == 'i' else 'uint'}{name[1:]}" if name[1:].isdecimal() else name


def _record(port: Any) -> TensorRecord:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return TensorRecord(shape=None, dtype=_dtype(port))
    return TensorRecord(
        shape=tuple(None if size.is_dynamic else size.get_length() for size in shape), dtype=_dtype(port)
    )


def _shape(port: Any) -> tuple[int, ...]:
    """Returns a shape. Raises ValueError if a size is open."""
    shape = port.get_partial_shape()
    if shape.is_dynamic:
        raise ValueError(f"{shape} is open")
    return tuple(shape.to_shape())


def _tensor(port: Any) -> str:
    return f"{port.get_node().get_name()}:{port.get_index()}"


class _Graph:
    """One graph, with its weights."""

    def __init__(self, model: Any) -> None:
        self.nodes = model.get_ordered_ops()
        self.notes: list[str] = []
        self.integers: dict[str, str] = {}  # the type of the integers that a tensor was dequantized from
        self.weights = {each.name: each for each in self._weights()}

    def _weights(self) -> Iterator[Weight]:
        for node in self.nodes:
            if node.get_type_name() != "Constant":
                continue
            dtype, shape = _dtype(node.output(0)), _shape(node.output(0))
            if math.prod(shape) < 2 or not (dtype.startswith(("float", "bfloat", "int8", "uint8")) or dtype in PACKED):
                continue
            if all(_is_grid(reader) for reader in node.output(0).get_target_inputs()):
                continue
            name = _tensor(node.output(0))
            if dtype in PACKED or dtype.startswith(UNREAD):
                size = packed_bytes(math.prod(shape), node.get_element_type().bitwidth)
                yield Weight(name=name, shape=shape, dtype=dtype, size_bytes=size)
            else:
                yield Weight.of(name, np.asarray(node.get_data()).reshape(shape), dtype, _zero_point(node))

    def operators(self) -> list[Operator]:
        constants = [_tensor(node.output(0)) for node in self.nodes if node.get_type_name() == "Constant"]
        storage = Storage({name: [name] if name in self.weights else [] for name in constants})
        nodes = (self._node(node) for node in self.nodes if node.get_type_name() not in INTERNAL)
        return list(map(storage.operator, nodes))

    def _node(self, node: Any) -> Node:
        sources = [port.get_source_output() for port in node.inputs()]
        writes = [_tensor(port) for port in node.outputs()]
        self._dequantizes(node, sources, writes)
        return Node(
            name=node.get_friendly_name(),
            kind=node.get_type_name(),
            dtype=self._computes_in(node, sources),
            reads=[_tensor(port) for port in sources],
            writes=writes,
            multiply_adds=self._multiply_adds(node, sources),
        )

    def _dequantizes(self, node: Any, sources: Sequence[Any], writes: Sequence[str]) -> None:
        """Notes which tensors are dequantized integers: on the grid of a FakeQuantize, or converted from 8 bits."""
        kind = node.get_type_name()
        if kind == "FakeQuantize":
            levels = node.get_attributes().get("levels", 0)
            if levels <= 256:
                self.integers[writes[0]] = "int8"
        elif kind in DEQUANTIZES:
            dtype = _dtype(sources[0])
            found = self.integers.get(_tensor(sources[0]), dtype if dtype in ("int8", "uint8") else "")
            if found:
                self.integers[writes[0]] = found

    def _computes_in(self, node: Any, sources: Sequence[Any]) -> str:
        kind = node.get_type_name()
        operands = sources[:2] if kind in COUNTED else [each for each in sources if _dtype(each).startswith("float")]
        held = [self.integers.get(_tensor(each), "") for each in operands]
        if operands and all(held) and kind not in (*DEQUANTIZES, "FakeQuantize"):
            return held[-1]
        return _dtype(node.output(0))

    def _multiply_adds(self, node: Any, sources: Sequence[Any]) -> int | None:
        if node.get_type_name() in BODIES:
            self.notes.append(f"{node.get_friendly_name()}: its body, with the weights in it, is not read")
            return None
        count = COUNTED.get(node.get_type_name())
        if count is None:
            return without_formula(node.get_type_name())
        try:
            shapes = [_shape(port) for port in sources]
            return count(shapes, _shape(node.output(0)), node.get_attributes())
        except (ValueError, IndexError, ZeroDivisionError):
            return None


def _is_grid(reader: Any) -> bool:
    """Whether an input of a node takes a scale, a zero point or a range."""
    node, place = reader.get_node(), reader.get_index()
    if node.get_type_name() == "FakeQuantize":
        return place > 0
    if node.get_type_name() in ("Convert", "Reshape") and place == 0:  # of a zero point, or for each channel
        return all(_is_grid(each) for each in node.output(0).get_target_inputs())
    if node.get_type_name() not in GRIDS or place != 1:
        return False
    before = node.input_value(0).get_node()
    return before.get_type_name() in ("Convert", "Subtract") and _comes_from_integers(before)


def _comes_from_integers(node: Any) -> bool:
    if node.get_type_name() == "Subtract":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Convert":
        return False
    dtype = _dtype(node.input_value(0))
    return dtype in ("int8", "uint8", *PACKED) or dtype.startswith(UNREAD)


def _zero_point(constant: Any) -> int:
    """Returns the zero point that is subtracted from integers, if it is one number; else 0."""
    for reader in constant.output(0).get_target_inputs():
        for inner in reader.get_node().output(0).get_target_inputs():
            if inner.get_node().get_type_name() == "Subtract" and inner.get_index() == 0:
                point = inner.get_node().input_value(1).get_node()
                point = point.input_value(0).get_node() if point.get_type_name() == "Convert" else point
                values = np.unique(np.asarray(point.get_data())) if point.get_type_name() == "Constant" else np.zeros(0)
                if values.size == 1:
                    return int(values[0])
    return 0


Counter = Callable[[Sequence[Shape], Shape, Mapping[str, Any]], int]


def _recurrent(place: int) -> Counter:
    """Counts the products of a sequence [batch, steps, values], or of one step, with two matrices from `place` on."""

    def count(reads: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]) -> int:
        return math.prod(reads[0][:-1]) * sum(math.prod(each) for each in reads[place : place + 2])

    return count


COUNTED: dict[str, Counter] = {
    "Convolution": lambda reads, result, _: convolution(result, reads[1], reads[1][0]),
    "GroupConvolution": lambda reads, result, _: convolution(result, reads[1], reads[1][0] * reads[1][1]),
    "ConvolutionBackpropData": lambda reads, result, _: convolution(reads[0], reads[1], reads[1][0]),
    "GroupConvolutionBackpropData": lambda reads, result, _: convolution(reads[0], reads[1], reads[1][0] * reads[1][1]),
    "MatMul": lambda reads, result, has: math.prod(result) * reads[0][-2 if has.get("transpose_a") else -1],
    "Einsum": lambda reads, result, has: einsum_multiply_adds(has["equation"], [*reads, result]),
    "ScaledDotProductAttention": lambda reads, result, _: attention(*reads[:3]),
    "LSTMSequence": _recurrent(4),
    "GRUSequence": _recurrent(3),
    "RNNSequence": _recurrent(3),
    "LSTMCell": _recurrent(3),
    "GRUCell": _recurrent(2),
    "RNNCell": _recurrent(2),
}
