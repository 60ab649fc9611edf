"""Finds tensors whose channels can be rescaled without changing what the graph computes.

Channel c of a tensor is divided by s[c] > 0, and the weights of every product that reads it are multiplied by s[c]. The
results stay the same. The division costs nothing if the nodes before the tensor can absorb it:

- A convolution or product absorbs it in its weights, a constant in its value. A sum needs it in all its operands.
- Relu, LeakyRelu, pooling, zero padding, reshapes and similar ops commute with it: f(x / s) = f(x) / s.
- A product of two tensors needs it in one of them. In a normalisation, that is the scale; the sum that follows needs it
  in the offset too.

All other ops that read a rescaled tensor must commute with the division, up to the products that undo it. So several
tensors must be divided together, such as all tensors that are added to a residual stream. They form a group with one s.
A tensor has no group if an op prevents it: an output of the graph, the mean over all channels in a normalisation, or an
activation that is not positively homogeneous. Relu6 is not homogeneous, unless no value reaches 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfopt.graph.edit import GraphEditor, NodeDef, attribute, is_nhwc, producer
from tfopt.graph.fold import WEIGHTED
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.annotation.fusion import ADDITIONS, Fusion, before_data_movement

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
    """Tensors that can be divided by one vector along their last axis, and the constants that change.

    If the last axis of a tensor is m times as long, as after Flatten, the vector is repeated m times.

    Attributes:
        seed: The tensor from which the search started.
        tensors: Names of the nodes whose results are divided.
        divided: Constants to divide, each as (node that reads it, position among its inputs).
        multiplied: Convolutions and products that read a divided tensor. Their weights undo the division.
    """

    seed: str
    channels: int
    tensors: set[str] = field(default_factory=set)
    divided: set[tuple[str, int]] = field(default_factory=set)
    multiplied: set[str] = field(default_factory=set)

    def is_absorbed_by_weights(self, editor: GraphEditor) -> bool:
        """Whether the weights of a convolution or product absorb the division, not only those of a normalisation."""
        return any(editor.nodes[name].op in WEIGHTED for name, _ in self.divided)

    def relu6(self, editor: GraphEditor) -> list[str]:
        return sorted(name for name in self.tensors if editor.nodes[name].op == RELU6)


def find_groups(graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion]) -> list[ChannelGroup]:
    """Returns the groups of the tensors that enter fusions. A Relu6 counts as a Relu."""
    finder = _Finder(graph, editor)
    groups: list[ChannelGroup] = []
    for fusion in fusions:
        seed = before_data_movement(editor, fusion.input)
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
            # A constant of one number becomes one with a number for each channel.
            factor = 1 / scales if value.shape[-1] == 1 else _along(value, -1, 1 / scales)
        _replace(editor, name, position, value * factor)
    for name in sorted(group.multiplied):
        value = editor.value(editor.nodes[name].input[1])
        _replace(editor, name, 1, value * _along(value, INPUT_AXIS[editor.nodes[name].op], scales))


def _along(value: np.ndarray, axis: int, scales: np.ndarray) -> np.ndarray:
    """Returns the scales, repeated to the length of one axis, in a shape that is broadcast along this axis."""
    shape = [1] * value.ndim
    shape[axis] = value.shape[axis]
    return np.tile(scales, value.shape[axis] // len(scales)).reshape(shape)


def _replace(editor: GraphEditor, name: str, position: int, value: np.ndarray) -> None:
    """Replaces a constant input of a node. Other nodes keep the old constant."""
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
            connected = self._connected(group, name)
            if connected is None:
                return None
            waiting += connected
        products = [name for name in group.tensors if self.editor.nodes[name].op == "Mul"]
        once = all(self._divided_operands(group, name) == 1 for name in products)
        return group if once and group.multiplied else None

    def _divided_operands(self, group: ChannelGroup, name: str) -> int:
        operands = enumerate(self.editor.nodes[name].input)
        return sum(tensor in group.tensors or (name, position) in group.divided for position, tensor in operands)

    def _connected(self, group: ChannelGroup, name: str) -> list[str] | None:
        """Returns the tensors that must be divided together with a tensor, or None if it cannot be divided."""
        node, size = self.editor.nodes[name], self._size(name)
        if size is None or size % group.channels or name in self.outputs:
            return None
        connected = self._sources(group, node)
        if connected is None:
            return None
        for reader in (self.editor.nodes[reader] for reader in self.editor.consumers.get(name, ())):
            if reader.op in WEIGHTED and list(reader.input).index(name) == 0 and self._has_own_weights(reader):
                group.multiplied.add(reader.name)
            elif reader.op in (*SUMS, "Mul", *HOMOGENEOUS):
                connected.append(reader.name)
            elif reader.op != "Shape":
                return None
        return connected

    def _sources(self, group: ChannelGroup, node: NodeDef) -> list[str] | None:
        """Returns the inputs that must be divided to divide a node's result, and adds its constants to the group."""
        if node.op in WEIGHTED:
            if not self._has_own_weights(node):
                return None
            group.divided.add((node.name, 1))
            return []
        if node.op in HOMOGENEOUS:
            return [node.input[0]] if self._keeps_channels(node) else None
        if node.op in SUMS:
            positions = [0, 1] if is_nhwc(node) else []
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
            # In a sum, a constant of one number can become one with a number for each channel. In a product it cannot:
            # it may belong to an activation.
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
        """Returns for each node the distance to the constants that could absorb a division of its result."""
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
                distances[name] = 10  # the scale of a normalisation is preferred to its input
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
        """Whether a node's weights are a constant with the expected axes that no other node reads."""
        weights = self.editor.constant(node.input[1])
        if weights is None or len(self.editor.consumers[producer(node.input[1])]) > 1:
            return False
        if not is_nhwc(node):
            return False
        if attribute(node, "transpose_a").b or attribute(node, "transpose_b").b or not np.isfinite(weights).all():
            return False
        if node.op == "DepthwiseConv2dNative" and weights.shape[3] != 1:
            return False
        return self._size(node.input[0]) == weights.shape[INPUT_AXIS[node.op]]  # else the convolution is grouped

    def _keeps_channels(self, node: NodeDef) -> bool:
        if not is_nhwc(node):
            return False
        if node.op in REDUCTIONS:
            axes, rank = self.editor.constant(node.input[1]), self.shapes[node.input[0]].rank
            return axes is not None and rank is not None and not {-1, rank - 1}.intersection(axes.reshape(-1).tolist())
        return node.op == "Reshape" or self._size(node.input[0]) == self._size(node.name)

    def _size(self, tensor: str) -> int | None:
        """Returns the length of a tensor's last axis; None if it is open, or if the tensor is not a node's output 0."""
        shape: tf.TensorShape | None = self.shapes.get(tensor)
        return None if ":" in tensor or shape is None or not shape.rank else shape[-1]
