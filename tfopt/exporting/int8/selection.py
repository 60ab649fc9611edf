"""Decides by measured times which nodes of a quantized model run in int8 and which stay float.

An int8 kernel is not always faster: a small convolution may be slower, and conversions between int8 and float take time
too. Counts of operations do not tell, so the nodes are timed. There are four steps, each in one call:

1. node_times.py times the nodes of two graphs, one all float and one with as much int8 as possible.
2. time_table.py adds them up to a table of two times for each fusion. The table can be stored, and then decides for
   another machine. It also says which layer normalisations oneDNN's kernel makes faster.
3. assignment.py finds the fastest assignment of the fusions to int8 and float.
4. This module times whole graphs in turns, because the times of nodes can mislead. A model that int8 would make slower
   stays float. The turns end as soon as it is clear which graphs make the model slower. The table has these times too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfopt import timing
from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.files import write_text
from tfopt.exporting.int8.assignment import TIE, fastest_assignment
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.layer_norm import find_layer_norms
from tfopt.exporting.int8.node_times import Feeds, TimedGraph, measure_nodes
from tfopt.exporting.int8.time_table import FusionTimes, TimeTable, read_table, table_of
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.quantization import QuantizedModel
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.report import Change

# A model must not get slower. So whole graphs get more turns, and less difference counts as a tie than for nodes.
WHOLE_TIE = 1.01
FEWEST_TURNS = 7
MOST_TURNS = 41
# A turn gives the median of a few calls, as a receipt does. The fastest call would favour int8: its times vary more.
TURN_CALLS = 10
TURN_SECONDS = 0.04
CLOCK = "clock"  # the kind of the report's step with the result for the whole model
AS_A_WHOLE = "the model as a whole is faster in float32"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The result of `select_int8`.

    Attributes:
        model: The model with the chosen nodes quantized, and the times in its report.
        lowered: Its int8 graph. None if nothing is in int8.
    """

    model: QuantizedModel
    lowered: FrozenGraph | None = None


def select_int8(quantized: QuantizedModel, feeds: Feeds, stored: Path | None = None) -> Selection:
    """Selects the nodes that int8 makes faster.

    Args:
        quantized: The model with everything quantized that can be, at least one node.
        feeds: Inputs by name for each batch size. Each size has the same weight.
        stored: A JSON file with a TimeTable. If it exists, it decides, and nothing is timed. Otherwise the measured
            table is written to it.
    Raises:
        ConfigError: The file is not a time table, or it is of another model or of other batch sizes.
    """
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions = [fusion.within(editor) for fusion in quantized.graph.fusions]
    if stored is not None and stored.exists():
        table = read_table(stored, fusions, list(feeds))
        selection = _fittest(quantized, _choose(quantized, editor, fusions, table, feeds), table)
    else:
        selection, table = _measure_and_choose(quantized, editor, fusions, feeds)
        if stored is not None:
            write_text(stored, json.dumps(with_checksum(table.to_dict()), indent=2) + "\n")
    report = selection.model.report
    changed = [replace(each, detail=f"{each.detail}; {table.fusions[each.name]}") for each in report.changed]
    return replace(selection, model=replace(selection.model, report=replace(report, changed=changed)))


def _measure_and_choose(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], feeds: Feeds
) -> tuple[Selection, TimeTable]:
    everything = lower_to_int8(quantized.graph)
    norms = find_layer_norms(quantized.float_graph, editor)
    # The float graph takes as long as the graph of a float32 export. It differs in the values of weights, and in added
    # biases, which TensorFlow fuses into the ops before them.
    with ExitStack() as stack:
        single = stack.enter_context(TimedGraph(quantized.float_graph))
        int8 = stack.enter_context(TimedGraph(everything))
        table = table_of(measure_nodes(single, int8, feeds), editor, fusions, norms)
        chosen = _choose(quantized, editor, fusions, table, feeds)
        lowered = {
            name: lower_to_int8(model.graph, table.slower_norms)
            if table.slower_norms or model is not quantized
            else everything
            for name, model in _candidates(quantized, chosen).items()
        }
        timed = [stack.enter_context(TimedGraph(graph)) for graph in lowered.values()]
        ratios = in_turns(single, timed, feeds)
    table = replace(table, whole=dict(zip(lowered, ratios, strict=True)))
    return _fittest(quantized, chosen, table, lowered), table


def _candidates(quantized: QuantizedModel, chosen: QuantizedModel) -> dict[str, QuantizedModel]:
    """Returns the models that are timed as whole graphs, those with more nodes in int8 later."""
    several = chosen is not quantized and chosen.report.changed
    return {"chosen": chosen, "all": quantized} if several else {"all": quantized}


def _fittest(
    quantized: QuantizedModel,
    chosen: QuantizedModel,
    table: TimeTable,
    lowered: Mapping[str, FrozenGraph] | None = None,
) -> Selection:
    """Returns what the times of whole graphs decide for.

    Args:
        quantized: The model with all nodes in int8.
        chosen: The model with the nodes in int8 that the times of nodes decide for.
        table: The times.
        lowered: The int8 graphs of the candidates, where there are any yet.
    """
    models = {name: model for name, model in _candidates(quantized, chosen).items() if name in table.whole}
    if not models:  # the table is of an earlier version
        in_int8 = bool(chosen.report.changed)
        return Selection(model=chosen, lowered=lower_to_int8(chosen.graph, table.slower_norms) if in_int8 else None)
    ratios = [table.whole[name] for name in models]
    best_fit = fastest_fit(ratios)
    if best_fit is None:
        least = dict(zip(table.batch_sizes, min(ratios, key=sum), strict=True))
        return Selection(model=stay_float(quantized, chosen, least))
    name = list(models)[best_fit]
    graph = (lowered or {}).get(name) or lower_to_int8(models[name].graph, table.slower_norms)
    return Selection(model=models[name], lowered=graph)


def _choose(
    quantized: QuantizedModel, editor: GraphEditor, fusions: Sequence[Fusion], table: TimeTable, feeds: Feeds
) -> QuantizedModel:
    """Returns the model with the nodes in int8 that the table decides for. The report has the reason for the others."""
    in_int8 = fastest_assignment(quantized, editor, fusions, table, feeds)
    slower = {
        fusion.op: f"{_why(table, table.fusions[fusion.op])}: {table.fusions[fusion.op]}"
        for fusion, chosen in zip(fusions, in_int8, strict=True)
        if not chosen
    }
    return quantized.leaving_float(slower) if slower else quantized


def _why(table: TimeTable, times: FusionTimes) -> str:
    if table.is_slower(times):
        return "slower in int8"
    return "converting its tensors would cost more than int8 saves"


def stay_float(quantized: QuantizedModel, chosen: QuantizedModel, ratios: Mapping[int, float]) -> QuantizedModel:
    """Returns the model with nothing in int8. Its report gives the reason once, as a step.

    Args:
        quantized: The model with all nodes in int8.
        chosen: The model with the chosen nodes in int8.
        ratios: The time of int8 divided by the time of float32, for each batch size.
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

    Args:
        ratios: The time of each graph divided by the time of the float graph, for each batch size. Graphs with more
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


def in_turns(single: TimedGraph, graphs: Sequence[TimedGraph], feeds: Feeds) -> list[list[float]]:
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
