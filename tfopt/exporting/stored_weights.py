"""Stores a graph's weights in fewer bytes: in few bits, as places in a codebook, or without their zeros.

The graph still computes in float32. decoder.py adds the nodes that decode the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfopt.exporting.decoder import Decoder
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute, producer
from tfopt.quantization.annotation.grids import lost_weights, share_lost
from tfopt.quantization.config import check_exclude, matches
from tfopt.quantization.weight_only import WeightOnlyConfig, find_codebook, quantize_matrix
from tfopt.report import Change, PassReport, Skip

INTEGERS = {"int8_weight_only": 8, "int4_weight_only": 4}
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CODEBOOK = "codebook_weight_only"
NOT_SHARED = "its values are too many for a codebook: tfopt.cluster makes them few"

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

SPARSE_MINIMUM = 1024  # values; the nodes that decode fewer zeros take more bytes than they save
WORTHWHILE = 0.9  # of the bytes of the dense weight, without its zeros
SPARSE_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.int8, tf.qint8)


def encode_weights(graph: FrozenGraph, precision: str, config: WeightOnlyConfig) -> tuple[FrozenGraph, PassReport]:
    """Returns the float32 graph with its large weights stored in fewer bits, and the report.

    The precision is CODEBOOK, or a key of INTEGERS or HALVES. The report's metrics are the "bits_per_weight" of the
    changed weights, and their "relative_error" as a ratio of norms. `config.exclude` must name nodes of the graph.
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
        gathers = _gathers(editor, name, graph.output_nodes)
        stored = None if reason else _store(editor, name, weights, precision, config, gathers)
        if stored is None:
            skipped.append(Skip(name=name, kind=kind, reason=reason or NOT_SHARED))
            continue
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
    for node, read in _readers(editor, name):
        places = [place for place, tensor in enumerate(node.input) if tensor == read]
        if node.op in FUNCTIONS or set(places).intersection(READERS.get(node.op, ())):
            return str(node.op)
    return None


def _obstacle(
    editor: GraphEditor, name: str, weights: np.ndarray, precision: str, config: WeightOnlyConfig
) -> str | None:
    if any(matches(node, config.exclude) for node in (name, *(reader.name for reader, _ in _readers(editor, name)))):
        return "excluded by the configuration"
    if weights.size < config.minimum_size:
        return f"fewer values than minimum_size={config.minimum_size}: lower minimum_size to store it in fewer bits too"
    if not np.isfinite(weights).all():
        return "its weights hold NaN or infinity"
    if precision == "float16" and np.abs(weights).max() > np.finfo(np.float16).max:
        return "its weights exceed the range of float16"
    if precision == "float16" and 0 < np.abs(weights).max() < np.finfo(np.float16).tiny:
        return "its weights are below the range of float16"
    return "a vector" if weights.ndim < 2 and precision not in HALVES else None


def _store(
    editor: GraphEditor, name: str, weights: np.ndarray, precision: str, config: WeightOnlyConfig, gathers: list[Any]
) -> _Stored | None:
    """Replaces a weight, or the rows of it that only Gather nodes read, by nodes that decode it.

    Returns None, and replaces nothing, if the weight has too many values for a codebook.
    """
    decoder = Decoder(editor, name, whole=config.decode == "call")
    if precision in HALVES:
        halves = weights.astype(HALVES[precision])
        decode, gathered = partial(decoder.halves, halves), partial(decoder.gathered_halves, stored=halves)
        decoded, size, detail = halves.astype(np.float32), halves.nbytes, str(halves.dtype)
    elif precision == CODEBOOK:
        book = find_codebook(*_as_matrix(editor, name, weights))
        if book is None:
            return None
        decode = partial(decoder.codebook, book, weights.shape)
        gathered = partial(decoder.gathered_codebook, book=book)
        decoded = book.decoded().reshape(weights.shape)
        size, detail = book.size_bytes, f"{book.bits} bits and a codebook of {book.values.size} values"
    else:
        bits = INTEGERS[precision]
        matrix, axis = _as_matrix(editor, name, weights)
        group_size = config.group_size if bits == 4 else None
        grouped = quantize_matrix(matrix, bits=bits, group_size=group_size, channel_axis=axis)
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


def _readers(editor: GraphEditor, name: str) -> list[tuple[Any, str]]:
    """Returns the nodes that read a weight, each with the tensor that it reads.

    This is the weight, or the product of it and a scale, which folding keeps apart from a weight of few values.
    """
    found = []
    for reader in dict.fromkeys(editor.consumers.get(name, ())):
        node = editor.nodes[reader]
        constant = all(editor.nodes[producer(tensor)].op == "Const" for tensor in node.input)
        is_scaled = node.op == "Mul" and node.input[0] == name and constant
        found += _readers(editor, reader) if is_scaled else [(node, name)]
    return found


def _as_matrix(editor: GraphEditor, name: str, weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns a weight as a matrix, and the axis of its output channels."""
    readers, columns = _readers(editor, name), weights.shape[-1]
    if any(reader.op == "DepthwiseConv2dNative" for reader, _ in readers):
        columns *= weights.shape[-2]  # the input channels times the depth multiplier
    axis = 0 if any(_channels_in_rows(reader, tensor) for reader, tensor in readers) else 1
    return weights.reshape(-1, columns), axis


def _gathers(editor: GraphEditor, name: str, outputs: frozenset[str]) -> list[Any]:
    """Returns the nodes that read rows of a matrix, if nothing else reads it. Then the whole need not be decoded."""
    readers = [node for node, _ in _readers(editor, name)]
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


def shares_values(weights: np.ndarray) -> bool:
    """Whether a weight takes few enough values for one codebook, which a scale for each channel would make more."""
    return find_codebook(weights.reshape(1, -1)) is not None


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
