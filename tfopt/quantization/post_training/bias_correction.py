"""Bias correction: subtracts the mean error that quantization causes from the biases.

Rounded weights and clipped activations shift the mean of a channel's results. On calibration data, the shift is
E[y_int8] - E[y_float]. The bias can correct it exactly (Nagel et al., ICCV 2019, arXiv:1906.04721, section 4.2). The
shift of a layer depends on the corrections of the layers before it. So the float graph and the quantized graph run as
one graph. In this graph, the results of each quantized layer are corrected by the mean difference on the same examples
before the next layer reads them. So one run gives the corrections of all layers in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import AttrValue, GraphEditor, NodeDef, dtype_attr, producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.quantization.calibration.data import in_pieces, length

FLOAT = "float_reference"
PIECE = 32


def correct_biases(
    graph: FrozenGraph, annotated: FrozenGraph, fusions: Sequence[Fusion], batches: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Returns the correction of each fusion's bias, by the name of its op.

    The annotated graph is the float graph with ranges, possibly with other weights. Each fusion has a bias.
    """
    both, corrections = _side_by_side(graph, annotated, fusions)
    function = both.as_function(fetch=list(corrections.values()))
    totals, examples = {name: np.zeros(()) for name in corrections}, 0
    for piece in in_pieces(batches, PIECE):
        count = length(piece)
        examples += count
        for name, value in zip(corrections, function(**piece), strict=True):
            totals[name] = totals[name] + count * value.numpy().astype(np.float64)
    return {name: (total / examples).astype(np.float32) for name, total in totals.items()}


def _side_by_side(
    graph: FrozenGraph, annotated: FrozenGraph, fusions: Sequence[Fusion]
) -> tuple[FrozenGraph, dict[str, str]]:
    """Returns one graph of both, and the tensor of each fusion's correction on the examples of one call."""
    editor = GraphEditor(annotated.graph_def)
    shared = {spec.name for spec in graph.inputs.values()} | graph.tables.keys()

    def renamed(tensor: str) -> str:
        return tensor if producer(tensor) in shared else f"{FLOAT}/{tensor}"

    reference = GraphEditor(graph.graph_def)
    for name in reference.topological():
        if name not in shared:
            node: NodeDef = reference.nodes[name]
            editor.add(node.op, renamed(name), [renamed(tensor) for tensor in node.input], **node.attr)
    corrections = {}
    for fusion in fusions:
        axes = 1 if editor.nodes[fusion.op].op == "MatMul" else 3
        corrections[fusion.op] = _shift(editor, fusion.nodes[1], renamed(fusion.nodes[1]), axes)
    return replace(annotated, graph_def=editor.graph_def(editor.nodes)), corrections


def _shift(editor: GraphEditor, result: str, exact: str, axes: int) -> str:
    """Corrects a result by its mean difference from the exact one in each channel, and returns this difference."""
    kind = dtype_attr(tf.float32)
    error = editor.add("Sub", f"{result}/error", [exact, result], T=kind)
    over = editor.add_constant(f"{result}/error_axes", np.arange(axes, dtype=np.int32))
    mean = editor.add(
        "Mean",
        f"{result}/correction",
        [error, over],
        T=kind,
        Tidx=dtype_attr(tf.int32),
        keep_dims=AttrValue(b=False),
    )
    corrected = editor.add("AddV2", f"{result}/corrected", [result, mean], T=kind)
    editor.redirect(result, corrected, keep=[error, corrected])
    return mean
