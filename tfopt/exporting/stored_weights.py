"""Stores a graph's weights in fewer bytes: in few bits, or without their zeros. The graph still computes in float32.

To decode once, at the first call, TensorFlow's own optimizer (grappler) is used. It evaluates nodes that depend on
constants alone, except nodes that make more than 100 KiB out of less (kMaxConstantSize in its constant_folding.cc). So
a weight is decoded in pieces of at most 96 KiB. They are then joined and scaled, which makes no node larger. The
optimizer folds all of this into one float32 constant, and the kernels read the same as in a float32 artifact. Without
the optimizer the result is the same, but slower.

To decode at every call, one op decodes a whole weight. The weight must then not be a constant (see signatures.py).

int4 values are stored in pairs, two in a byte. The first half of a piece is in the low four bits, and the second half
in the high four bits. Arithmetic shifts restore their sign.

Weights with many zeros are stored as a bitmap and the other values, and decoded to the same bits. A piece is

    GatherV2([0, values...], Cumsum(bits) * bits)

with `bits` from the bytes of the bitmap. A float32 weight needs 1 bit, and 32 more if it is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, attribute, copy_attributes, dtype_attr
from tfopt.quantization.annotation.grids import lost_weights, share_lost
from tfopt.quantization.config import check_exclude, matches
from tfopt.quantization.weight_only import Grouped, WeightOnlyConfig, quantize_matrix
from tfopt.report import Change, PassReport, Skip

INTEGERS = {"int8_weight_only": 8, "int4_weight_only": 4}
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# Ops that read weights, and the positions of these inputs. Loops and branches pass theirs on.
READERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2"), (1,)
    ),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), (0, 1)),
    **dict.fromkeys(("GatherV2", "Gather"), (0,)),
}
FUNCTIONS = ("Einsum", "While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
CHANNELS_IN_ROWS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "GatherV2", "Gather")

PIECE = 24 * 1024  # values; 96 KiB when decoded
SPARSE_MINIMUM = 1024  # values; the nodes that decode fewer zeros take more bytes than they save
WORTHWHILE = 0.9  # of the bytes of the dense weight, without its zeros
SPARSE_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.int8, tf.qint8)
BYTE = dtype_attr(tf.uint8)


def encode_weights(graph: FrozenGraph, precision: str, config: WeightOnlyConfig) -> tuple[FrozenGraph, PassReport]:
    """Returns the float32 graph with its large weights stored in fewer bits, and the report.

    The precision is a key of INTEGERS or HALVES. The report's metrics are the "bits_per_weight" of the changed weights,
    and their "relative_error" as a ratio of norms. `config.exclude` must name nodes of the graph.
    """
    editor = GraphEditor(graph.graph_def)
    check_exclude(config.exclude, editor.nodes)
    changed, skipped, encoded = [], [], []
    for name in [name for name, node in editor.nodes.items() if node.op == "Const"]:
        kind = _kind_of_reader(editor, name)
        weights = editor.value(name) if kind else np.zeros(0)
        if kind is None or weights.dtype != np.float32 or (weights.size < config.minimum_size and weights.ndim < 2):
            continue  # no weights, or a bias
        reason = _obstacle(editor, name, weights, precision, config)
        if reason is not None:
            skipped.append(Skip(name=name, kind=kind, reason=reason))
            continue
        stored = _store(editor, name, weights, precision, config, _gathers(editor, name, graph.output_nodes))
        encoded.append((weights, stored))
        changed.append(Change(name=name, kind=kind, detail=f"{stored.detail}, {weights.shape}"))
    notes = lost_weights({change.name: stored.lost for change, (_, stored) in zip(changed, encoded, strict=True)})
    report = PassReport(name=precision, changed=changed, skipped=skipped, metrics=_metrics(encoded), notes=notes)
    return graph.edited(editor), report


@dataclass(frozen=True, kw_only=True)
class _Stored:
    error: float  # sum of squares
    size: int  # bytes
    lost: float  # share of the weights other than 0 that became 0
    detail: str


def _metrics(encoded: list[tuple[np.ndarray, _Stored]]) -> dict[str, float]:
    if not encoded:
        return {}
    count = sum(weights.size for weights, _ in encoded)
    norm = sum(_squares(weights) for weights, _ in encoded)
    return {
        "bits_per_weight": 8 * sum(stored.size for _, stored in encoded) / count,
        "relative_error": float(np.sqrt(sum(stored.error for _, stored in encoded) / max(norm, 1e-30))),
    }


def _squares(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def _kind_of_reader(editor: GraphEditor, name: str) -> str | None:
    """Returns the kind of the op that reads a constant as its weights, or None if there is none."""
    for reader in editor.consumers.get(name, ()):
        node = editor.nodes[reader]
        places = [place for place, tensor in enumerate(node.input) if tensor == name]
        if node.op in FUNCTIONS or set(places).intersection(READERS.get(node.op, ())):
            return str(node.op)
    return None


def _obstacle(
    editor: GraphEditor, name: str, weights: np.ndarray, precision: str, config: WeightOnlyConfig
) -> str | None:
    if any(matches(node, config.exclude) for node in (name, *editor.consumers[name])):
        return "excluded by the configuration"
    if weights.size < config.minimum_size:
        return f"fewer values than minimum_size={config.minimum_size}: lower minimum_size to store it in fewer bits too"
    if not np.isfinite(weights).all():
        return "its weights hold NaN or infinity"
    if precision == "float16" and np.abs(weights).max() > np.finfo(np.float16).max:
        return "its weights exceed the range of float16"
    if precision == "float16" and 0 < np.abs(weights).max() < np.finfo(np.float16).tiny:
        return "its weights are below the range of float16"
    return "a vector" if weights.ndim < 2 and precision in INTEGERS else None


def _store(
    editor: GraphEditor, name: str, weights: np.ndarray, precision: str, config: WeightOnlyConfig, gathers: list[Any]
) -> _Stored:
    """Replaces a weight, or the rows of it that only Gather nodes read, by nodes that decode it."""
    decoder = Decoder(editor, name, whole=config.decode == "call")
    if precision in HALVES:
        halves = weights.astype(HALVES[precision])
        decode, gathered = partial(decoder.halves, halves), partial(decoder.gathered_halves, stored=halves)
        decoded, size, detail = halves.astype(np.float32), halves.nbytes, str(halves.dtype)
    else:
        readers, bits = _readers(editor, name), INTEGERS[precision]
        columns = weights.shape[-1]
        if any(reader.op == "DepthwiseConv2dNative" for reader in readers):
            columns *= weights.shape[-2]  # the input channels times the depth multiplier
        axis = 0 if any(_channels_in_rows(reader, name) for reader in readers) else 1
        group_size = config.group_size if bits == 4 else None
        grouped = quantize_matrix(weights.reshape(-1, columns), bits=bits, group_size=group_size, channel_axis=axis)
        decode = partial(decoder.integers, grouped, bits, weights.shape)
        gathered = partial(decoder.gathered_integers, grouped=grouped, bits=bits)
        decoded = grouped.decoded().reshape(weights.shape)
        size = (grouped.steps.size * bits + grouped.scales.size * (32 if bits == 8 else 16)) // 8
        groups = f"in groups of {grouped.steps.shape[2 - axis]}" if group_size else "per channel"
        detail = f"int{bits} {groups}"
    for gather in gathers:
        editor.redirect(gather.name, gathered(gather))
    if not gathers:
        editor.redirect(name, decode())
    return _Stored(error=_squares(decoded - weights), size=size, lost=share_lost(weights, decoded), detail=detail)


def _readers(editor: GraphEditor, name: str) -> list[Any]:
    return [editor.nodes[reader] for reader in dict.fromkeys(editor.consumers[name])]


def _gathers(editor: GraphEditor, name: str, outputs: frozenset[str]) -> list[Any]:
    """Returns the nodes that read rows of a matrix, if nothing else reads it. Then the whole need not be decoded."""
    readers = _readers(editor, name)
    picks = editor.value(name).ndim == 2 and all(_picks_rows(editor, node, name) for node in readers)
    return readers if picks and not outputs.intersection(node.name for node in readers) else []


def _picks_rows(editor: GraphEditor, node: Any, name: str) -> bool:
    if node.op not in ("GatherV2", "Gather") or node.input[0] != name:
        return False
    axis = editor.constant(node.input[2]) if node.op == "GatherV2" else np.int32(0)
    return axis is not None and int(axis) == 0 and attribute(node, "batch_dims").i == 0


def _channels_in_rows(node: Any, name: str) -> bool:
    transposed = attribute(node, "transpose_b").b or attribute(node, "adj_y").b
    return node.op in CHANNELS_IN_ROWS or bool(transposed and node.input[1] == name)


def encode_zeros(graph: FrozenGraph) -> tuple[FrozenGraph, PassReport]:
    """Returns the graph with its weights of many zeros stored without them, and the report.

    The weights are constants, in float or in int8. The metrics are the bytes of the large ones before and after.
    """
    editor = GraphEditor(graph.graph_def)
    changed, skipped = [], []
    before = after = 0
    for name in [name for name, node in editor.nodes.items() if node.op == "Const"]:
        dtype = tf.as_dtype(editor.nodes[name].attr["dtype"].type)
        if dtype not in SPARSE_DTYPES:
            continue
        values: Any = editor.value(name)
        values = values.view(np.int8) if dtype == tf.qint8 else values
        if values.size < SPARSE_MINIMUM:
            continue
        kind = next((str(editor.nodes[reader].op) for reader in editor.consumers.get(name, ())), "")
        zeros = 1 - np.count_nonzero(values) / values.size
        dense, sparse = values.nbytes, -(-values.size // 8) + values.itemsize * int(np.count_nonzero(values))
        before += dense
        if sparse > WORTHWHILE * dense:
            after += dense
            skipped.append(Skip(name=name, kind=kind, reason=f"{zeros:.0%} zeros are too few to save bytes"))
            continue
        after += sparse
        editor.redirect(name, Decoder(editor, name).without_zeros(values, dtype))
        changed.append(Change(name=name, kind=kind, detail=f"{zeros:.1%} zeros, {dense:,} -> {sparse:,} bytes"))
    editor.share_constants()  # each piece has the same small ones
    metrics = {"weight_bytes_before": float(before), "weight_bytes": float(after)}
    report = PassReport(name="sparse_weights", changed=changed, skipped=skipped, metrics=metrics)
    return graph.edited(editor), report


class Decoder:
    """Adds the nodes for one weight to a graph. The names of all nodes begin with the weight's name.

    With `whole` the weight is decoded at once and not in pieces.
    """

    def __init__(self, editor: GraphEditor, name: str, *, whole: bool = False) -> None:
        self._editor = editor
        self._name = name
        self._whole = whole

    def halves(self, stored: np.ndarray) -> str:
        """Stores values in float16 or bfloat16, and returns the float32 tensor of them."""
        return self._reshape(self._in_pieces(stored, self._cast_constant), stored.shape)

    def integers(self, grouped: Grouped, bits: int, shape: tuple[int, ...]) -> str:
        """Stores a matrix in integers of `bits` bits, and returns the float32 tensor of it in `shape`."""
        unpack = self._unpack_constant if bits == 4 else self._cast_constant
        steps = self._reshape(self._in_pieces(grouped.steps, unpack), grouped.steps.shape)
        filled = self._multiply(steps, self._scales(grouped, bits))
        return self._reshape(self._cut(filled, grouped, grouped.shape[0]), shape)

    def gathered_halves(self, gather: Any, stored: np.ndarray) -> str:
        """Stores a table in float16 or bfloat16, and returns in float32 the rows that a Gather node reads."""
        return self._cast(self._gather(gather, self._constant(stored), stored.dtype), stored.dtype)

    def gathered_integers(self, gather: Any, grouped: Grouped, bits: int) -> str:
        """Stores a table in integers, each row as a channel, and returns the rows that a Gather node reads."""
        rows, groups, size = grouped.steps.shape
        table = grouped.steps.reshape(rows, -1)
        indices = self._reshape(gather.input[1], (-1,), gather.attr["Tindices"])
        if bits == 4:
            low, high = self._unpack(self._gather(gather, self._constant(_pack(table)), np.int8, indices))
            steps = self._slice(self._concatenate([low, high], axis=1), (0, 0), (-1, groups * size))
        else:
            steps = self._cast(self._gather(gather, self._constant(table), np.int8, indices), np.int8)
        scales = self._gather(gather, self._scales(grouped, bits), np.float32, indices)
        values = self._cut(self._multiply(self._reshape(steps, (-1, groups, size)), scales), grouped, rows=-1)
        sizes = self._add("Shape", [gather.input[1]], T=gather.attr["Tindices"], out_type=INT32)
        shape = self._concatenate([sizes, self._constant(np.asarray([grouped.shape[1]], np.int32))], axis=0, kind=INT32)
        return self._add("Reshape", [values, shape], T=FLOAT32, Tshape=INT32)

    def without_zeros(self, values: Any, dtype: tf.DType) -> str:
        flat = values.reshape(-1)
        pieces = [self._piece_without_zeros(flat[start : start + PIECE], dtype) for start in range(0, flat.size, PIECE)]
        return self._reshape(self._concatenate(pieces, axis=0, kind=dtype_attr(dtype)), values.shape, dtype_attr(dtype))

    def _piece_without_zeros(self, values: Any, dtype: tf.DType) -> str:
        # -0.0 is stored as a value, so that the decoded weight has the same bits.
        stored = values.view(f"u{values.itemsize}") != 0
        packed = np.packbits(stored, bitorder="little")[:, None]
        shifts = self._constant(np.arange(8, dtype=np.uint8))
        shifted = self._add("RightShift", [self._constant(packed), shifts], T=BYTE)
        masked = self._add("BitwiseAnd", [shifted, self._constant(np.uint8(1))], T=BYTE)
        bits = self._add("Cast", [self._reshape(masked, (-1,), BYTE)], SrcT=BYTE, DstT=INT32)
        if values.size % 8:
            limits = [self._constant(np.array([limit], np.int32)) for limit in (0, values.size)]
            bits = self._add("Slice", [bits, *limits], T=INT32, Index=INT32)
        counts = self._add("Cumsum", [bits, self._constant(np.int32(0))], T=INT32, Tidx=INT32)
        places = self._add("Mul", [counts, bits], T=INT32)
        table = np.concatenate([np.zeros(1, values.dtype), values[stored]])
        kept = self._constant(table, dtype if dtype == tf.qint8 else None)
        inputs = [kept, places, self._constant(np.int32(0))]
        return self._add("GatherV2", inputs, Tparams=dtype_attr(dtype), Tindices=INT32, Taxis=INT32)

    def _in_pieces(self, values: np.ndarray, decode: Callable[[np.ndarray], Sequence[str]]) -> str:
        """Returns the flat tensor of stored values in float32."""
        flat = values.reshape(-1)
        size = flat.size if self._whole else PIECE
        pieces = [flat[start : start + size] for start in range(0, flat.size, size)]
        joined = self._concatenate([part for piece in pieces for part in decode(piece)], axis=0)
        # Only the last piece can have an odd length. Half a byte of it is then unused.
        odd = decode == self._unpack_constant and flat.size % 2
        return self._slice(joined, (0,), (flat.size,)) if odd else joined

    def _cast_constant(self, values: np.ndarray) -> Sequence[str]:
        return [self._cast(self._constant(values), values.dtype)]

    def _unpack_constant(self, values: np.ndarray) -> Sequence[str]:
        return self._unpack(self._constant(_pack(values[None])[0]))

    def _unpack(self, packed: str) -> Sequence[str]:
        """Returns the low and the high four bits of bytes in float32."""
        four, kind = self._constant(np.int8(4)), dtype_attr(tf.int8)
        low = self._add("RightShift", [self._add("LeftShift", [packed, four], T=kind), four], T=kind)
        high = self._add("RightShift", [packed, four], T=kind)
        return [self._cast(low, np.int8), self._cast(high, np.int8)]

    def _scales(self, grouped: Grouped, bits: int) -> str:
        scales = grouped.scales
        return self._constant(scales) if bits == 8 else self.halves(scales.astype(ml_dtypes.bfloat16))

    def _cut(self, filled: str, grouped: Grouped, rows: int) -> str:
        """Removes the values that fill up the last groups."""
        if grouped.filled_shape == grouped.shape:
            return filled
        matrix = self._reshape(filled, (-1, grouped.filled_shape[1]))
        return self._slice(matrix, (0, 0), (rows, grouped.shape[1]))

    def _gather(self, node: Any, table: str, dtype: Any, indices: str | None = None) -> str:
        inputs = [table, indices or node.input[1], *node.input[2:]]
        attributes = copy_attributes(node, ("Tindices", "Taxis", "batch_dims", "validate_indices"))
        return self._add(node.op, inputs, Tparams=dtype_attr(tf.as_dtype(dtype)), **attributes)

    def _cast(self, tensor: str, dtype: Any) -> str:
        return self._add("Cast", [tensor], SrcT=dtype_attr(tf.as_dtype(dtype)), DstT=FLOAT32)

    def _multiply(self, one: str, other: str) -> str:
        return self._add("Mul", [one, other], T=FLOAT32)

    def _reshape(self, tensor: str, shape: Sequence[int], kind: AttrValue = FLOAT32) -> str:
        return self._add("Reshape", [tensor, self._constant(np.asarray(shape, np.int32))], T=kind, Tshape=INT32)

    def _slice(self, tensor: str, begin: Sequence[int], size: Sequence[int]) -> str:
        limits = [self._constant(np.asarray(begin, np.int32)), self._constant(np.asarray(size, np.int32))]
        return self._add("Slice", [tensor, *limits], T=FLOAT32, Index=INT32)

    def _concatenate(self, tensors: Sequence[str], axis: int, kind: AttrValue = FLOAT32) -> str:
        if len(tensors) == 1:
            return tensors[0]
        count = AttrValue(i=len(tensors))
        return self._add("ConcatV2", [*tensors, self._constant(np.int32(axis))], N=count, T=kind, Tidx=INT32)

    def _constant(self, value: Any, dtype: tf.DType | None = None) -> str:
        return self._editor.add_constant(f"{self._name}/stored", np.asarray(value), dtype)

    def _add(self, op: str, inputs: Sequence[str], **attributes: AttrValue) -> str:
        return self._editor.add(op, f"{self._name}/{op}", inputs, **attributes)


def _pack(table: np.ndarray) -> np.ndarray:
    """Packs each row of int4 values. Its first half is in the low four bits of bytes, its second in the high ones."""
    even = np.pad(table, [(0, 0), (0, table.shape[1] % 2)])
    low, high = np.split(even.astype(np.uint8), 2, axis=1)
    return ((low & 0xF) | (high << 4)).view(np.int8)
