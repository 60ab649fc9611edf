"""Decides by measured times which nodes of a quantized model run in int8 and which stay float.

An int8 kernel is not always faster: a small convolution may be slower, and conversions between int8 and float take time
too. Counts of operations do not tell, so the nodes are timed. There are three steps, each in one call:

1. time_table.py times the nodes of two graphs, one all float and one with as much int8 as possible, and adds them up to
   a table of two times for each fusion. The table can be stored, and then decides for another machine. It also says
   which layer normalisations oneDNN's kernel makes faster.
2. A minimum cut of a flow network gives the fastest assignment of the fusions to int8 and float, see below.
3. This module times whole graphs in turns, because the times of nodes can mislead. A model that int8 would make slower
   stays float. The turns end as soon as it is clear which graphs make the model slower. The table has these times too.

An int8 fusion between float nodes pays for quantizing its input and dequantizing its result. In the network, int8
fusions are on the source's side and float fusions on the sink's. To cut a fusion from the source costs its float time,
and to cut it from the sink costs its int8 time. To cut two fusions from each other costs the conversion between them.
Boykov and Kolmogorov, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms for Energy Minimization in Vision",
IEEE PAMI 26(9), 2004, describe how a choice between two labels for each node becomes such a cut.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tfopt import timing
from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.files import write_text
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.layer_norm import find_layer_norms
from tfopt.exporting.int8.time_table import Feeds, TimedGraph, TimeTable, measure_table, read_table
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, Fusion, before_data_movement, consumers_of
from tfopt.quantization.annotation.ranged_tensors import find_shared_range_ops, tensors_with_ranges
from tfopt.report import Change

TIE = 1.03  # int8 also makes the model smaller, so it is taken where times differ by less than this
WHOLE = 10**6  # the float model's time in units of the network, whose capacities are integers
SOURCE, SINK, FIRST = 0, 1, 2
NEVER = 2**30  # the capacity of an edge that no minimum cut passes
# A model must not get slower. So whole graphs get more turns, and less difference counts as a tie than for nodes.
WHOLE_TIE = 1.01
FEWEST_TURNS = 7
MOST_TURNS = 41
# A turn gives the median of a few calls, as a receipt does. The fastest call would favour int8: its times vary more.
TURN_CALLS = 10
TURN_SECONDS = 0.04
CLOCK = "clock"  # the kind of the report's step with the result for the whole model
UNKNOWN = "node_times is of an earlier version, which did not time it"
AS_A_WHOLE = "the model as a whole is faster in float32"


def select_int8(
    quantized: QuantizedModel, feeds: Feeds, stored: Path | None = None
) -> tuple[QuantizedModel, FrozenGraph | None]:
    """Returns the model with the nodes in int8 that it makes faster, and its int8 graph, if there are any.

    In the given model, everything is quantized that can be. Each batch size of the feeds has the same weight. A stored
    TimeTable decides, and nothing is timed; if the file does not exist, the measured table is written to it.
    """
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions = [fusion.within(editor) for fusion in quantized.graph.fusions]
    if stored is not None and stored.exists():
        table = read_table(stored, fusions, list(feeds))
        if unknown := {fusion.op: UNKNOWN for fusion in fusions if fusion.op not in table.fusions}:
            quantized = quantized.leaving_float(unknown)
            fusions = [fusion.within(editor) for fusion in quantized.graph.fusions]
        model, lowered = _fittest(quantized, _choose(quantized, editor, fusions, table, feeds), table)
    else:
        model, lowered, table = _measure_and_choose(quantized, editor, fusions, feeds)
        if stored is not None:
            write_text(stored, json.dumps(with_checksum(table.to_dict()), indent=2) + "\n")
    changed = [replace(each, detail=f"{each.detail}; {table.fusions[each.name]}") for each in model.report.changed]
    return replace(model, report=replace(model.report, changed=changed)), lowered


def _measure_and_choose(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], feeds: Feeds
) -> tuple[QuantizedModel, FrozenGraph | None, TimeTable]:
    everything = lower_to_int8(quantized.graph)
    norms = find_layer_norms(quantized.float_graph, editor)
    # The float graph takes as long as the graph of a float32 export. It differs in the values of weights, and in added
    # biases, which TensorFlow fuses into the ops before them.
    with ExitStack() as stack:
        single = stack.enter_context(TimedGraph(quantized.float_graph))
        int8 = stack.enter_context(TimedGraph(everything))
        table = measure_table(single, int8, feeds, editor, fusions, norms)
        chosen = _choose(quantized, editor, fusions, table, feeds)
        lowered = {
            name: lower_to_int8(model.graph, table.slower_norms)
            if table.slower_norms or model is not quantized
            else everything
            for name, model in _candidates(quantized, chosen).items()
        }
        timed = [stack.enter_context(TimedGraph(graph)) for graph in lowered.values()]
        ratios = time_ratios(single, timed, feeds)
    table = replace(table, whole=dict(zip(lowered, ratios, strict=True)))
    return *_fittest(quantized, chosen, table, lowered), table


def _candidates(quantized: QuantizedModel, chosen: QuantizedModel) -> dict[str, QuantizedModel]:
    """Returns the models that are timed as whole graphs, those with more nodes in int8 later."""
    several = chosen is not quantized and chosen.report.changed
    return {"chosen": chosen, "all": quantized} if several else {"all": quantized}


def _fittest(
    quantized: QuantizedModel,
    chosen: QuantizedModel,
    table: TimeTable,
    lowered: Mapping[str, FrozenGraph] | None = None,
) -> tuple[QuantizedModel, FrozenGraph | None]:
    """Returns what the times of whole graphs decide for. `lowered` holds int8 graphs that exist already."""
    models = {name: model for name, model in _candidates(quantized, chosen).items() if name in table.whole}
    if not models:  # the table is of an earlier version
        return chosen, lower_to_int8(chosen.graph, table.slower_norms) if chosen.report.changed else None
    ratios = [table.whole[name] for name in models]
    best_fit = fastest_fit(ratios)
    if best_fit is None:
        least = dict(zip(table.batch_sizes, min(ratios, key=sum), strict=True))
        return stay_float(quantized, chosen, least), None
    name = list(models)[best_fit]
    return models[name], (lowered or {}).get(name) or lower_to_int8(models[name].graph, table.slower_norms)


def _choose(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], table: TimeTable, feeds: Feeds
) -> QuantizedModel:
    """Returns the model with the nodes in int8 that the table decides for. The report has the reason for the others."""
    in_int8 = fastest_assignment(quantized, editor, fusions, table, feeds)
    slower = {}
    for fusion, chosen in zip(fusions, in_int8, strict=True):
        times = table.fusions[fusion.op]
        if not chosen:
            conversions = "converting its tensors would cost more than int8 saves"
            slower[fusion.op] = f"{'slower in int8' if table.is_slower(times) else conversions}: {times}"
    return quantized.leaving_float(slower) if slower else quantized


def stay_float(quantized: QuantizedModel, chosen: QuantizedModel, ratios: Mapping[int, float]) -> QuantizedModel:
    """Returns the model with nothing in int8. Its report gives the reason once, as a step.

    The ratios are the time of int8 divided by the time of float32, for each batch size.
    """
    found = " and ".join(f"{ratio:.2f}x at batch size {size}" for size, ratio in ratios.items())
    verdict = f"int8 would make the model slower where it was measured: it takes {found} of float32's time"
    if chosen.report.changed:
        whole = dict.fromkeys((change.name for change in quantized.report.changed), AS_A_WHOLE)
        chosen = quantized.leaving_float(whole)
    step = Change(name=quantized.graph.name, kind=CLOCK, detail=verdict)
    return replace(chosen, report=replace(chosen.report, steps=[*chosen.report.steps, step]))


def fastest_fit(ratios: Sequence[Sequence[float]]) -> int | None:
    """Returns the index of the best graph, or None if each graph makes the model slower at some batch size.

    The ratios are the time of each graph divided by that of the float graph, for each batch size. Graphs with more
    nodes in int8 come later. Of those about as fast, the last is the best, because it is the smallest.

    Example:
        >>> fastest_fit([[1.0, 0.7], [1.02, 0.5]]), fastest_fit([[0.7, 0.7], [0.71, 0.7]]), fastest_fit([[1.02, 0.5]])
        (0, 1, None)
    """
    fit = [index for index, each in enumerate(ratios) if max(each) <= WHOLE_TIE]
    if not fit:
        return None
    least = min(sum(ratios[index]) for index in fit)
    return max(index for index in fit if sum(ratios[index]) <= least * TIE)


def time_ratios(single: TimedGraph, graphs: Sequence[TimedGraph], feeds: Feeds) -> list[list[float]]:
    """Returns the time of each graph divided by the time of the float graph, for each batch size.

    They are called in turns until it is clear which of them make the model slower, or until there are enough turns.

    Args:
        single: The graph in float32.
        graphs: The graphs in int8, those with more nodes in int8 later.
        feeds: Inputs by name for each batch size.
    """
    ratios: list[list[float]] = [[] for _ in graphs]
    for inputs in feeds.values():
        rounds = max(FEWEST_TURNS, *(each.rounds(inputs, MOST_TURNS) for each in (single, *graphs)))
        calls = [partial(each.milliseconds, inputs) for each in (single, *graphs)]
        first, *others = timing.in_turns([partial(_turn_seconds, call) for call in calls], rounds, _is_clear)
        for found, other in zip(ratios, others, strict=True):
            found.append(float(np.median(np.divide(other, first))))
    return ratios


def _is_clear(turns: Sequence[Sequence[float]]) -> bool:
    """Whether all turns agree, for each graph, whether it makes the model slower."""
    times = np.array(turns)
    slower = times[:, 1:] / times[:, :1] > WHOLE_TIE
    return len(turns) >= FEWEST_TURNS and bool((slower.all(axis=0) | ~slower.any(axis=0)).all())


def _turn_seconds(call: Callable[[], Any]) -> float:
    return statistics.median(timing.call_seconds(call, TURN_SECONDS, TURN_CALLS))


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
