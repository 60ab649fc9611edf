"""Stores a graph's weights in fewer bits. The graph still computes in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tfopt.exporting.weight_only.decoding import Decoder
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute
from tfopt.quantization.annotation.grids import lost_weights, share_lost
from tfopt.quantization.config import check_exclude, matches
from tfopt.quantization.weight_only import WeightOnlyConfig, quantize_matrix
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


def encode_weights(graph: FrozenGraph, precision: str, config: WeightOnlyConfig) -> tuple[FrozenGraph, PassReport]:
    """Returns the float32 graph with its large weights stored in fewer bits, and the report.

    The precision is a key of INTEGERS or HALVES. The report's metrics are the "bits_per_weight" of the changed weights,
    and their "relative_error" as a ratio of norms.

    Raises:
        ConfigError: `config.exclude` names no node.
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
        gathers = _gathers(editor, name, graph.output_nodes)
        whole = config.decode == "call"
        if precision in HALVES:
            stored = _store_halves(editor, name, weights.astype(HALVES[precision]), gathers, whole)
        else:
            size = config.group_size if precision == "int4_weight_only" else None
            stored = _store_integers(editor, name, weights, INTEGERS[precision], size, gathers, whole)
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
    """Returns why weights stay float32, or None."""
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


def _store_halves(editor: GraphEditor, name: str, stored: np.ndarray, gathers: list[Any], whole: bool) -> _Stored:
    decoder = Decoder(editor, name, whole=whole)
    exact = editor.value(name)
    for gather in gathers:
        editor.redirect(gather.name, decoder.gathered_halves(gather, stored))
    if not gathers:
        editor.redirect(name, decoder.halves(stored))
    return _Stored(
        error=_squares(stored.astype(np.float32) - exact),
        size=stored.nbytes,
        lost=share_lost(exact, stored),
        detail=str(stored.dtype),
    )


def _store_integers(
    editor: GraphEditor,
    name: str,
    weights: np.ndarray,
    bits: int,
    group_size: int | None,
    gathers: list[Any],
    whole: bool,
) -> _Stored:
    readers = _readers(editor, name)
    columns = weights.shape[-1]
    if any(reader.op == "DepthwiseConv2dNative" for reader in readers):
        columns *= weights.shape[-2]  # the input channels times the depth multiplier
    matrix = weights.reshape(-1, columns)
    channel_axis = 0 if any(_channels_in_rows(reader, name) for reader in readers) else 1
    grouped = quantize_matrix(matrix, bits=bits, group_size=group_size, channel_axis=channel_axis)
    decoder = Decoder(editor, name, whole=whole)
    for gather in gathers:
        editor.redirect(gather.name, decoder.gathered_integers(gather, grouped, bits))
    if not gathers:
        editor.redirect(name, decoder.integers(grouped, bits, weights.shape))
    groups = f"in groups of {grouped.steps.shape[2 - channel_axis]}" if group_size else "per channel"
    decoded = grouped.decoded()
    return _Stored(
        error=_squares(decoded - matrix),
        lost=share_lost(matrix, decoded),
        size=(grouped.steps.size * bits + grouped.scales.size * (32 if bits == 8 else 16)) // 8,
        detail=f"int{bits} {groups}",
    )


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
