"""Finds fusions: nodes that one int8 kernel computes together.

A fusion is `op -> [bias] -> [+ summand] -> [activation]`, where op is a convolution or a matrix product. Only the
next node reads the result of a node, so that no value inside the fusion is needed elsewhere. After a convolution, the
activation is a Relu or Relu6. After a product, it is any activation that tfopt.quantization.annotation.activations
finds. The input and the output of a fusion are the tensors that get a range.

A fused sum needs two more conditions. First, the kernel adds into the buffer of the summand, and it crashes while
another node uses that buffer. So every other reader of the summand must be an ancestor of the fusion's first op, which
has then certainly finished. Readers behind an op that only moves values count too, because the result of such an op may
share the buffer. Second, the summand must be available in int8: as the result of a Relu, of a convolution, or of such a
sum.

The kernel of a grouped convolution takes one range for the weights of all output channels; with one for each, oneDNN
has no kernel. Its rounding errors are then as large in each channel as in that of the largest weights. A channel's
range h[c] is the largest of its weights. The mean square of the errors is max(h)^2 / mean(h^2) times what it is with
ranges of their own, and a bit of the weights is a factor of 4. A convolution that would lose more than LOST_BITS stays
float.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, attribute, is_nhwc, producer
from tfopt.graph.fold import CONVOLUTIONS, WEIGHTED
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.activations import Activation, find_activation
from tfopt.quantization.config import matches
from tfopt.report import Skip

ADDITIONS = ("Add", "AddV2")
RELUS = ("Relu", "Relu6")
FAKE_QUANT = "FakeQuantWithMinMaxArgs"
FAKE_QUANT_WEIGHTS = "FakeQuantWithMinMaxVarsPerChannel"
# Ops that only move or select values, so that the result has the range of the input.
DATA_MOVEMENT_OPS = (
    *("MaxPool", "Pad", "Tile", "Transpose", "Reshape", "Squeeze", "ExpandDims", "Identity", "ResizeNearestNeighbor"),
)
WITHOUT_LOWERING = ("BatchMatMulV2", "Einsum", "Conv2DBackpropInput", "Conv3D")
Shapes = Mapping[str, tf.TensorShape]
LOST_BITS = 2  # of the weights of a grouped convolution
EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Nodes of the float graph that one kernel computes, and the tensors that it reads.

    Attributes:
        op: Name of the Conv2D, DepthwiseConv2dNative or MatMul node.
        nodes: Names of all its nodes in order, `op` first.
        weights: The float weights. The output channels are the last axis; in a depthwise convolution the third.
        summand: Tensor that is added before the activation, or None.
        per_channel: Whether each output channel has a range of its own for its weights. A grouped convolution has one
            for all channels.
    """

    op: str
    nodes: tuple[str, ...]
    input: str
    weights: str
    bias: str | None
    summand: str | None
    activation: Activation | None
    per_channel: bool = True

    @property
    def output(self) -> str:
        return self.nodes[-1]

    def within(self, editor: GraphEditor) -> Fusion:
        """Returns the fusion with the tensors that its nodes read in another graph, which has nodes of these names."""
        source, weights = editor.nodes[self.op].input[:2]
        before = {following: node for node, following in itertools.pairwise(self.nodes)}
        bias = summand = None
        for name in self.nodes[1:]:
            node = editor.nodes[name]
            if self.bias is not None and name == self.nodes[1]:
                bias = node.input[1]
            elif self.summand is not None and node.op in ADDITIONS and summand is None:
                summand = _other_input(node, before[name])
        return replace(self, input=source, weights=weights, bias=bias, summand=summand)


class FusionSearch:
    """Finds the fusions of a graph without fake quantization, with all of its nodes or without some.

    The ops that names or shell-style patterns in `exclude` match start no fusion.
    """

    def __init__(self, graph: FrozenGraph, editor: GraphEditor, exclude: Iterable[str] = ()) -> None:
        self._graph, self._editor, self._shapes = graph, editor, graph.shapes()
        self._order = {name: position for position, name in enumerate(_structural_order(editor, graph))}
        patterns = tuple(exclude)
        self._obstacles = {name: _obstacle(editor, self._shapes, editor.nodes[name], patterns) for name in self._order}

    def find(
        self, kept_float: Mapping[str, str] = EMPTY, obstacle: Callable[[Fusion], str | None] = lambda fusion: None
    ) -> tuple[list[Fusion], list[Skip]]:
        """Returns the fusions in the order of computation, and the ops that start none, each with the reason.

        Without one fusion, others may change, because they may have fused its result. So the search is repeated until
        `obstacle` returns no reason against any fusion. `kept_float` has further ops that start none, with the reasons.
        """
        refused = dict(kept_float)
        while True:
            fusions, skipped = self._find(refused)
            found = {fusion.op: reason for fusion in fusions if (reason := obstacle(fusion)) is not None}
            if not found:
                return fusions, skipped
            refused |= found

    def _find(self, refused: Mapping[str, str]) -> tuple[list[Fusion], list[Skip]]:
        editor, order = self._editor, self._order
        obstacles = {name: refused.get(name) or reason for name, reason in self._obstacles.items()}
        heads = {name for name, reason in obstacles.items() if reason is None}
        fusions: list[Fusion] = []
        # Two convolutions may meet in one sum. The later one fuses the sum, as the other result is computed by then.
        claimed: set[str] = set()
        for name in reversed(order):
            if name in heads:
                fusion = self._follow(name, heads, claimed)
                claimed.update(fusion.nodes)
                fusions.append(fusion)
        skips = [
            Skip(name=name, kind=editor.nodes[name].op, reason=reason) for name, reason in obstacles.items() if reason
        ]
        inside = "inside a function: a loop or a branch"
        skips += [
            Skip(name=f"{function.signature.name}/{node.name}", kind=node.op, reason=inside)
            for function in self._graph.graph_def.library.function
            for node in function.node_def
            if node.op in (*WEIGHTED, *WITHOUT_LOWERING)
        ]
        return sorted(fusions, key=lambda fusion: order[fusion.output]), skips

    def _follow(self, name: str, heads: set[str], claimed: set[str]) -> Fusion:
        """Returns the fusion that a node starts, without nodes that others have claimed."""
        editor, outputs = self._editor, self._graph.output_nodes
        nodes, bias, summand = [name], None, None
        op = editor.nodes[name].op
        while True:
            last = nodes[-1]
            activation = self._fusible_activation(op, last, claimed)
            if activation is not None:
                nodes += activation.nodes
                break
            if last in outputs or len(editor.consumers.get(last, ())) != 1:
                break
            follower = editor.nodes[editor.consumers[last][0]]
            if follower.name in claimed:
                break
            if len(nodes) == 1 and self._adds_bias(follower, name):
                bias = follower.input[1]
            elif follower.op in ADDITIONS and summand is None:
                other = _other_input(follower, last)
                if other is None or not self._sum_fits(name, follower, other, heads):
                    break
                summand = other
            else:
                break
            nodes.append(follower.name)
        return Fusion(
            op=name,
            nodes=tuple(nodes),
            input=editor.nodes[name].input[0],
            weights=editor.nodes[name].input[1],
            bias=bias,
            summand=summand,
            activation=activation,
            per_channel=not _is_grouped(editor.nodes[name], self._shapes),
        )

    def _adds_bias(self, node: Any, source: str) -> bool:
        """Whether a node adds a bias to a convolution or product. That of a grouped convolution is an AddV2."""
        if node.op not in ("BiasAdd", "AddV2") or node.input[0] != source:
            return False
        constant = self._editor.constant(node.input[1])
        return constant is not None and (node.op == "BiasAdd" or constant.shape == (self._shapes[source][-1],))

    def _fusible_activation(self, op: str, tensor: str, claimed: set[str]) -> Activation | None:
        found = find_activation(self._editor, tensor, self._graph.output_nodes)
        if found is None or claimed.intersection(found.nodes):
            return None
        return found if op == "MatMul" or found.name in RELUS else None

    def _sum_fits(self, name: str, addition: Any, summand: str, heads: set[str]) -> bool:
        """Whether the kernel of the node `name` can fuse this addition; see the docstring of the module."""
        editor, shapes = self._editor, self._shapes
        if editor.nodes[name].op != "Conv2D" or ":" in summand or not _same_shape(shapes[name], shapes[summand]):
            return False
        source = editor.nodes[summand]
        # The result of a MaxPool has its own buffer.
        computed = before_data_movement(editor, summand) if source.op == "MaxPool" else summand
        in_int8 = self._is_in_int8(editor.nodes[producer(computed)], heads)
        if not in_int8 or not self._graph.output_nodes.isdisjoint((source.name, addition.name)):
            return False
        return consumers_of(editor, source.name) - {addition.name} <= editor.ancestors(name)

    def _is_in_int8(self, node: Any, heads: set[str]) -> bool:
        """Whether a node's result is available in int8: of a Relu, of a convolution in int8, or of a sum with one."""
        if node.op in ADDITIONS:
            return any(self._ends_convolution(self._editor.nodes[producer(source)], heads) for source in node.input)
        return node.op in RELUS or self._ends_convolution(node, heads)

    def _ends_convolution(self, node: Any, heads: set[str]) -> bool:
        head = producer(node.input[0]) if node.op == "BiasAdd" else node.name
        alone = head == node.name or self._editor.consumers[head] == [node.name]
        return head in heads and self._editor.nodes[head].op == "Conv2D" and alone


def find_fusions(
    graph: FrozenGraph, editor: GraphEditor, exclude: Iterable[str] = ()
) -> tuple[list[Fusion], list[Skip]]:
    """Returns the fusions of a graph, and the convolutions and products that start no fusion; see `FusionSearch`."""
    return FusionSearch(graph, editor, exclude).find()


def before_data_movement(editor: GraphEditor, tensor: str) -> str:
    """Returns the tensor that has the values and the range of `tensor`, before the ops that only move values."""
    node = editor.nodes[producer(tensor)]
    while ":" not in tensor and node.op in DATA_MOVEMENT_OPS:
        tensor = node.input[0]
        node = editor.nodes[producer(tensor)]
    return tensor


def _structural_order(editor: GraphEditor, graph: FrozenGraph) -> list[str]:
    """Returns the node names in an order that depends on the edges only, not on the order in the GraphDef.

    Nodes are sorted by their distance from the inputs, and at the same distance by the order in which the outputs need
    them. So a model that was trained with ranges has the same fusions as the float model.
    """
    distance: dict[str, int] = {}
    for name in editor.topological():
        distance[name] = max((distance[producer(tensor)] + 1 for tensor in editor.nodes[name].input), default=0)
    needed: dict[str, int] = {}
    stack = [producer(tensor) for tensor, _ in reversed([*graph.outputs.values()])]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed[name] = len(needed)
            stack += [producer(tensor) for tensor in reversed(editor.nodes[name].input)]
    return sorted(distance, key=lambda name: (distance[name], needed.get(name, len(needed))))


def _obstacle(editor: GraphEditor, shapes: Shapes, node: Any, patterns: tuple[str, ...]) -> str | None:
    """Returns None if the node can start a fusion, "" if it is no convolution or product, else the reason."""
    if node.op in WITHOUT_LOWERING:
        return _why_without_lowering(editor, shapes, node)
    if node.op not in WEIGHTED:
        return ""
    if matches(node.name, patterns):
        return "excluded by the configuration"
    weights = editor.constant(node.input[1])
    if weights is None:
        return "its weights are not constant"
    if weights.dtype != np.float32:
        return f"its weights are {weights.dtype}, not float32"
    if not np.isfinite(weights).all():
        return "its weights hold NaN or infinity"
    if node.op in CONVOLUTIONS:
        if not is_nhwc(node):
            return "not in NHWC layout"
        if node.op == "DepthwiseConv2dNative":
            return None if weights.ndim == 3 or weights.shape[3] == 1 else "more than one filter for each input channel"
        if shapes[node.input[0]][-1] is None:
            return "the number of its input's channels is open: fix it, as in keras.Input((None, None, 3))"
        if _is_grouped(node, shapes) and _bits_lost(weights) > LOST_BITS:
            return "grouped convolution: its int8 kernel has one range for all channels, whose weights differ too much"
    elif attribute(node, "transpose_a").b or attribute(node, "transpose_b").b:
        return "transposed operand"
    return None


def _is_grouped(node: Any, shapes: Shapes) -> bool:
    """Whether a node is a Conv2D whose weights have fewer input channels than its image."""
    return bool(node.op == "Conv2D" and shapes[node.input[0]][-1] != shapes[node.input[1]][2])


def _bits_lost(weights: np.ndarray) -> float:
    """Returns how many bits of its weights a convolution loses to one range in place of one for each channel."""
    limits = np.abs(weights).max(axis=(0, 1, 2)).astype(np.float64)
    return float(np.log2(limits.max() / np.sqrt(np.mean(limits**2)))) if limits.any() else 0.0


def _why_without_lowering(editor: GraphEditor, shapes: Shapes, node: Any) -> str:
    if node.op not in ("BatchMatMulV2", "Einsum"):
        return "no int8 kernel computes this op"
    if all(editor.constant(tensor) is None for tensor in node.input):
        return "a product of two computed tensors, as in attention: the int8 kernel needs constant weights"
    if any(shapes[tensor].rank is None for tensor in node.input):
        return "the number of its input's axes is open: build the model with a shape, as in keras.Input((None, 24))"
    return "its weights are not one matrix for all rows: the int8 kernel takes no batch of matrices"


def int8_weights(editor: GraphEditor, tensor: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the annotated weights that an op reads, in int8, and the limit of each channel."""
    quantizer = editor.nodes[producer(tensor)]
    if quantizer.op == "Reshape":  # to the fourth axis of a depthwise convolution
        quantizer = editor.nodes[producer(quantizer.input[0])]
    assert quantizer.op == FAKE_QUANT_WEIGHTS, tensor  # annotate gives each fusion one
    weights, high = editor.value(quantizer.input[0]), editor.value(quantizer.input[2])
    return np.clip(np.rint(weights / (high / 127)), -127, 127).astype(np.int8), high


def _other_input(node: Any, tensor: str) -> str | None:
    others = [source for source in node.input if source != tensor]
    return str(others[0]) if len(others) == 1 else None


def consumers_of(editor: GraphEditor, name: str) -> set[str]:
    """Returns the nodes that read a node's values, directly or behind ops that move values."""
    readers: set[str] = set()
    stack = [name]
    while stack:
        for reader in editor.consumers.get(stack.pop(), ()):
            if reader not in readers and editor.nodes[reader].op in DATA_MOVEMENT_OPS:
                stack.append(reader)
            readers.add(reader)
    return readers


def _same_shape(one: tf.TensorShape, other: tf.TensorShape) -> bool:
    """Whether two shapes are known to be equal, so that nothing is broadcast. The batch size may be open."""
    return bool(one.rank == other.rank == 4 and one[1:].is_fully_defined() and one.as_list() == other.as_list())
