"""Stores weights with many zeros as a bitmap and the values that are not zero. They are decoded to the same bits.

TensorFlow's own optimizer decodes a weight once, at the first call, in pieces: see decoding.py. A piece is

    GatherV2([0, values...], Cumsum(bits) * bits)

with `bits` from the bytes of the bitmap. A float32 weight needs 1 bit, and 32 more if it is not zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.weight_only.decoding import INDEX, PIECE, Decoder
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import dtype_attr
from tfopt.report import Change, PassReport, Skip

MINIMUM_SIZE = 1024  # values; the nodes that decode fewer take more bytes than they save
WORTHWHILE = 0.9  # of the bytes of the dense weight
FLOATS = (tf.float32, tf.float16, tf.bfloat16)
INTEGERS = (tf.int8, tf.qint8)
BYTE = dtype_attr(tf.uint8)


def encode_zeros(graph: FrozenGraph) -> tuple[FrozenGraph, PassReport]:
    """Returns the graph with its weights of many zeros stored without them, and the report.

    The weights are constants, in float or in int8. The metrics are the bytes of the large ones before and after.
    """
    editor = GraphEditor(graph.graph_def)
    changed, skipped = [], []
    before = after = 0
    for name in [name for name, node in editor.nodes.items() if node.op == "Const"]:
        dtype = tf.as_dtype(editor.nodes[name].attr["dtype"].type)
        if dtype not in (*FLOATS, *INTEGERS):
            continue
        values = _plain(editor.value(name), dtype)
        if values.size < MINIMUM_SIZE:
            continue
        kind = next((str(editor.nodes[reader].op) for reader in editor.consumers.get(name, ())), "")
        dense, sparse = values.nbytes, -(-values.size // 8) + values.itemsize * int(np.count_nonzero(values))
        before += dense
        if sparse > WORTHWHILE * dense:
            after += dense
            skipped.append(Skip(name=name, kind=kind, reason=f"{_zeros(values):.0%} zeros are too few to save bytes"))
            continue
        after += sparse
        editor.redirect(name, _Decoder(editor, name, dtype).decoded(values))
        changed.append(
            Change(name=name, kind=kind, detail=f"{_zeros(values):.1%} zeros, {dense:,} -> {sparse:,} bytes")
        )
    editor.share_constants()  # each piece has the same small ones
    metrics = {"weight_bytes_before": float(before), "weight_bytes": float(after)}
    report = PassReport(name="sparse_weights", changed=changed, skipped=skipped, metrics=metrics)
    return graph.edited(editor), report


def _plain(values: Any, dtype: tf.DType) -> Any:
    return values.view(np.int8) if dtype == tf.qint8 else values


def _zeros(values: Any) -> float:
    return 1 - np.count_nonzero(values) / values.size


class _Decoder(Decoder):
    """Adds the nodes for one weight to a graph."""

    def __init__(self, editor: GraphEditor, name: str, dtype: tf.DType) -> None:
        super().__init__(editor, name, whole=False)
        self._dtype, self._kind = dtype, dtype_attr(dtype)

    def decoded(self, values: Any) -> str:
        """Stores an array, and returns the tensor of it."""
        flat = values.reshape(-1)
        pieces = [self._piece(flat[start : start + PIECE]) for start in range(0, flat.size, PIECE)]
        return self._reshape(self._concatenate(pieces, axis=0, kind=self._kind), values.shape, self._kind)

    def _piece(self, values: Any) -> str:
        # -0.0 is stored as a value, so that the decoded weight has the same bits.
        stored = values.view(f"u{values.itemsize}") != 0
        packed = np.packbits(stored, bitorder="little")[:, None]
        shifts = self._constant(np.arange(8, dtype=np.uint8))
        shifted = self._add("RightShift", [self._constant(packed), shifts], T=BYTE)
        masked = self._add("BitwiseAnd", [shifted, self._constant(np.uint8(1))], T=BYTE)
        bits = self._add("Cast", [self._reshape(masked, (-1,), BYTE)], SrcT=BYTE, DstT=INDEX)
        if values.size % 8:
            limits = [self._constant(np.array([limit], np.int32)) for limit in (0, values.size)]
            bits = self._add("Slice", [bits, *limits], T=INDEX, Index=INDEX)
        counts = self._add("Cumsum", [bits, self._constant(np.int32(0))], T=INDEX, Tidx=INDEX)
        places = self._add("Mul", [counts, bits], T=INDEX)
        table = np.concatenate([np.zeros(1, values.dtype), values[stored]])
        kept = self._constant(table, self._dtype if self._dtype == tf.qint8 else None)
        inputs = [kept, places, self._constant(np.int32(0))]
        return self._add("GatherV2", inputs, Tparams=self._kind, Tindices=INDEX, Taxis=INDEX)
