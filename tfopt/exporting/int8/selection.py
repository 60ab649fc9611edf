"""Decides by the clock which nodes of a quantized model run in int8 and which stay float.

An int8 kernel is not always the faster one: a small convolution may lose, and an int8 node between float ones pays for
quantizing its input and dequantizing its result. Counts of operations do not tell; the clock does. Both graphs, all
float and as much int8 as possible, are traced node by node (see node_times.py), conversions by the number of
elements. With two times for each fusion, and a price for each place where int8 meets float, the fastest assignment is a
minimum cut: int8 fusions are on the source's side of it and float ones on the sink's. Cutting a fusion from the source
costs its float time, from the sink its int8 time, and two fusions from each other the conversion between them.

A trace can still deceive. So the graphs that come out are timed as a whole, in turns, and where int8 would make the
model slower it stays float. The turns end as soon as they agree, and a turn is short where a call is. What was measured
can be stored, and then decides for another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.atomic.files import write_text
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.minimum_cut import NEVER, SINK, SOURCE, FlowNetwork
from tfopt.exporting.int8.node_times import TimedGraph
from tfopt.exporting.int8.time_table import Feeds, FusionTimes, TimeTable, measure, read_table
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.fusion import PASS_THROUGH, Fusion, find_fusions, pass_through_origin
from tfopt.quantization.annotation.ranged_tensors import find_joints, tensors_with_ranges
from tfopt.report import Change

# int8 also makes the model smaller, so that a tie is decided for it; and what differs by less is noise.
TIE = 1.03
# But a model must not get slower, so the clock of whole graphs is given more turns, and less is left open.
WHOLE_TIE = 1.01
FEWEST_TURNS = 7
MOST_TURNS = 21
# A turn is the least of a few calls, where they are so short that anything else disturbs them.
TURN_CALLS = 10
TURN_SECONDS = 0.04
CLOCK = "clock"  # the kind of the report's step that tells what the clock said of the whole model
AS_A_WHOLE = "the model as a whole is faster in float32"
WHOLE = 10**6  # a network's capacities are integers; the float model's time is this many


def select_int8(
    quantized: QuantizedModel,
    feeds: Feeds,
    stored: Path | None = None,
    in_float: Callable[[], FrozenGraph] | None = None,
) -> QuantizedModel:
    """Returns the model with those nodes quantized that make it faster, and the figures in its report.

    Args:
        quantized: The model, everything quantized that can be, at least one node.
        feeds: Inputs by name for each batch size. Each size counts alike.
        stored: A JSON file with a TimeTable. If it exists, nothing is timed here; else what is timed is written to it.
        in_float: Returns what `quantized.in_float` does, for a caller who needs it too.
    Raises:
        ConfigError: The file is none, or one of another model or of other batch sizes.
    """
    editor = GraphEditor(quantized.float_graph.graph_def)
    left = {skip.name: skip.reason for skip in quantized.report.skipped}
    fusions, _ = find_fusions(quantized.float_graph, editor, kept_float=left)
    known = stored is not None and stored.exists()
    if stored and known:
        table = read_table(stored, fusions, feeds)
    else:
        everything = lower_to_int8(quantized.graph)
        table = measure(quantized.float_graph, everything, editor, fusions, feeds)
    if stored and not known:
        write_text(stored, table.to_json() + "\n")
    in_int8 = _fastest(quantized, editor, fusions, table, feeds)
    slower = {
        fusion.op: f"{_why(table.fusions[fusion.op])}: {table.fusions[fusion.op]}"
        for fusion, chosen in zip(fusions, in_int8, strict=True)
        if not chosen
    }
    chosen = quantized.leaving_float(slower) if slower else quantized
    if not known:
        single = in_float() if in_float else quantized.in_float()
        chosen = _by_the_whole(quantized, chosen, [single, everything], feeds)
    changed = [replace(each, detail=f"{each.detail}; {table.fusions[each.name]}") for each in chosen.report.changed]
    return replace(chosen, report=replace(chosen.report, changed=changed))


def _by_the_whole(
    quantized: QuantizedModel, chosen: QuantizedModel, graphs: Sequence[FrozenGraph], feeds: Feeds
) -> QuantizedModel:
    """Returns what is fastest as a whole: the chosen nodes, all of them or none in int8.

    Args:
        quantized, chosen: The model with all nodes in int8, and with those chosen.
        graphs: The graph in float32 and that of `quantized` in int8.
        feeds: Inputs by name for each batch size.
    """
    single, everything = graphs
    several = chosen is not quantized and bool(chosen.report.changed)
    candidates = [chosen, quantized] if several else [quantized]
    lowered = [lower_to_int8(chosen.graph), everything] if several else [everything]
    ratios = in_turns(single, lowered, feeds)
    best_fit = fastest_fit(ratios)
    if best_fit is not None:
        return candidates[best_fit]
    return stay_float(quantized, chosen, dict(zip(feeds, min(ratios, key=sum), strict=True)))


def stay_float(quantized: QuantizedModel, chosen: QuantizedModel, ratios: Mapping[int, float]) -> QuantizedModel:
    """Returns the model with nothing in int8. Its report gives the reason once, as a step.

    Args:
        quantized, chosen: The model with all nodes in int8, and with those chosen.
        ratios: How long int8 takes in units of float32, for each batch size.
    """
    found = " and ".join(f"{ratio:.2f}x at batch size {size}" for size, ratio in ratios.items())
    verdict = f"int8 would make the model slower on this machine: it takes {found} of float32's time"
    if chosen.report.changed:
        whole = dict.fromkeys((change.name for change in quantized.report.changed), AS_A_WHOLE)
        chosen = quantized.leaving_float(whole)
    step = Change(name=quantized.graph.name, kind=CLOCK, detail=verdict)
    return replace(chosen, report=replace(chosen.report, steps=[*chosen.report.steps, step]))


def fastest_fit(ratios: Sequence[Sequence[float]]) -> int | None:
    """Returns which of several graphs to take; None where each makes the model slower at some batch size.

    Args:
        ratios: How long each graph takes in units of the float graph, for each batch size. Those with more nodes in
            int8 come later: of those about as fast the last is taken, which is the smallest.
    Example:
        >>> fastest_fit([[1.0, 0.7], [1.02, 0.5]]), fastest_fit([[0.7, 0.7], [0.71, 0.7]]), fastest_fit([[1.02, 0.5]])
        (0, 1, None)
    """
    fit = [index for index, each in enumerate(ratios) if max(each) <= WHOLE_TIE]
    if not fit:
        return None
    least = min(sum(ratios[index]) for index in fit)
    return max(index for index in fit if sum(ratios[index]) <= least * TIE)


def _why(times: FusionTimes) -> str:
    if sum(times.int8_ms) > sum(times.float_ms):
        return "slower in int8"
    return "converting its tensors would cost more than int8 saves"


def in_turns(single: FrozenGraph, graphs: Sequence[FrozenGraph], feeds: Feeds) -> list[list[float]]:
    """Returns how long each of some graphs takes, in units of another, for each batch size.

    They are called in turns, as often as it needs to tell which of them make the model slower.

    Args:
        single: The graph in float32.
        graphs: Those in int8.
        feeds: Inputs by name for each batch size.
    """
    ratios: list[list[float]] = [[] for _ in graphs]
    with ExitStack() as stack:
        timed = [stack.enter_context(TimedGraph(graph, in_order=False)) for graph in (single, *graphs)]
        for inputs in feeds.values():
            rounds = max(FEWEST_TURNS, *(each.rounds(inputs, MOST_TURNS) for each in timed))
            turns: list[list[float]] = []
            while len(turns) < rounds and not (len(turns) >= FEWEST_TURNS and _is_clear(turns)):
                first, *others = [_call(each, inputs) for each in timed]
                turns.append([other / first for other in others])
            for index, ratio in enumerate(np.median(turns, axis=0)):
                ratios[index].append(float(ratio))
    return ratios


def _is_clear(turns: Sequence[Sequence[float]]) -> bool:
    """Whether every turn says the same: that no graph is fit, or that the only one is."""
    slower = np.array(turns) > WHOLE_TIE
    return bool(slower.all()) or (slower.shape[1] == 1 and not slower.any())


def _call(timed: TimedGraph, inputs: Mapping[str, Any]) -> float:
    """Returns the milliseconds of a call, the least of a turn."""
    until = time.perf_counter() + TURN_SECONDS
    fastest = timed.milliseconds(inputs)
    for _ in range(TURN_CALLS - 1):
        if time.perf_counter() >= until:
            break
        fastest = min(fastest, timed.milliseconds(inputs))
    return fastest


def _fastest(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], table: TimeTable, feeds: Feeds
) -> list[bool]:
    """Returns for each fusion whether it is in int8 in the fastest assignment."""
    times, graph = table.fusions, quantized.float_graph
    totals = np.sum([times[fusion.op].float_ms for fusion in fusions], axis=0)
    scales = WHOLE / np.maximum(totals, 1e-3)
    conversion = _conversions(graph, tensors_with_ranges(editor, fusions), table, feeds, scales)
    network = FlowNetwork()
    entering = {
        fusion.op: [pass_through_origin(editor, source) for source in (fusion.input, fusion.summand) if source]
        for fusion in fusions
    }
    # A joint is on the side that spares conversions: its own time counts for little beside these.
    joints = {joint.output: joint.inputs for joint in find_joints(editor, fusions, quantized.ranges)}
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
    """Whether a node that is part of no fusion reads a tensor, directly or through what only moves values."""
    stack = [tensor]
    while stack:
        name = stack.pop()
        if name in graph.output_nodes:
            return True
        for reader in editor.consumers.get(name, ()):
            if editor.nodes[reader].op in PASS_THROUGH:
                stack.append(reader)
            elif reader not in inside:
                return True
    return False


def _conversions(
    graph: FrozenGraph, tensors: Sequence[str], table: TimeTable, feeds: Feeds, scales: np.ndarray
) -> Callable[[str, str], float]:
    """Returns a function of (op, tensor): what converting the tensor costs, in the units of the network."""
    function = graph.as_function(fetch=tensors)
    values = [function(**inputs) for inputs in feeds.values()]
    elements = {tensor: [int(tf.size(batch[index])) for batch in values] for index, tensor in enumerate(tensors)}
    largest = table.sizes[-1]

    def cost(op: str, tensor: str) -> float:
        known = table.conversions[op]
        per_batch = [np.interp(count, table.sizes, known) * max(1.0, count / largest) for count in elements[tensor]]
        return float(np.dot(per_batch, scales))

    return cost
