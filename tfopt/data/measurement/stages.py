"""Takes a tf.data pipeline apart into its stages, and runs one stage alone, fed from memory.

TensorFlow writes a data set as a graph (`DatasetToGraphV2`): each stage is a node, with the nodes of its inputs, its
settings and its functions. A graph of one node with a placeholder for each input is the stage alone. So this works for
every data set, also for those that no Python object describes any more.

A pipeline can also be built again with one thing changed, to measure what the change saves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

# What happens in a stage, by the name of its op without "Dataset" and the version. Other stages keep the op's name.
KINDS = {
    "ParallelMap": "map",
    "Map": "map",
    "MapAndBatch": "map and batch",
    "ParallelFilter": "filter",
    "ParallelBatch": "batch",
    "PaddedBatch": "padded batch",
    "GroupByWindow": "buckets",
    "FlatMap": "flat_map",
    "ParallelInterleave": "interleave",
    "LegacyParallelInterleave": "interleave",
    "TFRecord": "TFRecord files",
    "TextLine": "text files",
    "FixedLengthRecord": "record files",
    "TensorSlice": "arrays in memory",
    "Tensor": "arrays in memory",
    "Load": "cache on disk",
    "DataService": "tf.data service",
}
# Stages that only hand elements on. They are not measured; a cache would take all memory for an input without end.
PASSIVE = {
    *("Options", "Cache", "Prefetch", "Take", "Skip", "Repeat", "AssertCardinality", "AssertNext"),
    *("Model", "Optimize", "Finalize", "MaxIntraOpParallelism", "PrivateThreadPool"),
}
PYTHON_OPS = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
RANDOM_OPS = ("Random", "StatelessRandom", "StatefulRandom", "StatefulUniform", "Multinomial", "SampleDistorted")
STATE_OPS = (
    *("Assign", "ResourceScatter", "ResourceApply"),
    *("LookupTableInsert", "LookupTableImport", "LookupTableRemove"),
)
PREFIX = re.compile(r"^__(?:inference|forward)_(?:Dataset_)?")
WIDE, NARROW = tf.float64.as_datatype_enum, tf.float32.as_datatype_enum


@dataclass(eq=False)
class Stage:
    """One stage of a pipeline."""

    node: Any
    graph: Any  # of the whole pipeline
    kind: str  # for example "map" or "shuffle"
    function: str  # name of the function that it calls; empty if there is none
    calls_python: bool
    is_random: bool = False
    changes_state: bool = False  # whether the function changes a variable or a table: the order of its calls matters
    inputs: list[Stage] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the stage does, with the name of its function or its size."""
        if self.function:
            return f"{self.kind} {self.function}"
        size = self.size
        return self.kind if size is None else f"{self.kind} {size:,}"

    @property
    def size(self) -> int | None:
        """Number of elements of a batch, or of the buffer of a shuffle; None for other stages."""
        return self._constant(1) if self.kind in ("batch", "padded batch", "shuffle", "map and batch") else None

    @property
    def is_serial(self) -> bool:
        """Whether the function of the stage has one call at a time, although the stage could have several."""
        return self.node.op in ("MapDataset", "InterleaveDataset", "FilterDataset", "FlatMapDataset")

    @property
    def element_spec(self) -> tuple[tf.TensorSpec, ...]:
        """The shapes and types of its outputs."""
        return element_spec(self.node)

    @property
    def is_passive(self) -> bool:
        """Whether the stage only hands elements on."""
        return _base(self.node.op) in PASSIVE

    def alone(self, feeds: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
        """Returns this stage as a data set that reads other inputs."""
        graph = tf.compat.v1.GraphDef()
        graph.versions.CopyFrom(self.graph.versions)
        graph.library.CopyFrom(self.graph.library)
        known = {node.name: node for node in self.graph.node}
        names: list[str] = []
        own = graph.node.add()
        own.CopyFrom(self.node)
        del own.input[:]
        for name in self.node.input:
            source = known[_node_name(name)]
            if _is_dataset(source) and self.inputs:
                placeholder = graph.node.add(name=f"feed_{len(names)}", op="Placeholder")
                placeholder.attr["dtype"].type = tf.variant.as_datatype_enum
                names.append(f"{placeholder.name}:0")
                own.input.append(placeholder.name)
            else:
                _copy(source, known, graph)
                own.input.append(name)

        def build(*variants: tf.Tensor, output: str = f"{own.name}:0") -> tf.Tensor:
            placed = dict(zip(names, variants, strict=True))
            (made,) = tf.graph_util.import_graph_def(graph, input_map=placed, return_elements=[output], name="")
            return made

        # A partial: TensorFlow counts the traces of a Python function over all stages, and warns at too many.
        made = tf.function(functools.partial(build), autograph=False)
        variants = [tf.data.experimental.to_variant(feed) for feed in feeds]
        return tf.data.experimental.from_variant(made(*variants), element_spec(self.node))

    def walk(self) -> Iterator[Stage]:
        """Yields the stages of this pipeline, the sources first."""
        for each in self.inputs:
            yield from each.walk()
        yield self

    def _constant(self, place: int) -> int | None:
        known = {node.name: node for node in self.graph.node}
        node = known[_node_name(self.node.input[place])]
        if node.op != "Const":
            return None
        value = tf.make_ndarray(node.attr["value"].tensor)
        return int(value) if value.ndim == 0 and value.dtype.kind == "i" else None


def stages_of(dataset: tf.data.Dataset) -> Stage:
    """Returns the last stage of a data set, which leads to all others.

    Raises:
        tf.errors.OpError: TensorFlow cannot write the data set as a graph.
    Example:
        >>> pipeline = tf.data.Dataset.range(9).map(tf.square).batch(4).prefetch(1)
        >>> [stage.name for stage in stages_of(pipeline).walk() if not stage.is_passive]
        ['Range', 'map square', 'batch 4']
    """
    variant = tf.data.experimental.to_variant(dataset)
    written = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)  # 1: state is not an error
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(written.numpy())
    known = {node.name: node for node in graph.node}
    (last,) = (node for node in graph.node if node.op == "_Retval")
    functions = {function.signature.name: function for function in graph.library.function}
    return _stage(known[_node_name(last.input[0])], known, graph, functions)


def _stage(node: Any, known: dict[str, Any], graph: Any, functions: dict[str, Any]) -> Stage:
    called = [value.func.name for value in node.attr.values() if value.HasField("func")]
    ops = [op for name in called for op in _ops(name, functions)]
    kind = KINDS.get(_base(node.op), _base(node.op))
    if kind not in KINDS.values():
        kind = kind.lower() if kind in ("Shuffle", "Batch", "Filter", "Interleave", "Cache", "Zip", "Scan") else kind
    if "GeneratorDataset" in ops:
        kind = "generator"
    made = Stage(
        node=node,
        graph=graph,
        kind=kind,
        function="" if kind == "generator" or not called else _function_name(called[0], kind),
        calls_python=any(op in PYTHON_OPS for op in ops),
        is_random=any(op.startswith(RANDOM_OPS) for op in ops),
        changes_state=any(op.startswith(STATE_OPS) for op in ops),
    )
    if kind == "generator":
        return made  # what it reads is only its own number
    inputs = [known[_node_name(name)] for name in node.input]
    made.inputs = [_stage(each, known, graph, functions) for each in inputs if _is_dataset(each)]
    return made


def _ops(function: str, functions: dict[str, Any], seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the ops of a function and of the functions that it calls."""
    if function not in functions or function in seen:
        return
    for node in functions[function].node_def:
        yield node.op
        inner = [value.func.name for value in node.attr.values() if value.HasField("func")]
        for name in [*inner, node.op]:
            yield from _ops(name, functions, seen | {function})


def _function_name(name: str, kind: str) -> str:
    """Returns the name of the Python function of a function in the graph."""
    name = re.sub(r"(_\d+)+$", "", PREFIX.sub("", name)).replace("<lambda>", "lambda")
    for prefix in (kind, "map", "flat_map", "interleave", "filter", "scan", "group_by_window"):
        name = name.removeprefix(f"{prefix}_")
    return name


def _base(op: str) -> str:
    return re.sub(r"Dataset(V\d+)?$", "", op)


def _is_dataset(node: Any) -> bool:
    return re.search(r"Dataset(V\d+)?$", node.op) is not None


def _node_name(name: str) -> str:
    return name.lstrip("^").split(":")[0]


def _copy(node: Any, known: dict[str, Any], graph: Any) -> None:
    """Copies a node that is no stage, with all that it needs."""
    if any(node.name == each.name for each in graph.node):
        return
    graph.node.add().CopyFrom(node)
    for name in node.input:
        _copy(known[_node_name(name)], known, graph)


def element_spec(node: Any) -> tuple[tf.TensorSpec, ...]:
    """Returns the shapes and types of the elements of a stage, from its node."""
    # `in` first: looking a missing attribute up would add it to the node, empty.
    types = next(node.attr[name].list.type for name in ("output_types", "Toutput_types") if name in node.attr)
    shapes = node.attr["output_shapes"].list.shape
    return tuple(
        tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(kind)) for shape, kind in zip(shapes, types, strict=True)
    )


def up_to(stage: Stage) -> tf.data.Dataset:
    """Returns the pipeline up to a stage.

    Example:
        >>> batch = stages_of(tf.data.Dataset.range(4).map(tf.square).batch(2))
        >>> [int(each[0]) for each in up_to(batch.inputs[0])]
        [0, 1, 4, 9]
    """
    return _from_graph(_copy_of(stage.graph), stage.node.name)


def continued(stage: Stage, last: Stage, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a pipeline, by its last stage, in which a data set takes the place of a stage and of all before it.

    Example:
        >>> last = stages_of(tf.data.Dataset.range(4).map(tf.square).batch(2))
        >>> cached = up_to(last.inputs[0]).cache().repeat(2)
        >>> [each[0].numpy().tolist() for each in continued(last.inputs[0], last, cached)]
        [[0, 1], [4, 9], [0, 1], [4, 9]]
    """
    if stage is last:
        return dataset
    graph = _copy_of(stage.graph)
    place, output = f"{stage.node.name}:0", f"{last.node.name}:0"
    kept = [node for node in graph.node if node.op != "_Retval"]
    del graph.node[:]
    graph.node.extend(kept)

    def build(variant: tf.Tensor) -> tf.Tensor:
        (made,) = tf.graph_util.import_graph_def(graph, input_map={place: variant}, return_elements=[output], name="")
        return made

    # A partial: TensorFlow counts the traces of a Python function over all pipelines, and warns at too many.
    made = tf.function(functools.partial(build), autograph=False)(tf.data.experimental.to_variant(dataset))
    return tf.data.experimental.from_variant(made, element_spec(last.node))


def in_parallel(stage: Stage, last: Stage) -> tf.data.Dataset:
    """Returns a pipeline, by its last stage, in which a map that handles one element at a time handles several."""
    graph = _copy_of(stage.graph)
    calls = graph.node.add(name="parallel_calls", op="Const")
    calls.attr["dtype"].type = tf.int64.as_datatype_enum
    calls.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(tf.data.AUTOTUNE, tf.int64))
    own = next(node for node in graph.node if node.name == stage.node.name)
    own.op = "ParallelMapDatasetV2"
    own.input.append(calls.name)
    own.attr["deterministic"].s = b"default"
    own.attr.pop("force_synchronous", None)  # only a serial map has it
    return _from_graph(graph, last.node.name)


def in_float32(last: Stage) -> tf.data.Dataset:
    """Returns a pipeline, by its last stage, that computes in float32 whatever it computed in float64.

    Example:
        >>> wide = tf.data.Dataset.from_tensors(0).map(lambda one: tf.sqrt(tf.cast(one, tf.float64) + 4.0))
        >>> next(iter(in_float32(stages_of(wide))))[0]
        <tf.Tensor: shape=(), dtype=float32, numpy=2.0>
    """
    graph = _copy_of(last.graph)
    # Other names: TensorFlow refuses two functions of one name that differ.
    names = {function.signature.name: f"float32_{function.signature.name}" for function in graph.library.function}
    nodes = list(graph.node)
    for function in graph.library.function:
        signature = function.signature
        signature.name = names[signature.name]
        for argument in [*signature.input_arg, *signature.output_arg]:
            argument.type = NARROW if argument.type == WIDE else argument.type
        _narrow_values(function.attr.values(), names)
        for argument_attr in function.arg_attr.values():
            _narrow_values(argument_attr.attr.values(), names)
        nodes += function.node_def
    for node in nodes:
        node.op = names.get(node.op, node.op)
        _narrow_values(node.attr.values(), names)
    return _from_graph(graph, last.node.name)


def _narrow_values(values: Any, names: dict[str, str]) -> None:
    """Replaces float64 in the attributes of a node, and the names of functions."""
    for value in values:
        held = value.WhichOneof("value")
        if held == "type":
            value.type = NARROW if value.type == WIDE else value.type
        elif held == "tensor" and value.tensor.dtype == WIDE:
            value.tensor.CopyFrom(tf.make_tensor_proto(tf.make_ndarray(value.tensor), tf.float32))
        elif held == "list":
            value.list.type[:] = [NARROW if kind == WIDE else kind for kind in value.list.type]
        for function in [value.func] if held == "func" else value.list.func if held == "list" else []:
            function.name = names.get(function.name, function.name)
            _narrow_values(function.attr.values(), names)


def _copy_of(graph: Any) -> Any:
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(graph)
    return copy


def _from_graph(graph: Any, name: str) -> tf.data.Dataset:
    """Returns the data set of a node. It has its own copies of all functions."""
    (result,) = (node for node in graph.node if node.op == "_Retval")
    result.input[:] = [f"{name}:0"]
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    spec = element_spec(next(node for node in graph.node if node.name == name))
    return tf.data.experimental.from_variant(variant, spec)
