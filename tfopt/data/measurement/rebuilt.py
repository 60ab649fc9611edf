"""Builds a pipeline again with one thing changed, to measure what the change saves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfopt.data.measurement.stages import Stage, element_spec

WIDE, NARROW = tf.float64.as_datatype_enum, tf.float32.as_datatype_enum


def up_to(stage: Stage) -> tf.data.Dataset:
    """Returns the pipeline up to a stage.

    Example:
        >>> from tfopt.data.measurement.stages import stages_of
        >>> batch = stages_of(tf.data.Dataset.range(4).map(tf.square).batch(2))
        >>> [int(each[0]) for each in up_to(batch.inputs[0])]
        [0, 1, 4, 9]
    """
    return _from_graph(_copy(stage.graph), stage.node.name)


def continued(stage: Stage, last: Stage, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a pipeline in which a data set takes the place of a stage and of all before it.

    Args:
        stage: The stage.
        last: The last stage of the pipeline.
        dataset: A data set with the elements of the stage.
    Example:
        >>> from tfopt.data.measurement.stages import stages_of
        >>> last = stages_of(tf.data.Dataset.range(4).map(tf.square).batch(2))
        >>> cached = up_to(last.inputs[0]).cache().repeat(2)
        >>> [each[0].numpy().tolist() for each in continued(last.inputs[0], last, cached)]
        [[0, 1], [4, 9], [0, 1], [4, 9]]
    """
    if stage is last:
        return dataset
    graph = _copy(stage.graph)
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
    """Returns a pipeline in which a map, which handles one element at a time, handles several.

    Args:
        stage: A map without parallel calls.
        last: The last stage of the pipeline.
    """
    graph = _copy(stage.graph)
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
    """Returns a pipeline that computes in float32 whatever it computed in float64.

    Args:
        last: The last stage of the pipeline.
    Example:
        >>> from tfopt.data.measurement.stages import stages_of
        >>> wide = tf.data.Dataset.from_tensors(0).map(lambda one: tf.sqrt(tf.cast(one, tf.float64) + 4.0))
        >>> next(iter(in_float32(stages_of(wide))))[0]
        <tf.Tensor: shape=(), dtype=float32, numpy=2.0>
    """
    graph = _copy(last.graph)
    # Other names: TensorFlow refuses two functions of one name that differ.
    names = {function.signature.name: f"float32_{function.signature.name}" for function in graph.library.function}
    nodes = list(graph.node)
    for function in graph.library.function:
        signature = function.signature
        signature.name = names[signature.name]
        for argument in [*signature.input_arg, *signature.output_arg]:
            argument.type = _narrow(argument.type)
        _narrow_values(function.attr.values(), names)
        for argument_attr in function.arg_attr.values():
            _narrow_values(argument_attr.attr.values(), names)
        nodes += function.node_def
    for node in nodes:
        node.op = names.get(node.op, node.op)
        _narrow_values(node.attr.values(), names)
    return _from_graph(graph, last.node.name)


def _narrow(kind: int) -> int:
    return NARROW if kind == WIDE else kind


def _narrow_values(values: Any, names: dict[str, str]) -> None:
    """Replaces float64 in the attributes of a node, and the names of functions."""
    for value in values:
        held = value.WhichOneof("value")
        if held == "type":
            value.type = _narrow(value.type)
        elif held == "tensor" and value.tensor.dtype == WIDE:
            value.tensor.CopyFrom(tf.make_tensor_proto(tf.make_ndarray(value.tensor), tf.float32))
        elif held == "list":
            value.list.type[:] = [_narrow(kind) for kind in value.list.type]
        for function in _functions(value, held):
            function.name = names.get(function.name, function.name)
            _narrow_values(function.attr.values(), names)


def _functions(value: Any, held: str | None) -> Iterator[Any]:
    if held == "func":
        yield value.func
    elif held == "list":
        yield from value.list.func


def _copy(graph: Any) -> Any:
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
