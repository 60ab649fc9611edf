"""Replaces each layer normalisation by TensorFlow's kernel for it (oneDNN, x86-64).

Keras writes (x - mean(x)) / sqrt(variance(x) + epsilon) * scale + offset as ten nodes, and each of them passes over the
tensor. The nodes differ between versions and libraries, so they are not matched with a pattern. Instead, a group of
nodes that begins with a mean is computed on random numbers, and the result is compared with the formula.

oneDNN's kernel takes a fixed time at every call. For small tensors that is longer than the ten nodes take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue
from tfopt.quantization.annotation.activations import run_group

OPS = ("Mean", "StopGradient", "SquaredDifference", "Square", "Add", "AddV2", "Sub", "Mul", "RealDiv", "Neg")
ROOTS = ("Rsqrt", "Sqrt")
LARGEST_GROUP = 16
RANKS = (2, 3)  # of the tensors that the kernel accepts
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """A layer normalisation over the last axis of the tensor `input`. The last of its nodes has the result."""

    input: str
    nodes: tuple[str, ...]
    scale: np.ndarray
    offset: np.ndarray
    epsilon: float


def fuse_layer_norms(graph: FrozenGraph, leave: Collection[str] = ()) -> FrozenGraph:
    """Returns the graph with one _MklLayerNorm node for each layer normalisation of float32, up to rounding.

    Those whose last nodes are in `leave` stay as they are.
    """
    editor = GraphEditor(graph.graph_def)
    norms = [norm for norm in find_layer_norms(graph, editor) if norm.nodes[-1] not in leave]
    if not norms:
        return graph
    shapes = graph.shapes()
    for norm in norms:
        _fuse(editor, norm, shapes[norm.input])
    return graph.edited(editor)


def find_layer_norms(graph: FrozenGraph, editor: GraphEditor) -> list[LayerNorm]:
    means = [name for name in editor.topological() if editor.nodes[name].op == "Mean"]
    if not means:
        return []
    shapes = graph.shapes()
    found = (_find(editor, name, shapes, graph.output_nodes) for name in means)
    return [norm for norm in found if norm is not None]


def fused_name(norm: str) -> str:
    return f"{norm}/fused"


def _find(
    editor: GraphEditor, mean: str, shapes: Mapping[str, tf.TensorShape], outputs: frozenset[str]
) -> LayerNorm | None:
    """Returns the layer normalisation that begins with a mean, if there is one."""
    source = editor.nodes[mean].input[0]
    shape = shapes.get(source)
    if ":" in source or shape is None or not shape.rank or shape[-1] is None:
        return None
    if editor.nodes[mean].attr["T"].type != tf.float32.as_datatype_enum:
        return None
    group = [mean]
    while len(group) < LARGEST_GROUP:
        name = _next(editor, group, source)
        if name is None or any(member in outputs for member in group):
            return None
        group.append(name)
        inside = set(group)
        closed = all(reader in inside for member in group[:-1] for reader in editor.consumers.get(member, ()))
        if closed and any(editor.nodes[member].op in ROOTS for member in group):
            return None if name in outputs else _measured(editor, source, tuple(group), shape)
    return None


def _next(editor: GraphEditor, group: list[str], source: str) -> str | None:
    """Returns a node that reads the group, and besides it only the group's source and constants."""
    for member in group:
        for name in editor.consumers.get(member, ()):
            node = editor.nodes[name]
            known = (
                tensor in group or tensor == source or editor.constant(tensor) is not None for tensor in node.input
            )
            if name not in group and node.op in (*OPS, *ROOTS) and all(known):
                return name
    return None


def _measured(editor: GraphEditor, source: str, nodes: tuple[str, ...], shape: tf.TensorShape) -> LayerNorm | None:
    """Returns the layer normalisation that nodes compute, or None if they compute something else."""
    channels = shape[-1]
    values = np.random.default_rng(0).normal(size=[*(min(size or 2, 2) for size in shape[:-1]), channels])
    try:
        results = run_group(editor, source, nodes, [0 * values, 1e3 * values, 1e-2 * values])
    except (tf.errors.OpError, ValueError):  # the constants fit only another number of examples
        return None
    offset, large, small = (result.reshape(-1, result.shape[-1]) for result in results)
    flat = values.reshape(-1, channels)
    centred, variance = flat - flat.mean(axis=1, keepdims=True), flat.var(axis=1, keepdims=True)
    if len(large) != len(flat) or not variance.all():
        return None
    constants = [
        value.reshape(-1)
        for name in nodes
        for tensor in editor.nodes[name].input
        if (value := editor.constant(tensor)) is not None and value.dtype == np.float32
    ]
    scales = [np.ones(channels, np.float32), *(value for value in constants if value.size == channels)]
    offsets = [np.zeros(channels, np.float32), *(value for value in constants if value.size == channels)]
    measured = np.median((large - offset) * np.sqrt(variance) / centred, axis=0)
    result = LayerNorm(
        input=source,
        nodes=nodes,
        scale=min(scales, key=lambda each: float(np.abs(each - measured).max())),
        offset=min(offsets, key=lambda each: float(np.abs(each - offset[0]).max())),
        epsilon=0.0,
    )
    for epsilon in sorted({float(value[0]) for value in constants if value.size == 1 and 0 < value[0] < 1}):
        expected = (
            centred * factor / np.sqrt(variance * factor**2 + epsilon) * result.scale + result.offset
            for factor in (1e3, 1e-2)
        )
        bound = TOLERANCE * float(np.abs(large).max())
        if all(np.abs(one - other).max() <= bound for one, other in zip((large, small), expected, strict=True)):
            return replace(result, epsilon=epsilon)
    return None


def _fuse(editor: GraphEditor, norm: LayerNorm, shape: tf.TensorShape) -> None:
    name, source = norm.nodes[-1], norm.input
    flat = shape.rank not in RANKS
    if flat:
        rows = editor.add_constant(f"{name}/rows/sizes", np.asarray([-1, shape[-1]], np.int32))
        source = _reshape(editor, f"{name}/rows", source, rows)
    fused = editor.add(
        "_MklLayerNorm",
        fused_name(name),
        [source, editor.add_constant(f"{name}/scale", norm.scale), editor.add_constant(f"{name}/offset", norm.offset)],
        T=FLOAT32,
        epsilon=AttrValue(f=norm.epsilon),
    )
    editor.redirect(name, _reshape(editor, f"{name}/back", fused, _sizes(editor, norm, shape)) if flat else fused)


def _sizes(editor: GraphEditor, norm: LayerNorm, shape: tf.TensorShape) -> str:
    """Returns the sizes of the input. They are a constant unless several of them are open."""
    name, sizes = norm.nodes[-1], shape.as_list()
    if sizes.count(None) <= 1:
        return editor.add_constant(f"{name}/back/sizes", np.array([size or -1 for size in sizes], np.int32))
    return editor.add("Shape", f"{name}/back/sizes", [norm.input], T=FLOAT32, out_type=INT32)


def _reshape(editor: GraphEditor, name: str, tensor: str, sizes: str) -> str:
    return editor.add("Reshape", name, [tensor, sizes], T=FLOAT32, Tshape=INT32)
