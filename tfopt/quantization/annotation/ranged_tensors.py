"""The tensors that need a range, the tensors that share a range, and the nodes that read the quantized tensors.

Concatenation of quantized tensors only copies bytes, and average pooling has an int8 kernel. Both need the same range
for all inputs and the output. If only a concatenation reads a tensor, the tensor may take the range of the result: the
concatenation would round it to that range anyway. Any other tensor takes a wider range only if its step becomes at most
twice as large.

Two kinds of tensors cannot have a zero point, so their ranges become symmetric. The first kind is the result of an
activation that is fused into a product: the kernel adds its bias before the activation, but a zero point must be added
after it. The second kind is the input of a convolution whose padding depends on an open size: the kernel pads with the
byte 0, and the node that pads with the zero point needs to know the padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfopt.graph.edit import GraphEditor, is_nhwc, producer
from tfopt.graph.fold import CONVOLUTIONS, paddings_of
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, Fusion, before_data_movement, consumers_of
from tfopt.quantization.annotation.grids import Range, covering

SHARED_RANGE_OPS = ("ConcatV2", "AvgPool")
WIDEST = 2.0


def tensors_with_ranges(editor: GraphEditor, fusions: Sequence[Fusion]) -> list[str]:
    """Returns the tensors that need a range, in a stable order.

    They are the inputs and summands of fusions, and the results of convolutions, whose kernels have no float output.
    The result of a product needs a range only if another fusion reads it.
    """
    return sorted({tensor for fusion in fusions for tensor in tensors_of_fusion(editor, fusion)})


def tensors_to_observe(editor: GraphEditor, fusions: Sequence[Fusion]) -> list[str]:
    """Returns the tensors that need a range, or would need one if some fusions stayed float.

    A convolution cannot fuse a sum with the result of a float convolution. Its fusion then ends before the sum.
    """
    before_sums = {
        before
        for fusion in fusions
        for before, node in itertools.pairwise(fusion.nodes)
        if fusion.summand and fusion.summand in editor.nodes[node].input
    }
    return sorted({*tensors_with_ranges(editor, fusions), *before_sums})


def tensors_of_fusion(editor: GraphEditor, fusion: Fusion) -> list[str]:
    entering = [before_data_movement(editor, tensor) for tensor in (fusion.input, fusion.summand) if tensor]
    return entering + ([fusion.output] if editor.nodes[fusion.op].op in CONVOLUTIONS else [])


def quantized_consumers(
    editor: GraphEditor, fusions: Sequence[Fusion], shared_range_ops: Iterable[str]
) -> dict[str, set[str]]:
    """Returns the nodes that read the quantized form of a tensor, for each tensor that needs a range.

    The result of a fusion or of an op with a shared range exists only in quantized form: all its consumers read that.
    Any other tensor is read quantized by the fusions and ops that it enters, and by the ops that move its values there.
    """
    computed = {fusion.output for fusion in fusions} | set(shared_range_ops)
    reads: dict[str, set[str]] = {tensor: set() for tensor in tensors_with_ranges(editor, fusions)}
    for tensor in reads.keys() & computed:
        reads[tensor].update(editor.consumers.get(tensor, ()))
    entering = [(source, name) for name in shared_range_ops for source in values_of(editor.nodes[name])]
    for fusion in fusions:
        entering.append((fusion.input, fusion.op))
        if fusion.summand is not None:
            addition = next(name for name in fusion.nodes if fusion.summand in editor.nodes[name].input)
            entering.append((fusion.summand, addition))
    for source, reader in entering:
        while source not in reads:
            source, reader = editor.nodes[source].input[0], source
        reads[source].add(reader)
    return reads


def find_shared_range_ops(
    editor: GraphEditor, fusions: Sequence[Fusion], ranges: Mapping[str, Range]
) -> dict[str, tuple[str, ...]]:
    """Returns the concatenations and poolings in int8: they enter fusions, and all their tensors have one range.

    Each has the tensors that it reads, before the ops that only move values.
    """
    candidates = _shared_range_candidates(editor, fusions)
    return {
        name: inputs for name, inputs in candidates.items() if len({ranges[tensor] for tensor in (name, *inputs)}) == 1
    }


def values_of(node: Any) -> list[str]:
    """Returns the inputs of a ConcatV2 or AvgPool, without the axis."""
    return list(node.input[:-1] if node.op == "ConcatV2" else node.input)


def without_impossible_zero_points(
    graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion], ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Returns the ranges, made symmetric for tensors that no kernel can compute or read with a zero point."""
    shapes = graph.shapes()
    impossible = set()
    for fusion in fusions:
        node = editor.nodes[fusion.op]
        if node.op not in CONVOLUTIONS:
            if fusion.activation is not None:
                impossible.add(fusion.output)
        elif paddings_of(node, shapes[fusion.input], editor.value(fusion.weights).shape[:2]) is None:
            impossible.add(before_data_movement(editor, fusion.input))
    return {
        tensor: value_range.symmetric() if tensor in impossible else value_range
        for tensor, value_range in ranges.items()
    }


def share_ranges(
    editor: GraphEditor, fusions: Sequence[Fusion], outputs: frozenset[str], ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Returns the ranges, with one range for all tensors of a concatenation or pooling where that costs little."""
    groups: list[set[str]] = []
    candidates = _shared_range_candidates(editor, fusions)
    concats = {name for name in candidates if editor.nodes[name].op == "ConcatV2"}
    for name, inputs in candidates.items():
        group = {name, *inputs}
        touching = [other for other in groups if not other.isdisjoint(group)]
        group = group.union(*touching)
        if _shareable(editor, group, concats, outputs, ranges):
            groups = [other for other in groups if other not in touching] + [group]
    shared = dict(ranges)
    for group in groups:
        shared |= dict.fromkeys(group, _union(ranges[tensor] for tensor in group))
    return shared


def _union(ranges: Iterable[Range]) -> Range:
    """Returns the range that covers several ranges. It has a zero point only if none of them is signed."""
    given = list(ranges)
    low, high = min(each.low for each in given), max(each.limit for each in given)
    if any(each.signed for each in given):
        return Range(limit=max(high, -low), signed=True)
    return covering(low, high)


def _shared_range_candidates(editor: GraphEditor, fusions: Sequence[Fusion]) -> dict[str, tuple[str, ...]]:
    """Returns the concatenations and poolings that enter fusions, and whose inputs all have ranges."""
    ranged = set(tensors_with_ranges(editor, fusions))
    found = {}
    for tensor in sorted(ranged):
        node = editor.nodes[producer(tensor)]
        if node.name == tensor and node.op in SHARED_RANGE_OPS and is_nhwc(node):
            inputs = tuple(before_data_movement(editor, source) for source in values_of(node))
            if ranged.issuperset(inputs):
                found[tensor] = inputs
    return found


def _shareable(
    editor: GraphEditor, group: set[str], concats: set[str], outputs: frozenset[str], ranges: Mapping[str, Range]
) -> bool:
    if len({ranges[tensor].low < 0 for tensor in group}) > 1:
        return False
    step = _union(ranges[tensor] for tensor in group).scale
    return all(
        WIDEST * ranges[tensor].scale >= step or (tensor not in outputs and _readers(editor, tensor) <= concats & group)
        for tensor in group
    )


def _readers(editor: GraphEditor, tensor: str) -> set[str]:
    """Returns the nodes that compute with a tensor, directly or behind ops that only move its values."""
    return {name for name in consumers_of(editor, tensor) if editor.nodes[name].op not in DATA_MOVEMENT_OPS}
