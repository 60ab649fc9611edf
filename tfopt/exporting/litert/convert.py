"""Converts a frozen graph with TensorFlow's converter. No other module uses it.

The converter gives an int8 operator the ranges that the graph has as fake quantization, on its input and its result. It
quantizes the weights of such an operator by itself, with a step that depends on the largest weight of a channel, and
leaves the weights of the others in float. It gets rounded weights for both, so weights.py can find the integers again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema

from tfopt.compat.tensorflow import converter_error
from tfopt.errors import UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.litert.kernel_limits import keep_within_limits
from tfopt.exporting.litert.lists import without_lists
from tfopt.exporting.litert.several_ranges import hold, hold_in_float, release
from tfopt.exporting.paired import rounded_weights
from tfopt.exporting.sign_bits import read_signs
from tfopt.exporting.signatures import save
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import INT32, AttrValue, attribute, producer
from tfopt.quantization.annotation.annotate import AnnotatedGraph, has_ranges
from tfopt.quantization.annotation.fusion import (
    DATA_MOVEMENT_OPS,
    FAKE_QUANT,
    FAKE_QUANT_WEIGHTS,
    RELUS,
    consumers_of,
)
from tfopt.quantization.annotation.ranged_tensors import SHARED_RANGE_OPS

# Before a product, the converter would multiply its weights by these, which are then other integers.
SCALES = ("Mul", "RealDiv", "Add", "AddV2", "Sub")
SELECT_OPS = "TF Select ops: "  # the line of the converter's error that lists the ops without a builtin


def convert(graph: FrozenGraph, source: FrozenGraph, directory: Path) -> Any:
    """Returns a graph as the model of a .tflite file, a `ModelT`, with the names of its inputs and outputs.

    `source` is the graph that it was made of. A SavedModel is written to `directory` for the converter, and removed.

    Raises:
        UnsupportedModelError: The graph has look-up tables, or an op that no builtin operator of LiteRT computes. The
            message names it and where it is.
    """
    if graph.tables:
        raise UnsupportedModelError(
            f"A model in LiteRT must have no look-up table. Received: {graph.name!r} with {len(graph.tables)} of them. "
            "Export the part that takes numbers, or write format='saved_model'."
        )
    prepared = _prepared(graph, source)
    prepared = replace(prepared, graph_def=without_lists(prepared.graph_def))
    with tempfile.TemporaryDirectory(prefix="tfopt-", dir=directory) as read:
        save(tf.Module(), read, {DEFAULT_SIGNATURE: prepared.as_function()})
        converter = tf.lite.TFLiteConverter.from_saved_model(read, signature_keys=[DEFAULT_SIGNATURE])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if has_ranges(prepared):
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        try:
            with _quiet():
                model = schema.ModelT.InitFromPackedBuf(bytes(converter.convert()), 0)
        except converter_error() as error:
            doubles = "; it has float64 tensors, which most of them do not take: export a float32 model"
            raise UnsupportedModelError(
                f"Every op of a model in LiteRT must be one of its builtin operators. Received: {graph.name!r} "
                f"({_reason(error)}{doubles if prepared.has_doubles else ''}). Write format='saved_model', or "
                "replace the layer that uses it."
            ) from error
    release(model, prepared.graph_def)
    return model


def _prepared(graph: FrozenGraph, source: FrozenGraph) -> FrozenGraph:
    """Returns the graph with rounded weights as constants, and without ranges that no kernel uses.

    A slice that only adds axes, for which the converter has no operator if a size is open, becomes ExpandDims. A
    reshape to sizes that are known gets them as a constant, because the converter infers fewer.
    """
    editor = GraphEditor(graph.graph_def)
    unused = _unused_ranges(editor, graph) if isinstance(graph, AnnotatedGraph) else ()
    for name, node in list(editor.nodes.items()):
        if name in unused:
            scaled = editor.nodes[producer(node.input[0])].op in SCALES
            editor.redirect(name, hold(editor, node.input[0]) if scaled else node.input[0])
        elif node.op == FAKE_QUANT_WEIGHTS:
            editor.redirect(name, editor.add_constant(f"{name}/rounded", rounded_weights(editor, name)[0]))
        elif node.op == "StridedSlice" and (axes := _added_axes(editor, node)):
            value, options = node.input[0], {"T": node.attr["T"], "Tdim": INT32}
            *before, last = (editor.add_constant(f"{name}/axis", np.int32(axis)) for axis in axes)
            for axis in before:
                value = editor.add("ExpandDims", f"{name}/expanded", [value, axis], **options)
            editor.become(name, "ExpandDims", [value, last], **options)
    _fix_sizes(editor, graph, source)
    keep_within_limits(editor)
    read_signs(editor)
    if isinstance(graph, AnnotatedGraph):
        editor.remove_unread([*graph.output_nodes, *(spec.name for spec in graph.inputs.values())])
        hold_in_float(editor, graph.output_nodes)
    return graph.edited(editor)


def _unused_ranges(editor: GraphEditor, graph: AnnotatedGraph) -> list[str]:
    """Returns the fake quantization of float results that only products without a range of their own result read.

    LiteRT's kernel for such a product chooses a range for each row that it reads. An activation other than a Relu is
    an operator of its own, so a product before it has no range of its result either.
    """
    ranged = {
        fusion.output
        for fusion in graph.fusions
        if (fusion.activation is None or fusion.activation.name in RELUS)
        and any(editor.nodes[name].op == FAKE_QUANT for name in editor.consumers.get(fusion.output, ()))
    }
    by_row = {
        fusion.op for fusion in graph.fusions if editor.nodes[fusion.op].op == "MatMul" and fusion.output not in ranged
    }
    handing_on, unused = (*DATA_MOVEMENT_OPS, FAKE_QUANT), []
    for name in [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT]:
        source = producer(editor.nodes[name].input[0])
        in_int8 = source in ranged or editor.nodes[source].op in SHARED_RANGE_OPS
        readers = {reader for reader in consumers_of(editor, name) if editor.nodes[reader].op not in handing_on}
        if not in_int8 and readers <= by_row and name not in graph.output_nodes:
            unused.append(name)
    return unused


def _fix_sizes(editor: GraphEditor, graph: FrozenGraph, source: FrozenGraph) -> None:
    """Gives each reshape the sizes that TensorFlow infers in either graph as constants, beside the open ones.

    Folding replaces sizes that are read from a tensor, of which TensorFlow then infers fewer. The converter infers
    none from sizes that are computed together, as keras.ops.repeat has them, and so loses the channels of an image.
    """
    reshapes = [name for name, node in editor.nodes.items() if node.op == "Reshape"]
    open_sizes = [name for name in reshapes if editor.constant(editor.nodes[name].input[1]) is None]
    if not open_sizes:
        return
    own, before = graph.shapes(), source.shapes()
    for name in open_sizes:
        shape, earlier = (each.get(name, tf.TensorShape(None)) for each in (own, before))
        if shape.is_compatible_with(earlier):
            shape = shape.merge_with(earlier)
        sizes = [] if shape.rank is None else [-1 if size is None else size for size in shape.as_list()]
        if not sizes or 0 in sizes or sizes.count(-1) == len(sizes) > 1:
            continue
        node = editor.nodes[name]
        if sizes.count(-1) > 1:
            _set_sizes_apart(editor, node, sizes)
        else:
            node.attr["Tshape"].CopyFrom(INT32)
            editor.set_inputs(name, [node.input[0], editor.add_constant(f"{name}/sizes", np.array(sizes, np.int32))])


def _set_sizes_apart(editor: GraphEditor, node: Any, sizes: list[int]) -> None:
    """Gives a reshape its sizes one by one: the known ones as constants, the open ones (-1) from what it reads."""
    name, kind = node.name, node.attr.get("Tshape", INT32)
    axis = editor.add_constant(f"{name}/axis", np.int32(0))
    apart = [
        editor.add_constant(f"{name}/size", tf.as_dtype(kind.type).as_numpy_dtype(size))
        if size != -1
        else editor.add(
            "GatherV2",
            f"{name}/open_size",
            [node.input[1], editor.add_constant(f"{name}/place", np.int32(place)), axis],
            Tparams=kind,
            Tindices=INT32,
            Taxis=INT32,
        )
        for place, size in enumerate(sizes)
    ]
    packed = editor.add("Pack", f"{name}/sizes", apart, T=kind, N=AttrValue(i=len(apart)), axis=AttrValue(i=0))
    editor.set_inputs(name, [node.input[0], packed])


def _added_axes(editor: GraphEditor, node: Any) -> list[int]:
    """Returns the axes of size 1 that a slice adds, one after the other, if it does nothing else."""
    begin, steps = editor.constant(node.input[1]), editor.constant(node.input[3])
    masks = {
        name: attribute(node, f"{name}_mask").i for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    added = masks["new_axis"]
    if begin is None or steps is None or masks["shrink_axis"]:
        return []
    whole = masks["begin"] & masks["end"] | masks["ellipsis"] | added
    if whole != 2 ** len(begin) - 1 or any(step != 1 and not added >> place & 1 for place, step in enumerate(steps)):
        return []
    places = [place for place in range(len(begin)) if added >> place & 1]
    behind = [place - len(begin) for place in places if 0 < masks["ellipsis"] < 1 << place]  # counted from the end
    return [*places[: len(places) - len(behind)], *reversed(behind)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the converter's advice from the terminal where it refuses a model: tfopt tells the reason itself."""
    with contextlib.ExitStack() as stack:
        try:
            stderr = os.dup(2)
        except OSError:  # there is none, as of a daemon
            yield
            return
        stack.callback(os.close, stderr)
        notices = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(notices.fileno(), 2)
        refused = False
        try:
            yield
        except converter_error():
            refused = True
            raise
        finally:
            os.dup2(stderr, 2)
            if not refused:
                notices.seek(0)
                with contextlib.suppress(OSError):  # nobody reads it
                    os.write(2, notices.read())


def _reason(error: Any) -> str:
    """Returns the ops that the converter's error is about, each with the name of its node."""
    found = dict[str, str]()
    for each in getattr(error, "errors", ()):
        if each.operator.name and each.location.call:
            found[each.operator.name.removeprefix("tf.")] = each.location.call[0].name.split("@")[0]
    if found:
        return ", ".join(f"{op} of {node!r}" for op, node in found.items())
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line.removeprefix(SELECT_OPS) for line in lines if line.startswith(SELECT_OPS)), lines[0])
