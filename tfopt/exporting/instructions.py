"""Which instructions of the processor an int8 artifact needs for right results.

Without VNNI or AMX some int8 kernels saturate within their sums: see tfopt.quantization.weight_grid. Whether an
artifact's kernels do is read from their weights, however these came to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.signatures import DEFAULT, FLOAT
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute
from tfopt.hardware import has_vnni

if TYPE_CHECKING:
    from tfopt.exporting.manifest import Manifest

CONVOLUTION, DEPTHWISE, PRODUCT = "_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"
LARGEST = 64  # 2 * 255 * 64 is an int16


def kernels_that_need_vnni(graph: FrozenGraph) -> list[str]:
    """Returns the names of a lowered graph's kernels whose results may be wrong without VNNI or AMX."""
    editor = GraphEditor(graph.graph_def)
    return [
        name
        for name, node in editor.nodes.items()
        if node.op in (CONVOLUTION, DEPTHWISE, PRODUCT) and not _is_exact_without(editor, node)
    ]


def missing_instructions(manifest: Manifest, signature: str) -> str | None:
    """Returns why this machine computes a signature of an artifact wrongly, or None.

    An older manifest does not tell whether VNNI is needed. Its int8 weights have 8 bits, so it is.
    """
    needed = manifest.precision == "int8" if manifest.needs_vnni is None else manifest.needs_vnni
    if signature != DEFAULT or not needed or has_vnni() is not False:
        return None
    remedy = f"Call the signature {FLOAT!r}" if FLOAT in manifest.signatures else "Serve it on such a machine"
    return (
        "The artifact needs VNNI or AMX for right results: its weights use 8 bits, and without these instructions sums "
        "saturate. Received: a processor, or a limit by ONEDNN_MAX_CPU_ISA, without them. "
        f"{remedy}, or export it with QuantizationConfig(reduce_range=True)."
    )


def _is_exact_without(editor: GraphEditor, node: Any) -> bool:
    held = editor.constant(node.input[1])
    if held is None:
        return False
    weights = held.view(np.int8)
    read = attribute(node, "T1" if node.op == PRODUCT else "Tinput").type
    if node.op != PRODUCT and read == tf.qint8.as_datatype_enum:
        return not (weights % 2).any()
    by_channel = node.op == DEPTHWISE and weights.shape[2] > 1
    return by_channel or int(np.abs(weights.astype(np.int16)).max(initial=0)) <= LARGEST
