"""Which tensors need a range, which of them share one, and who reads them quantized.

A concatenation of quantized tensors moves bytes, and average pooling has an int8 kernel, provided that a step means the
same in all that goes in and out. Of a concatenation, a tensor that nothing else reads loses nothing by taking the range
of the whole, since it would be rounded to that anyway; else a tensor takes a wider range where that makes its step at
most twice as large.

Two kinds of tensors cannot have a zero point, so their ranges become symmetric. The result of a product's fused
activation is one: the kernel adds its bias before the activation, where a zero point would have to be added behind it.
What a convolution pads by a number of zeros that is not known yet is the other: a kernel pads with the byte 0, and the
node that pads with the zero point needs the numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.graph.edit import GraphEditor, attribute, producer
from tfopt.graph.fold import CONVOLUTIONS
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.paddings import paddings_of
from tfopt.quantization.annotation.fusion import PASS_THROUGH, Fusion, pass_through_origin, readers_of
from tfopt.quantization.annotation.range import Range, covering

JOINTS = ("ConcatV2", "AvgPool")
WIDEST = 2.0


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A concatenation or average pooling of tensors with ranges.

    Attributes:
        output: Name of its node, which is that of its result.
        inputs: What it reads, each tensor as it was before ops that only move values.
    """

    output: str
    inputs: tuple[str, ...]


def tensors_with_ranges(editor: GraphEditor, fusions: Sequence[Fusion]) -> list[str]:
    """Returns the tensors that need a range, in a stable order.

    These are what enters a fusion, what a fused sum adds, and what leaves a convolution (its kernel has no float
    output) or a product whose result another fusion reads.
    """
    return sorted({tensor for fusion in fusions for tensor in tensors_of_fusion(editor, fusion)})


def tensors_to_observe(editor: GraphEditor, fusions: Sequence[Fusion]) -> list[str]:
    """Returns the tensors that need a range, or would if some of the fusions were left float.

    A convolution cannot fuse the sum with the result of one that is float, and then ends before it.
    """
    before_sums = {
        before
        for fusion in fusions
        for before, node in itertools.pairwise(fusion.nodes)
        if fusion.summand and fusion.summand in editor.nodes[node].input
    }
    return sorted({*tensors_with_ranges(editor, fusions), *before_sums})


def tensors_of_fusion(editor: GraphEditor, fusion: Fusion) -> list[str]:
    """Returns the tensors that one fusion needs a range for."""
    entering = [pass_through_origin(editor, tensor) for tensor in (fusion.input, fusion.summand) if tensor]
    return entering + ([fusion.output] if editor.nodes[fusion.op].op in CONVOLUTIONS else [])


def quantized_reads(
    editor: GraphEditor, fusions: Sequence[Fusion], joints: Sequence[Joint] = ()
) -> dict[str, set[str]]:
    """Returns for each tensor that needs a range the nodes that read it quantized.

    What a fusion or a joint computes is there in no other form. Of other tensors, these are the fusions and joints that
    they enter, and what moves their values on the way there.
    """
    computed = {fusion.output for fusion in fusions} | {joint.output for joint in joints}
    reads: dict[str, set[str]] = {tensor: set() for tensor in tensors_with_ranges(editor, fusions)}
    for tensor in reads.keys() & computed:
        reads[tensor].update(editor.consumers.get(tensor, ()))
    entering = [(source, joint.output) for joint in joints for source in values_of(editor.nodes[joint.output])]
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


def find_joints(editor: GraphEditor, fusions: Sequence[Fusion], ranges: Mapping[str, Range]) -> list[Joint]:
    """Returns the joints that stay in int8: they enter fusions, and all their tensors have the same range."""
    return [
        joint
        for joint in _candidates(editor, fusions)
        if len({ranges[tensor] for tensor in (joint.output, *joint.inputs)}) == 1
    ]


def values_of(node: Any) -> list[str]:
    """Returns the tensors whose values a ConcatV2 or AvgPool reads."""
    return list(node.input[:-1] if node.op == "ConcatV2" else node.input)


def without_impossible_zero_points(
    graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion], ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Returns the ranges, symmetric where no kernel could compute or read a tensor with a zero point.

    Args:
        graph: The float graph.
        editor: An editor of it.
        fusions: Its fusions.
        ranges: The range of each tensor by its own values.
    """
    shapes = graph.shapes()
    impossible = set()
    for fusion in fusions:
        node = editor.nodes[fusion.op]
        if node.op not in CONVOLUTIONS:
            if fusion.activation is not None:
                impossible.add(fusion.output)
        elif paddings_of(node, shapes[fusion.input], editor.value(fusion.weights).shape[:2]) is None:
            impossible.add(pass_through_origin(editor, fusion.input))
    return {tensor: span.symmetric() if tensor in impossible else span for tensor, span in ranges.items()}


def share_ranges(
    editor: GraphEditor, fusions: Sequence[Fusion], outputs: frozenset[str], ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Returns the ranges, those of each joint widened to one where that costs little.

    Args:
        editor: An editor of the float graph.
        fusions: Its fusions.
        outputs: Names of the nodes that the model returns.
        ranges: The range of each tensor by its own values.
    """
    groups: list[set[str]] = []
    joints = _candidates(editor, fusions)
    concats = {joint.output for joint in joints if editor.nodes[joint.output].op == "ConcatV2"}
    for joint in joints:
        group = {joint.output, *joint.inputs}
        touching = [other for other in groups if not other.isdisjoint(group)]
        group = group.union(*touching)
        if _shareable(editor, group, concats, outputs, ranges):
            groups = [other for other in groups if other not in touching] + [group]
    shared = dict(ranges)
    for group in groups:
        shared |= dict.fromkeys(group, _union(ranges[tensor] for tensor in group))
    return shared


def _union(ranges: Iterable[Range]) -> Range:
    """Returns the range that covers several: with a zero point only if all of them can have one."""
    spans = list(ranges)
    low, high = min(span.low for span in spans), max(span.limit for span in spans)
    if any(span.signed for span in spans):
        return Range(limit=max(high, -low), signed=True)
    return covering(low, high)


def _candidates(editor: GraphEditor, fusions: Sequence[Fusion]) -> list[Joint]:
    """Returns the joints that enter fusions, and read nothing but tensors that have ranges anyway."""
    ranged = set(tensors_with_ranges(editor, fusions))
    found = []
    for tensor in sorted(ranged):
        node = editor.nodes[producer(tensor)]
        if node.name == tensor and node.op in JOINTS and attribute(node, "data_format").s in (b"", b"NHWC"):
            inputs = tuple(pass_through_origin(editor, source) for source in values_of(node))
            if ranged.issuperset(inputs):
                found.append(Joint(output=tensor, inputs=inputs))
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
    """Returns the nodes that compute with a tensor, directly or behind what only moves its values."""
    return {name for name in readers_of(editor, tensor) if editor.nodes[name].op not in PASS_THROUGH}
