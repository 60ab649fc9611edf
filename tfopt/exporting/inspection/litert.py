"""Reads a LiteRT file with the schema of its flatbuffer; no interpreter loads the file.

The file stores the shapes of its tensors with every open size as 1, and the multiply-adds are those of these shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tfopt.exporting.inspection.contents import (
    Contents,
    Node,
    Operator,
    Storage,
    Weight,
    convolution,
    rounds_between,
    without_formula,
)
from tfopt.exporting.manifest import TensorRecord

Shape = Sequence[int]
TYPES = {number: name.lower() for name, number in vars(schema.TensorType).items() if isinstance(number, int)}
KINDS = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}
IDENTIFIER = b"TFL3"
CUSTOM = "CUSTOM"
FLEX = "Flex"
BODIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "WHILE": ("WhileOptions", ("BodySubgraphIndex",)),
    "IF": ("IfOptions", ("ThenSubgraphIndex", "ElseSubgraphIndex")),
    "CALL_ONCE": ("CallOnceOptions", ("InitSubgraphIndex",)),
}


def read(path: Path, open_size: int) -> Contents:
    """Reads the first graph of a file, and those that its loops and branches use."""
    content = path.read_bytes()
    if content[4:8] != IDENTIFIER:
        raise ValueError("it is not a LiteRT flatbuffer")
    model = schema.Model.GetRootAs(content, 0)
    graph = _Graph(model, 0, ())
    main = graph.graph
    names = _signature_names(model)
    inputs = {name: number for number, name in _named(main.InputsAsNumpy(), graph, names[0])}
    outputs = {name: number for number, name in _named(main.OutputsAsNumpy(), graph, names[1])}
    records = {name: graph.record(number) for name, number in inputs.items()}
    found = graph.operators()
    open_sizes = any(record.shape and None in record.shape[1:] for record in records.values())
    notes = ["the file holds shapes for open sizes of 1 only, so these count"] if open_sizes else []
    custom = sorted({each.kind for each in found if each.kind.startswith(CUSTOM)})
    return Contents(
        inputs=records,
        outputs={name: graph.record(number) for name, number in outputs.items()},
        operators=tuple(found),
        weights=tuple(graph.weights.values()),
        versions={"LiteRT": f"schema {model.Version()}", "written by": _text(model.Description()) or "unknown"},
        sizes={name: graph.shape(number) for name, number in inputs.items()},
        outside=tuple(_why_outside(kind) for kind in custom),
        open_loops=tuple(graph.open_loops),
        notes=tuple(notes),
    )


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _why_outside(kind: str) -> str:
    name = kind[len(CUSTOM) + 1 : -1]
    if name.startswith(FLEX):
        return f"{name} runs TensorFlow's {name.removeprefix(FLEX)}: a runtime needs the Flex delegate"
    return f"{name} is an operator of its own: a runtime needs the code for it"


def _signature_names(model: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the names of inputs and outputs in the signature of the first graph, by the numbers of their tensors."""
    for number in range(model.SignatureDefsLength()):
        signature = model.SignatureDefs(number)
        if signature.SubgraphIndex() == 0:
            inputs = [signature.Inputs(place) for place in range(signature.InputsLength())]
            outputs = [signature.Outputs(place) for place in range(signature.OutputsLength())]
            return (
                {each.TensorIndex(): _text(each.Name()) for each in inputs},
                {each.TensorIndex(): _text(each.Name()) for each in outputs},
            )
    return {}, {}


def _named(numbers: Any, graph: _Graph, names: dict[int, str]) -> Iterator[tuple[int, str]]:
    for number in _integers(numbers):
        yield number, names.get(number) or graph.name(number)


def _integers(values: Any) -> list[int]:
    """Returns the items of a vector; a missing one is 0 in the schema's code."""
    return [int(value) for value in np.atleast_1d(values)] if isinstance(values, np.ndarray) else []


class _Graph:
    """One of a model's graphs, with its weights and those of the graphs inside of it."""

    def __init__(self, model: Any, number: int, around: tuple[int, ...], executions: int = 1) -> None:
        if number in around or not 0 <= number < model.SubgraphsLength():
            raise ValueError(f"its graph {number} is missing, or is a part of itself")
        self.model, self.around, self.executions = model, (*around, number), executions
        self.graph = model.Subgraphs(number)
        self.prefix = f"{number}:" if around else ""
        self.open_loops: list[str] = []
        self.sources: dict[int, int] = {}  # what a reshaped tensor was: an open size is 1 in its shape in the file
        self.inner: list[Operator] = []
        self.tensors = [self.graph.Tensors(place) for place in range(self.graph.TensorsLength())]
        self.data = dict(self._stored())
        self.weights = {each.name: each for each in self._weights()}

    def name(self, number: int) -> str:
        return self.prefix + (_text(self.tensors[number].Name()) or str(number))

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(_integers(self.tensors[number].ShapeAsNumpy()))

    def dtype(self, number: int) -> str:
        return TYPES[self.tensors[number].Type()]

    def record(self, number: int) -> TensorRecord:
        signature = _integers(self.tensors[number].ShapeSignatureAsNumpy())
        shape = signature or self.shape(number)
        return TensorRecord(shape=tuple(None if size < 0 else size for size in shape), dtype=self.dtype(number))

    def _stored(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the bytes of each constant, by the number of its tensor."""
        for place, tensor in enumerate(self.tensors):
            buffer = self.model.Buffers(tensor.Buffer()) if tensor.Buffer() < self.model.BuffersLength() else None
            if buffer is None:
                raise ValueError(f"the values of {self.name(place)!r} are missing")
            if buffer.DataLength():
                yield place, buffer.DataAsNumpy()

    def _weights(self) -> Iterator[Weight]:
        for place, array in self.data.items():
            name, shape, dtype = self.name(place), self.shape(place), self.dtype(place)
            grid = self.tensors[place].Quantization()
            in_steps = grid is not None and grid.ScaleLength() > 0
            if math.prod(shape) < 2 or not (dtype.startswith(("float", "bfloat", "int8", "int4", "int2")) or in_steps):
                continue
            if self.tensors[place].Sparsity() is not None or dtype in ("int2", "uint4", "float8_e4m3fn", "float8_e5m2"):
                yield Weight(name=name, shape=shape, dtype=dtype, size_bytes=array.nbytes)
            elif dtype == "int4":  # two in a byte
                values = np.stack([array & 15, array >> 4], axis=-1).reshape(-1)[: math.prod(shape)]
                zeros = int(values.size - np.count_nonzero(values))
                yield Weight(name=name, shape=shape, dtype=dtype, size_bytes=array.nbytes, zeros=zeros)
            else:
                kind = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
                points = _integers(grid.ZeroPointAsNumpy()) if in_steps else []
                point = points[0] if len(set(points)) == 1 else 0
                yield Weight.of(name, array.view(kind).reshape(shape), dtype, point)

    def operators(self) -> list[Operator]:
        names = [self.name(place) for place in self.data]
        storage = Storage({name: [name] if name in self.weights else [] for name in names})
        nodes = (self._node(self.graph.Operators(place)) for place in range(self.graph.OperatorsLength()))
        return [*map(storage.operator, nodes), *self.inner]

    def kind(self, operator: Any) -> str:
        code = self._code(operator)
        return KINDS[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]

    def _code(self, operator: Any) -> Any:
        return self.model.OperatorCodes(operator.OpcodeIndex())

    def _node(self, operator: Any) -> Node:
        kind = self.kind(operator)
        reads, writes = (_integers(each) for each in (operator.InputsAsNumpy(), operator.OutputsAsNumpy()))
        self._enter(operator, kind, reads, writes)
        if kind in PASSED_ON:
            self.sources[writes[0]] = self.sources.get(reads[0], reads[0])
        return Node(
            name=self.name(writes[0]) if writes else kind,
            kind=f"{CUSTOM}({_text(self._code(operator).CustomCode())})" if kind == CUSTOM else kind,
            dtype=self.dtype(writes[0]) if writes else "",
            reads=[self.name(number) for number in reads if number >= 0],
            writes=[self.name(number) for number in writes],
            multiply_adds=self._multiply_adds(operator, kind, reads, writes),
            executions=self.executions,
        )

    def _enter(self, operator: Any, kind: str, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Reads the graphs of a loop or a branch."""
        if kind not in BODIES:
            return
        options, indices = BODIES[kind]
        held = getattr(schema, options)()
        held.Init(operator.BuiltinOptions().Bytes, operator.BuiltinOptions().Pos)
        rounds = self._rounds(held, reads) if kind == "WHILE" else 1
        if rounds is None:
            self.open_loops.append(self.name(writes[0]) if writes else kind)
        executions = self.executions * (1 if rounds is None else rounds)
        for index in indices:
            inside = _Graph(self.model, getattr(held, index)(), self.around, executions)
            self.inner += inside.operators()
            self.weights |= inside.weights
            self.open_loops += inside.open_loops

    def _rounds(self, held: Any, reads: Sequence[int]) -> int | None:
        """Returns the rounds of a loop whose condition compares a counter with a known number; else None."""
        condition = _Graph(self.model, held.CondSubgraphIndex(), self.around)
        body = _Graph(self.model, held.BodySubgraphIndex(), self.around)
        arguments = _integers(condition.graph.InputsAsNumpy())

        def always(tensor: int) -> int | None:
            if tensor not in arguments:
                return condition._number(tensor)
            place = arguments.index(tensor)
            return self._number(reads[place]) if body.graph.Outputs(place) == body.graph.Inputs(place) else None

        found = []
        for each in range(condition.graph.OperatorsLength()):
            operator = condition.graph.Operators(each)
            counter, limit = (
                (operator.Inputs(0), operator.Inputs(1)) if condition.kind(operator) == "LESS" else (-1, -1)
            )
            if counter in arguments:
                place = arguments.index(counter)
                found.append(rounds_between(self._number(reads[place]), always(limit), body._step(place)))
        return min((rounds for rounds in found if rounds is not None), default=None)

    def _number(self, tensor: int) -> int | None:
        """Returns the integer that a tensor always is; None for any other."""
        if (
            tensor not in self.data
            or math.prod(self.shape(tensor)) != 1
            or self.dtype(tensor) not in ("int32", "int64")
        ):
            return None
        return int(self.data[tensor].view(self.dtype(tensor))[0])

    def _step(self, place: int) -> int | None:
        """Returns what this graph, the body of a loop, adds to one of its inputs; None if that is no constant."""
        counter, result = self.graph.Inputs(place), self.graph.Outputs(place)
        for number in range(self.graph.OperatorsLength()):
            operator = self.graph.Operators(number)
            if self.kind(operator) == "ADD" and operator.Outputs(0) == result:
                one, other = operator.Inputs(0), operator.Inputs(1)
                return self._number(other if one == counter else one) if counter in (one, other) else None
        return None

    def _multiply_adds(self, operator: Any, kind: str, reads: Sequence[int], writes: Sequence[int]) -> int | None:
        count = COUNTED.get(kind)
        if kind == "BATCH_MATMUL":
            held = schema.BatchMatMulOptions()
            held.Init(operator.BuiltinOptions().Bytes, operator.BuiltinOptions().Pos)
            return math.prod(self.shape(writes[0])) * self.shape(reads[0])[-2 if held.AdjX() else -1]
        if count is None:
            return None if kind == CUSTOM else without_formula(kind)
        try:
            shapes = [self.shape(number) if number >= 0 else () for number in reads]
            source = self.shape(self.sources.get(reads[0], reads[0])) if kind in OF_EXAMPLES else shapes[0]
            return count(shapes, self.shape(writes[0])) * max(math.prod(source) // math.prod(shapes[0]), 1)
        except (IndexError, ZeroDivisionError):
            return None


def _recurrent(reads: Sequence[Shape], result: Shape) -> int:
    """Counts each product with a matrix, once for each step and example of the result."""
    return math.prod(reads[0][:-1]) * sum(math.prod(shape) for shape in reads[1:] if len(shape) == 2 and shape[0] > 1)


# What follows a reshape, and keeps its open size, and the products that may take the steps of a sequence as examples.
PASSED_ON = ("RESHAPE", "QUANTIZE", "DEQUANTIZE")
OF_EXAMPLES = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D")
COUNTED: dict[str, Callable[[Sequence[Shape], Shape], int]] = {
    "CONV_2D": lambda reads, result: convolution(result, reads[1], reads[1][0]),
    "CONV_3D": lambda reads, result: convolution(result, reads[1], reads[1][-1]),
    "DEPTHWISE_CONV_2D": lambda reads, result: convolution(result, reads[1], reads[1][-1]),
    "CONV_3D_TRANSPOSE": lambda reads, result: convolution(reads[2], reads[1], reads[1][-1]),
    "TRANSPOSE_CONV": lambda reads, result: convolution(reads[2], reads[1], reads[1][-1]),
    "FULLY_CONNECTED": lambda reads, result: math.prod(reads[0]) * reads[1][0],
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lambda reads, result: _recurrent([*reads[:9], *reads[16:17]], result),
    "UNIDIRECTIONAL_SEQUENCE_RNN": lambda reads, result: _recurrent(reads[:3], result),
    "RNN": lambda reads, result: _recurrent(reads[:3], result),
    "SVDF": lambda reads, result: reads[0][0] * (math.prod(reads[1]) + math.prod(reads[2])),
}
