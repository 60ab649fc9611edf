"""Resized images in ONNX: sizes and factors as whole numbers, and repetitions as tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from tfopt.compat.upsampling import FACTORS
from tfopt.graph import GraphEditor
from tfopt.graph.edit import INT32, AttrValue
from tfopt.quantization.annotation.annotate import AnnotatedGraph

RESIZES = ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic")


@dataclass(frozen=True)
class Known:
    """What is known of a resize."""

    sizes: Sequence[int] | None  # height and width of its result
    factors: Sequence[int]  # how often it repeats rows and columns, if it does that alone


def known_resizes(graph_def: Any) -> dict[str, Known]:
    """Returns what is known of each resize, by the op's name."""
    editor, found = GraphEditor(graph_def), dict[str, Known]()
    for name in [name for name, node in editor.nodes.items() if node.op in RESIZES]:
        sizes = editor.constant(editor.nodes[name].input[1])
        found[name] = Known(None if sizes is None else sizes.tolist(), _factors(editor.nodes[name]))
    return found


def set_resizes(context: Any, known: Mapping[str, Known]) -> None:
    """Gives a resize, by the op's name, its sizes in place of factors: as float32 these do not reach all sizes.

    A repetition of pixels gets its factors, which are whole. ONNX Runtime has a fast kernel for 2, and the file then
    computes no sizes.
    """
    for name, each in known.items():
        node = context.get_node_by_name(name)
        while node is not None and node.type in ("Transpose", "Cast"):
            node = node.inputs[0]
        if node is None or node.type != "Resize":
            continue
        if each.factors:
            scales = context.make_const(f"{name}/factors", np.array([1, 1, *each.factors], np.float32)).output[0]
            context.replace_inputs(node, [node.input[0], "", scales])
            node.set_attr("coordinate_transformation_mode", "asymmetric")
            node.set_attr("nearest_mode", "floor")
            continue
        if node.get_attr_str("coordinate_transformation_mode") == "tf_half_pixel_for_nn":  # not in this set of ops
            node.set_attr("coordinate_transformation_mode", "half_pixel")
            node.set_attr("nearest_mode", "round_prefer_ceil")
        if each.sizes is not None and len(node.input) == 3:
            _set_sizes(context, node, name, each.sizes)


def with_tiles(graph: AnnotatedGraph) -> AnnotatedGraph:
    """Returns the graph with tiles in place of the resizes that repeat pixels.

    Between int8 convolutions, ONNX Runtime has the channels of images last, where its resize takes one value at a time.
    """
    editor, shapes = GraphEditor(graph.graph_def), graph.shapes()
    for name in [name for name, node in editor.nodes.items() if _factors(node)]:
        node, shape = editor.nodes[name], shapes[name]
        kind, source = node.attr["T"], node.input[0]
        rows, columns = _factors(node)
        for axis in (3, 2):
            place = editor.add_constant(f"{name}/axis", np.int32(axis))
            source = editor.add("ExpandDims", f"{name}/expanded", [source, place], T=kind, Tdim=INT32)
        times = editor.add_constant(f"{name}/times", np.array([1, 1, rows, 1, columns, 1], np.int32))
        tiled = editor.add("Tile", f"{name}/tiled", [source, times], T=kind, Tmultiples=INT32)
        sizes = _sizes(editor, node, shape)
        editor.become(name, "Reshape", [tiled, sizes], T=kind, Tshape=INT32)
    return replace(graph, graph_def=graph.edited(editor).graph_def)


def _sizes(editor: GraphEditor, node: Any, shape: Any) -> str:
    """Returns the sizes of repeated images: constants where only the number of images is open."""
    name, sizes = node.name, shape.as_list()
    if None not in sizes[1:]:
        return editor.add_constant(f"{name}/sizes", np.array([-1, *sizes[1:]], np.int32))
    zero, one = (editor.add_constant(f"{name}/end", np.array([end], np.int32)) for end in (0, 1))
    of_images = editor.add("Shape", f"{name}/shape", [node.input[0]], T=node.attr["T"], out_type=INT32)
    count = editor.add("Slice", f"{name}/count", [of_images, zero, one], T=INT32, Index=INT32)
    channels = editor.add_constant(f"{name}/channels", np.array(sizes[3:], np.int32))
    parts = [count, node.input[1], channels, editor.add_constant(f"{name}/first", np.int32(0))]
    return editor.add("ConcatV2", f"{name}/sizes", parts, T=INT32, Tidx=INT32, N=AttrValue(i=3))


def _factors(node: Any) -> Sequence[int]:
    return list(node.attr[FACTORS].list.i) if FACTORS in node.attr else ()


def _set_sizes(context: Any, node: Any, name: str, size: Sequence[int]) -> None:
    fixed = context.make_const(f"{name}/sizes", np.array(size, np.int64)).output[0]
    made = {"dtypes": [onnx.TensorProto.INT64]}
    ends = {"start": 0, "end": 2}
    batch = context.make_node("Shape", [node.input[0]], attr=ends, name=f"{name}/batch", shapes=[[2]], **made)
    both = [batch.output[0], fixed]
    joined = context.make_node("Concat", both, attr={"axis": 0}, name=f"{name}/all", shapes=[[4]], **made)
    context.replace_inputs(node, [node.input[0], node.input[1], "", joined.output[0]])
    shape = context.get_shape(node.output[0])
    if shape is not None:
        context.set_shape(node.output[0], [*shape[:2], *size])
