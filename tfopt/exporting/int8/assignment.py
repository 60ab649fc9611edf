"""Which fusions run in int8 so that the whole model takes the least time: a minimum cut of a flow network.

An int8 fusion between float nodes pays for quantizing its input and dequantizing its result. In the network, int8
fusions are on the source's side and float fusions on the sink's. To cut a fusion from the source costs its float time,
and to cut it from the sink costs its int8 time. To cut two fusions from each other costs the conversion between them.

Boykov and Kolmogorov, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms for Energy Minimization in Vision",
IEEE PAMI 26(9), 2004, describe how a choice between two labels for each node becomes such a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tfopt.exporting.int8.time_table import Feeds, TimeTable
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, Fusion, before_data_movement, consumers_of
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops, tensors_with_ranges

TIE = 1.03  # int8 also makes the model smaller, so it is taken where times differ by less than this
WHOLE = 10**6  # the float model's time in units of the network, whose capacities are integers
SOURCE, SINK, FIRST = 0, 1, 2
NEVER = 2**30  # the capacity of an edge that no minimum cut passes


class FlowNetwork:
    """A network between SOURCE and SINK. Nodes and edges are added one by one.

    Example:
        >>> network = FlowNetwork()
        >>> near, far = network.node(), network.node()
        >>> network.edge(SOURCE, near, 5)
        >>> network.edge(near, far, 1)
        >>> network.edge(far, SINK, 5)
        >>> network.source_side() == {SOURCE, near}
        True
    """

    def __init__(self) -> None:
        self._nodes = FIRST
        self._edges: list[tuple[int, int, int]] = []

    def node(self) -> int:
        """Adds a node and returns its number."""
        self._nodes += 1
        return self._nodes - 1

    def edge(self, source: int, target: int, capacity: float) -> None:
        """Adds an edge. Its capacity is the cost of a cut that has `source` on the source's side, but not `target`."""
        self._edges.append((source, target, min(round(capacity), NEVER)))

    def source_side(self) -> set[int]:
        """Returns the nodes on the source's side of a minimum cut."""
        sources, targets, capacities = zip(*self._edges, strict=True)
        edges = (np.array(capacities, np.int32), (sources, targets))
        network = coo_array(edges, shape=(self._nodes, self._nodes)).tocsr()  # parallel edges add up
        residual = network - maximum_flow(network, SOURCE, SINK).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        return {int(node) for node in breadth_first_order(residual, SOURCE, return_predecessors=False)}


def fastest_assignment(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], table: TimeTable, feeds: Feeds
) -> list[bool]:
    """Returns for each fusion of the float graph whether it runs in int8 in the fastest assignment."""
    times, graph = table.fusions, quantized.float_graph
    totals = np.sum([times[fusion.op].float_ms for fusion in fusions], axis=0)
    scales = WHOLE / np.maximum(totals, 1e-3)
    conversion = _conversions(graph, tensors_with_ranges(editor, fusions), table, feeds, scales)
    network = FlowNetwork()
    entering = {
        fusion.op: [before_data_movement(editor, source) for source in (fusion.input, fusion.summand) if source]
        for fusion in fusions
    }
    # A joint is on the side that saves conversions. Its own time is small beside these.
    joints = find_shared_range_ops(editor, fusions, quantized.ranges)
    number = {name: network.node() for name in (*entering, *joints)}
    for fusion in fusions:
        measured = times[fusion.op]
        network.edge(SOURCE, number[fusion.op], float(np.dot(measured.float_ms, scales)))
        network.edge(number[fusion.op], SINK, float(np.dot(measured.int8_ms, scales)) / TIE)
    producers = {fusion.output: number[fusion.op] for fusion in fusions} | {name: number[name] for name in joints}
    inside = {node for fusion in fusions for node in fusion.nodes}.union(joints)
    for tensor in tensors_with_ranges(editor, fusions):
        readers = [number[name] for name, tensors in (entering | joints).items() if tensor in tensors]
        producer = producers.get(tensor)
        if readers:
            shared = network.node()
            for reader in readers:
                network.edge(reader, shared, NEVER)
            network.edge(shared, SINK if producer is None else producer, conversion("QuantizeV2", tensor))
        if producer is None:
            continue
        price = conversion("Dequantize", tensor)
        if _read_by_others(editor, graph, tensor, inside):
            network.edge(producer, SINK, price)
        elif readers:
            shared = network.node()
            network.edge(producer, shared, price)
            for reader in readers:
                network.edge(shared, reader, NEVER)
    on_source_side = network.source_side()
    return [number[fusion.op] in on_source_side for fusion in fusions]


def _read_by_others(editor: GraphEditor, graph: FrozenGraph, tensor: str, inside: set[str]) -> bool:
    """Whether a node outside of all fusions reads a tensor, directly or behind ops that only move values."""
    readers = consumers_of(editor, tensor)
    moving = {name for name in readers if editor.nodes[name].op in DATA_MOVEMENT_OPS}
    return not graph.output_nodes.isdisjoint({tensor, *moving}) or not readers - moving <= inside


def _conversions(
    graph: FrozenGraph, tensors: Sequence[str], table: TimeTable, feeds: Feeds, scales: np.ndarray
) -> Callable[[str, str], float]:
    """Returns a function of (op, tensor) that gives the cost of converting the tensor, in units of the network."""
    function = graph.as_function(fetch=tensors)
    values = [function(**inputs) for inputs in feeds.values()]
    elements = {tensor: [int(tf.size(batch[index])) for batch in values] for index, tensor in enumerate(tensors)}
    largest = table.sizes[-1]

    def cost(op: str, tensor: str) -> float:
        known = table.conversions[op]
        per_batch = [np.interp(count, table.sizes, known) * max(1.0, count / largest) for count in elements[tensor]]
        return float(np.dot(per_batch, scales))

    return cost
