"""Reads a SavedModel from its protobuf and its checkpoint. It is not loaded: no function or initialiser of it runs.

Shapes are those that TensorFlow infers for one example when it reads the graph. For that it may compute small
constants, so a graph that reaches outside of the model is not given to it, and has no multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import parse_saved_model
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.inspection.contents import Contents, Node, Operator, Storage, Weight, assumed, rounds_between
from tfopt.exporting.inspection.inlined import MOST_NODES, Inlined
from tfopt.exporting.inspection.shapes import Shapes, placeholder
from tfopt.exporting.manifest import TensorRecord
from tfopt.graph.edit import attribute, functions_of, producer, upstream
from tfopt.graph.unsafe_ops import touched, unsafe_nodes
from tfopt.profiling.cost.flops import COUNTED
from tfopt.profiling.cost.walk import BRANCHES, LOOPS
from tfopt.report.receipt import INT8_KERNELS

QUANTIZED = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint32: tf.int32}
STORED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.qint8, tf.quint8)
VARIABLES = ("VarHandleOp", "VariableV2")
SOURCES = ("Const", "Placeholder", *VARIABLES)
LARGEST_FILLED = 2**26  # values
PASSED_ON = ("Identity", "IdentityN", "ReadVariableOp", "NoOp")


def read(path: Path, open_size: int) -> Contents:
    """Reads the signature "serving_default", or the first where there is no such signature."""
    directory = path if path.is_dir() else path.parent
    saved = parse_saved_model(str(directory))
    meta = next((each for each in saved.meta_graphs if "serve" in each.meta_info_def.tags), saved.meta_graphs[0])
    signatures = {name: each for name, each in meta.signature_def.items() if each.outputs and not name.startswith("__")}
    if not signatures:
        raise ValueError("it has no signature")
    chosen = DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in signatures else min(signatures)
    signature = signatures[chosen]
    inputs = {name: _record(each) for name, each in sorted(signature.inputs.items())}
    outputs = {name: _record(each) for name, each in sorted(signature.outputs.items())}
    sizes = {name: assumed(each.shape, open_size) for name, each in inputs.items() if each.shape is not None}
    graph = _Graph(meta, directory)
    fed = {
        (node := producer(each.name)): placeholder(node, each.dtype, sizes.get(name))
        for name, each in signature.inputs.items()
    }
    graph.read([each.name for each in signature.outputs.values()], fed)
    unsafe = dict.fromkeys(unsafe_nodes(saved, directory))
    others = sorted(signatures.keys() - {chosen})
    return Contents(
        inputs=inputs,
        outputs=outputs,
        operators=tuple(graph.operators),
        weights=graph.weights,
        versions={"written by": f"TensorFlow {meta.meta_info_def.tensorflow_version or '(unknown version)'}"},
        sizes=sizes,
        outside=tuple(f"{op} at {node!r} touches {what}" for node, op, what in unsafe),
        open_loops=tuple(dict.fromkeys(graph.open_loops)),
        notes=(*([f"signature {chosen}; others: {', '.join(others)}"] if others else []), *dict.fromkeys(graph.notes)),
    )


def _record(info: Any) -> TensorRecord:
    sizes = tuple(None if size.size < 0 else size.size for size in info.tensor_shape.dim)
    return TensorRecord(shape=None if info.tensor_shape.unknown_rank else sizes, dtype=tf.as_dtype(info.dtype).name)


class _Graph:
    """What a signature computes, with the bodies of its loops and branches."""

    def __init__(self, meta: Any, directory: Path) -> None:
        self.nodes = {node.name: node for node in meta.graph_def.node}
        self.functions = {each.signature.name: each for each in meta.graph_def.library.function}
        self.restore_op, self.checkpoint = meta.saver_def.restore_op_name, directory / "variables" / "variables"
        self.operators: list[Operator] = []
        self._noted: dict[tuple[str, str], Weight] = {}
        self.open_loops: list[str] = []
        self.notes: list[str] = []

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(self._noted.values())

    def read(self, ends: list[str], fed: Mapping[str, Any]) -> None:
        inlined = Inlined(self.functions)
        ends = inlined.add_graph(self.nodes, ends)
        self._add(inlined, ends, fed, {}, 1)

    def _add(
        self,
        inlined: Inlined,
        ends: list[str],
        fed: Mapping[str, Any],
        known: Mapping[str, tuple[str, ...]],
        rounds: int,
    ) -> None:
        """Adds the operators that `ends` need. `known` has the weights that tensors from around the graph hold."""
        needed = upstream(inlined.nodes, ends)
        if len(inlined.origins) > len(inlined.nodes):
            self.notes.append("loops of TensorFlow 1 are not read")
        nodes = {name: node for name, node in inlined.nodes.items() if name in needed and name not in fed}
        reaches = any(touched(node) for node in self._with_bodies(nodes))
        shapes = Shapes({} if reaches else nodes, {} if reaches else fed)
        ranges = {producer(each) for node in nodes.values() if node.op in INT8_KERNELS for each in node.input[3:]}
        held = {
            name: None if name in ranges else self._weight(name, node, inlined)
            for name, node in nodes.items()
            if node.op in SOURCES
        }
        storage = Storage({**known, **{name: [weight] if weight else [] for name, weight in held.items()}})
        for name, node in nodes.items():
            if name in held:
                continue
            operation = shapes.operations.get(name)
            results = range(1, max(len(operation.outputs) if operation else 0, 8))
            operator = storage.operator(
                Node(
                    name=inlined.origins[name][1],
                    kind=node.op,
                    dtype=_dtype(node, operation),
                    reads=node.input,
                    writes=[name, *(f"{name}:{place}" for place in results)],
                    multiply_adds=shapes.multiply_adds(node),
                    executions=rounds,
                )
            )
            has_bodies = node.op in LOOPS or node.op in BRANCHES
            if node.op not in PASSED_ON:
                self.operators.append(replace(operator, weights=()) if has_bodies else operator)  # the bodies read them
            if has_bodies:
                self._enter(node, operator.name, shapes, storage, rounds)
        self.notes += [REACHES] if reaches else shapes.notes

    def _enter(self, node: Any, name: str, shapes: Shapes, storage: Storage, rounds: int) -> None:
        """Adds the operators in the bodies of a loop or a branch."""
        if len(self.operators) > MOST_NODES:
            raise ValueError(f"its loops and branches hold more than {MOST_NODES:,} nodes")
        functions, inputs = functions_of(node), node.input[1:]
        if node.op in LOOPS:
            functions, inputs = [node.attr["body"].func.name], node.input
            own_rounds = self._rounds(node, shapes)
            if own_rounds is None:
                self.open_loops.append(name)
            rounds *= 1 if own_rounds is None else own_rounds
        else:
            self.notes.append(f"{name}: each of its branches counts")
        for function in functions:
            inlined, ends, arguments = self._body(node, function)
            given = list(zip(arguments, inputs, self.functions[function].signature.input_arg, strict=True))
            held = {argument: weights for argument, tensor, _ in given if (weights := storage.of(tensor))}
            fed = {argument: _fed(argument, shapes.tensor(tensor), spec.type) for argument, tensor, spec in given}
            self._add(inlined, ends, fed, held, rounds)

    def _body(self, node: Any, function: str) -> tuple[Inlined, list[str], list[str]]:
        """Returns a function that a node runs, its results, and the names of its arguments."""
        count = len(self.functions[function].signature.input_arg)
        arguments = [f"{node.name}/argument_{place}" for place in range(count)]
        inlined = Inlined(self.functions)
        return inlined, inlined.add_function(function, arguments), arguments

    def _rounds(self, node: Any, shapes: Shapes) -> int | None:
        """Returns the rounds of a loop whose condition compares a counter with a known number; else None."""
        condition, _, arguments = self._body(node, node.attr["cond"].func.name)
        body, ends, _ = self._body(node, node.attr["body"].func.name)

        def first(argument: str) -> int | None:
            return shapes.number(shapes.tensor(node.input[arguments.index(argument)]))

        def always(tensor: str) -> int | None:
            if tensor not in arguments:
                return _constant(condition, tensor)
            return first(tensor) if _origin(body, ends[arguments.index(tensor)]) == tensor else None

        found = []
        for each in condition.nodes.values():
            counter, limit = (_origin(condition, name) for name in each.input) if each.op == "Less" else ("", "")
            if counter in arguments:
                step = _step(body, counter, ends[arguments.index(counter)])
                found.append(rounds_between(first(counter), always(limit), step))
        return min((rounds for rounds in found if rounds is not None), default=None)

    def _with_bodies(self, nodes: Mapping[str, Any]) -> Iterator[Any]:
        """Yields nodes and those of all functions that they may run."""
        waiting, seen = list(nodes.values()), set[str]()
        while waiting:
            node = waiting.pop()
            yield node
            for name in {node.op, *functions_of(node)} & self.functions.keys() - seen:
                seen.add(name)
                waiting += self.functions[name].node_def

    def _weight(self, name: str, node: Any, inlined: Inlined) -> str | None:
        """Returns the name of the weight that a node holds, and notes it; None for any other node."""
        origin = inlined.origins[name]
        if origin in self._noted:  # its function is called twice
            return self._noted[origin].name
        dtype = tf.as_dtype(attribute(node, "dtype").type or tf.float32)
        if dtype not in STORED or node.op == "Placeholder":
            return None
        if node.op in VARIABLES:
            weight = self._variable(origin[1], node, dtype)
        else:
            tensor = node.attr["value"].tensor
            shape = tf.TensorShape(tensor.tensor_shape)
            count = shape.num_elements() or 0
            if count < 2:
                return None
            if count > LARGEST_FILLED and not tensor.tensor_content:  # one value that fills a tensor of any size
                return self._note(origin, _unread(origin[1], shape, dtype))
            weight = self._of_array(origin[1], tf.make_ndarray(tensor), dtype)
        return self._note(origin, weight)

    def _note(self, origin: tuple[str, str], weight: Weight) -> str:
        if any(weight.name == each.name for each in self._noted.values()):
            weight = replace(weight, name="/".join(origin))
        self._noted[origin] = weight
        return weight.name

    def _of_array(self, name: str, values: Any, dtype: Any) -> Weight:
        return Weight.of(name, values.view(np.int8) if dtype == tf.qint8 else values, _plain(dtype))

    def _variable(self, name: str, node: Any, dtype: Any) -> Weight:
        key = self._keys.get(name)
        if key is not None and self._reader is not None and self._reader.has_tensor(key):
            return self._of_array(key.removesuffix(VALUE), self._reader.get_tensor(key), dtype)
        return _unread(name, tf.TensorShape(attribute(node, "shape").shape), dtype)

    @cached_property
    def _reader(self) -> Any:
        found = self.checkpoint.with_name(f"{self.checkpoint.name}.index").is_file()
        return tf.train.load_checkpoint(str(self.checkpoint)) if found else None

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Returns the key in the checkpoint of each variable, as the graph restores it."""
        if not self.restore_op:
            return {}
        inlined = Inlined(self.functions)
        inlined.add_graph(self.nodes, [self.restore_op])
        found = {}
        for node in inlined.nodes.values():
            if node.op not in ("AssignVariableOp", "Assign"):
                continue
            tensor = node.input[1]
            while (source := inlined.nodes[producer(tensor)]).op == "Identity":
                tensor = source.input[0]
            names = inlined.nodes[producer(source.input[1])] if source.op == "RestoreV2" else None
            if names is not None and names.op == "Const":
                keys = tf.make_ndarray(names.attr["value"].tensor).reshape(-1)
                found[producer(node.input[0])] = keys[int(tensor.partition(":")[2] or 0)].decode()
        return found


def _fed(name: str, outer: Any, dtype: Any) -> Any:
    """Returns the node in a body for a tensor from around it: the variable itself, or a placeholder of its shape."""
    while outer is not None and outer.op.type == "Identity":
        outer = outer.op.inputs[0]
    if outer is None or outer.op.type != "VarHandleOp":
        return placeholder(name, dtype, None if outer is None else outer.shape)
    node = outer.op.node_def
    node.name = name
    return node


REACHES = "it reaches outside of the model, so TensorFlow is not asked for its shapes"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def _unread(name: str, shape: tf.TensorShape, dtype: Any) -> Weight:
    """Returns the record of a weight whose values are not read."""
    size = (shape.num_elements() or 0) * dtype.size
    return Weight(name=name, shape=tuple(shape.as_list()), dtype=_plain(dtype), size_bytes=size)


def _plain(dtype: Any) -> str:
    return QUANTIZED.get(dtype, dtype).name


def _dtype(node: Any, operation: Any) -> str:
    """Returns the type of a product's weights, and of any other node's first result."""
    if operation is not None and operation.outputs:
        tensor = operation.inputs[1] if node.op in COUNTED and len(operation.inputs) > 1 else operation.outputs[0]
        return _plain(tensor.dtype.base_dtype)
    kind = attribute(node, "T").type
    return _plain(tf.as_dtype(kind)) if kind else ""


def _origin(inlined: Inlined, tensor: str) -> str:
    while (node := inlined.nodes.get(producer(tensor))) is not None and node.op == "Identity":
        tensor = node.input[0]
    return tensor


def _constant(inlined: Inlined, tensor: str) -> int | None:
    """Returns the integer that a tensor always is; None for any other."""
    node = inlined.nodes.get(producer(_origin(inlined, tensor)))
    if node is None or node.op != "Const":
        return None
    value = attribute(node, "value").tensor
    held = tf.make_ndarray(value) if not value.tensor_shape.dim else np.empty(1)
    return int(held) if held.ndim == 0 and np.issubdtype(held.dtype, np.integer) else None


def _step(body: Inlined, counter: str, end: str) -> int | None:
    """Returns what each round adds to a counter; None if that is no constant."""
    node = body.nodes.get(producer(_origin(body, end)))
    if node is None or node.op not in ("Add", "AddV2"):
        return None
    one, other = (_origin(body, name) for name in node.input)
    return _constant(body, other if one == counter else one) if counter in (one, other) else None
