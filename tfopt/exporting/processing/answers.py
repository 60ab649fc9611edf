"""From the output of a model to probabilities and the best classes.

The best classes are two more outputs, and the output itself stays: it is what `tfopt.verify` compares and scores. Two
classes that are about as probable may change places on another machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError, unknown_name
from tfopt.exporting.processing.config import PostprocessingConfig
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, dtype_attr
from tfopt.graph.output_ops import output_ops

Graph = TypeVar("Graph", bound=FrozenGraph)
CLASSES, SCORES = "classes", "scores"


def class_output(graph: FrozenGraph, config: PostprocessingConfig) -> str:
    """Returns the name of the output that the settings are about.

    Raises:
        ConfigError: There is no such output, there are several, or the settings do not fit it.
    """
    if config.output is not None and config.output not in graph.outputs:
        raise unknown_name("output", config.output, graph.outputs)
    if config.output is None and len(graph.outputs) != 1:
        raise ConfigError(
            f"output must be given for a model with several outputs. Received: output=None, and {graph.name!r} has "
            f"{list(graph.outputs)}. Name one of them."
        )
    name = config.output or next(iter(graph.outputs))
    _, spec = graph.outputs[name]
    known = output_ops(graph)[name]
    if config.softmax and known in ("Softmax", "Sigmoid"):
        raise ConfigError(
            f"softmax must be False where the model gives probabilities already. Received: softmax=True, and {name!r} "
            f"of {graph.name!r} comes from a {known}. Leave it out."
        )
    shape = spec.shape
    if config.softmax and (spec.dtype != tf.float32 or shape.rank in (0, 1) or (shape.rank and shape[-1] == 1)):
        raise ConfigError(
            f"softmax needs an output float32 [batch, ..., classes] of two classes or more. Received: {name!r} "
            f"{spec.dtype.name} {shape} of {graph.name!r}. Leave it out; a single logit needs a sigmoid in the model."
        )
    if config.top_k is None:
        return name
    classes = spec.shape.as_list()[1] if spec.shape.rank == 2 else None
    if spec.dtype != tf.float32 or classes is None or classes < 2:
        raise ConfigError(
            f"top_k needs an output float32 [batch, classes] with a known number of classes, two or more. Received: "
            f"{name!r} {spec.dtype.name} {spec.shape} of {graph.name!r}. Leave top_k out."
        )
    if config.top_k > classes:
        raise ConfigError(f"top_k must be at most the number of classes, {classes}. Received: top_k={config.top_k}.")
    if len(config.class_names) not in (0, classes):
        raise ConfigError(
            f"class_names must have a name for each of {classes} classes. Received: {len(config.class_names)} names."
        )
    if taken := {CLASSES, SCORES} & {*graph.inputs, *graph.outputs}:
        raise ConfigError(
            f"A model with top_k must have no input or output of the names {CLASSES!r} and {SCORES!r}. Received: "
            f"{sorted(taken)} in {graph.name!r}. Rename it in the model, or leave top_k out."
        )
    return name


def with_softmax(graph: Graph, name: str) -> Graph:
    """Returns the graph with softmax of its output `name` in its place."""
    tensor, spec = graph.outputs[name]
    editor = GraphEditor(graph.graph_def, graph.origins)
    softmax = editor.add("Softmax", f"{name}/softmax", [tensor], T=FLOAT32)
    return replace(graph, outputs={**graph.outputs, name: (softmax, spec)}).edited(editor)  # type: ignore[return-value]


def with_best_classes(graph: Graph, name: str, config: PostprocessingConfig) -> Graph:
    """Returns the graph with the best classes of its output `name` as two more outputs."""
    tensor, spec = graph.outputs[name]
    editor = GraphEditor(graph.graph_def, graph.origins)
    count = editor.add_constant(f"{name}/top_k", np.array(config.top_k, np.int32))
    best = editor.add("TopKV2", f"{name}/best", [tensor, count], T=FLOAT32, sorted=AttrValue(b=True))
    classes, dtype = f"{best}:1", tf.int32
    if config.class_names:
        names = editor.add_constant(f"{name}/class_names", np.array([each.encode() for each in config.class_names]))
        axis = editor.add_constant(f"{name}/axis", np.array(0, np.int32))
        types = {"Tparams": dtype_attr(tf.string), "Tindices": INT32, "Taxis": INT32}
        classes, dtype = editor.add("GatherV2", f"{name}/{CLASSES}", [names, classes, axis], **types), tf.string
    shape = [spec.shape[0], config.top_k]
    outputs = {
        **graph.outputs,
        CLASSES: (classes, tf.TensorSpec(shape, dtype)),
        SCORES: (best, tf.TensorSpec(shape, tf.float32)),
    }
    return replace(graph, outputs=outputs).edited(editor)  # type: ignore[return-value]
