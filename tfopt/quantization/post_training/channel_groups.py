"""Finds tensors whose channels can be rescaled without changing what the graph computes.

Divide channel c of a tensor by s[c] > 0, and multiply by s[c] the weights of every product that reads it: nothing
changes. The division itself is free where what computes the tensor can take it in:

- a convolution or product takes it into its weights, a sum into all that it adds, a constant into its value;
- Relu, LeakyRelu, pooling, zero padding, reshapes and the like let it through, since f(x / s) = f(x) / s;
- a product of two tensors takes it into one of them: the scale (and, by the sum, the offset) of a normalisation.

Whatever else reads a rescaled tensor must let the division through too, up to the products that undo it. So a tensor
brings others with it, such as all that is added to a residual stream; together they form a group with one s. There is
no group where something stands in the way: the result of the graph, the mean over all channels in a normalisation, an
activation that is not positively homogeneous. A Relu6 is one of them, unless no value ever reaches its 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, NodeDef, attribute, producer
from tfopt.graph.fold import WEIGHTED
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import ADDITIONS, Fusion, pass_through_origin

SUMS = (*ADDITIONS, "BiasAdd", "Sub")
RELU6 = "Relu6"
HOMOGENEOUS = (
    *("Relu", "LeakyRelu", RELU6, "Neg", "Identity", "StopGradient", "Reshape", "Squeeze", "ExpandDims", "Pad"),
    *("MaxPool", "AvgPool", "Mean", "Sum", "Max", "Min", "ResizeBilinear", "ResizeNearestNeighbor"),
)
REDUCTIONS = ("Mean", "Sum", "Max", "Min")
INPUT_AXIS = {"Conv2D": 2, "DepthwiseConv2dNative": 2, "MatMul": 0}
OUTPUT_AXIS = {"Conv2D": 3, "DepthwiseConv2dNative": 2, "MatMul": 1}


@dataclass(frozen=True, kw_only=True)
class ChannelGroup:
    """Tensors that can be divided by one vector along their last axis, and what takes it in.

    Where a last axis is m times as long, as behind the flattening of an image, the vector repeats m times.

    Attributes:
        seed: The tensor that the group was found from.
        channels: Length of the vector.
        tensors: Names of the nodes whose results are divided.
        divided: Constants to divide, each as (node that reads it, position among its inputs).
        multiplied: Convolutions and products that read a divided tensor, whose weights undo the division.
    """

    seed: str
    channels: int
    tensors: set[str] = field(default_factory=set)
    divided: set[tuple[str, int]] = field(default_factory=set)
    multiplied: set[str] = field(default_factory=set)

    def is_absorbed_by_weights(self, editor: GraphEditor) -> bool:
        """Whether the division goes into the weights of a convolution or product, not of a normalisation alone."""
        return any(editor.nodes[name].op in WEIGHTED for name, _ in self.divided)

    def relu6(self, editor: GraphEditor) -> list[str]:
        return sorted(name for name in self.tensors if editor.nodes[name].op == RELU6)


def find_groups(graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion]) -> list[ChannelGroup]:
    """Returns the groups among the tensors that enter fusions. A Relu6 is taken for a Relu."""
    finder = _Finder(graph, editor)
    groups: list[ChannelGroup] = []
    for fusion in fusions:
        seed = pass_through_origin(editor, fusion.input)
        if not any(seed in group.tensors for group in groups):
            group = finder.grow(seed)
            if group is not None:
                groups.append(group)
    return groups


def rescale(editor: GraphEditor, group: ChannelGroup, scales: np.ndarray) -> None:
    """Divides the tensors of a group by `scales` and multiplies the weights that read them."""
    for name in group.relu6(editor):
        editor.nodes[name].op = "Relu"
    for name, position in sorted(group.divided):
        node = editor.nodes[name]
        value = editor.value(node.input[position])
        if node.op in WEIGHTED and position == 1:
            factor = _along(value, OUTPUT_AXIS[node.op], 1 / scales)
        else:
            value = np.atleast_1d(value)
            # One number for all channels becomes one for each.
            factor = 1 / scales if value.shape[-1] == 1 else _along(value, -1, 1 / scales)
        _replace(editor, name, position, value * factor)
    for name in sorted(group.multiplied):
        value = editor.value(editor.nodes[name].input[1])
        _replace(editor, name, 1, value * _along(value, INPUT_AXIS[editor.nodes[name].op], scales))


def _along(value: np.ndarray, axis: int, scales: np.ndarray) -> np.ndarray:
    """Returns the scales, repeated as often as fits, so shaped that they are broadcast along one axis."""
    shape = [1] * value.ndim
    shape[axis] = value.shape[axis]
    return np.tile(scales, value.shape[axis] // len(scales)).reshape(shape)


def _replace(editor: GraphEditor, name: str, position: int, value: np.ndarray) -> None:
    """Gives a node a constant of its own in place of one that others may read too."""
    inputs = list(editor.nodes[name].input)
    dtype = editor.value(inputs[position]).dtype
    inputs[position] = editor.add_constant(f"{name}/rescaled", value.astype(dtype))
    editor.set_inputs(name, inputs)


class _Finder:
    def __init__(self, graph: FrozenGraph, editor: GraphEditor) -> None:
        self.editor = editor
        self.shapes = graph.shapes()
        self.outputs = graph.output_nodes
        self.distances = self._distances()

    def grow(self, seed: str) -> ChannelGroup | None:
        """Returns the group of a tensor, None if it has none."""
        size = self._size(seed)
        if size is None or size < 2:
            return None
        group = ChannelGroup(seed=seed, channels=size)
        waiting = [seed]
        while waiting:
            name = waiting.pop()
            if name in group.tensors:
                continue
            group.tensors.add(name)
            brought = self._brought(group, name)
            if brought is None:
                return None
            waiting += brought
        products = [name for name in group.tensors if self.editor.nodes[name].op == "Mul"]
        once = all(self._divided_operands(group, name) == 1 for name in products)
        return group if once and group.multiplied else None

    def _divided_operands(self, group: ChannelGroup, name: str) -> int:
        operands = enumerate(self.editor.nodes[name].input)
        return sum(tensor in group.tensors or (name, position) in group.divided for position, tensor in operands)

    def _brought(self, group: ChannelGroup, name: str) -> list[str] | None:
        """Returns the tensors that a tensor brings into its group, None if it cannot be divided."""
        node, size = self.editor.nodes[name], self._size(name)
        if size is None or size % group.channels or name in self.outputs:
            return None
        brought = self._sources(group, node)
        if brought is None:
            return None
        for reader in (self.editor.nodes[reader] for reader in self.editor.consumers.get(name, ())):
            if reader.op in WEIGHTED and list(reader.input).index(name) == 0 and self._has_own_weights(reader):
                group.multiplied.add(reader.name)
            elif reader.op in (*SUMS, "Mul", *HOMOGENEOUS):
                brought.append(reader.name)
            elif reader.op != "Shape":
                return None
        return brought

    def _sources(self, group: ChannelGroup, node: NodeDef) -> list[str] | None:
        """Returns the tensors that must be divided so that a node's result is; notes the constants that must be."""
        if node.op in WEIGHTED:
            if not self._has_own_weights(node):
                return None
            group.divided.add((node.name, 1))
            return []
        if node.op in HOMOGENEOUS:
            return [node.input[0]] if self._keeps_channels(node) else None
        if node.op in SUMS:
            positions = [0, 1] if attribute(node, "data_format").s in (b"", b"NHWC") else []
        elif node.op == "Mul":
            divided = [position for position in (0, 1) if node.input[position] in group.tensors]
            nearest = min((0, 1), key=lambda position: self.distances[producer(node.input[position])])
            positions = divided or [nearest]
        else:
            return None
        sources = []
        for position in positions:
            tensor, size = node.input[position], self._size(node.name)
            constant = self.editor.constant(tensor)
            # One number for all channels can become one for each in a sum. In a product it may belong to an activation.
            may_grow = node.op in SUMS and size == group.channels
            lengths = [(), (1,), (size,)] if may_grow else [(size,)]
            if constant is not None and constant.shape[-1:] in lengths:
                group.divided.add((node.name, position))
            elif constant is None and self._size(tensor) == size:
                sources.append(tensor)
            else:
                return None
        return sources if positions else None

    def _distances(self) -> dict[str, float]:
        """Returns of each node how much lies between it and the constants that could take in a division of it."""
        distances: dict[str, float] = {}
        for name in self.editor.topological():
            node = self.editor.nodes[name]
            before = [distances[producer(tensor)] for tensor in node.input]
            computed = [
                distances[source] for source in map(producer, node.input) if self.editor.nodes[source].op != "Const"
            ]
            if node.op == "Const":
                distances[name] = 0 if self.shapes[name].rank and self.shapes[name][-1] > 1 else math.inf
            elif node.op in WEIGHTED and self._has_own_weights(node):
                distances[name] = 10  # the scale of a normalisation is rather taken than its input
            elif node.op in HOMOGENEOUS:
                distances[name] = 1 + before[0]
            elif node.op in SUMS:
                distances[name] = 1 + sum(computed)
            elif node.op == "Mul":
                distances[name] = 1 + min(before)
            else:
                distances[name] = math.inf
        return distances

    def _has_own_weights(self, node: NodeDef) -> bool:
        """Whether a node's weights are a constant that nothing else reads, with the axes that are expected."""
        weights = self.editor.constant(node.input[1])
        if weights is None or len(self.editor.consumers[producer(node.input[1])]) > 1:
            return False
        if attribute(node, "data_format").s not in (b"", b"NHWC"):
            return False
        if attribute(node, "transpose_a").b or attribute(node, "transpose_b").b or not np.isfinite(weights).all():
            return False
        if node.op == "DepthwiseConv2dNative" and weights.shape[3] != 1:
            return False
        return self._size(node.input[0]) == weights.shape[INPUT_AXIS[node.op]]  # else the convolution is grouped

    def _keeps_channels(self, node: NodeDef) -> bool:
        if attribute(node, "data_format").s not in (b"", b"NHWC"):
            return False
        if node.op in REDUCTIONS:
            axes, rank = self.editor.constant(node.input[1]), self.shapes[node.input[0]].rank
            return axes is not None and rank is not None and not {-1, rank - 1}.intersection(axes.reshape(-1).tolist())
        return node.op == "Reshape" or self._size(node.input[0]) == self._size(node.name)

    def _size(self, tensor: str) -> int | None:
        """Returns the length of a tensor's last axis, None if it is open, or if the tensor is no plain result."""
        shape: tf.TensorShape | None = self.shapes.get(tensor)
        return None if ":" in tensor or shape is None or not shape.rank else shape[-1]
