"""Measures what int8 and float32 cost for each fusion of a model on this machine, and stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from tfopt.data.batches import iterate_batches
from tfopt.errors import ConfigError
from tfopt.exporting.int8.kernels import lowered_names
from tfopt.exporting.int8.node_times import TimedGraph, conversion_times
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.open_sizes import open_size, zeros
from tfopt.hardware import detect
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.report import Record

SIZES = tuple(2**exponent for exponent in range(8, 23, 2))
Feeds = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FusionTimes(Record):
    """The milliseconds of one fusion, for each batch size."""

    float_ms: list[float]
    int8_ms: list[float]

    def __str__(self) -> str:
        int8, single = (" and ".join(f"{value:.3f}" for value in times) for times in (self.int8_ms, self.float_ms))
        return f"{int8} ms in int8, {single} ms in float32"


@dataclass(frozen=True, kw_only=True)
class TimeTable(Record):
    """What decides: the times of a model's fusions and of conversions, on one machine.

    Attributes:
        device: The machine's processor.
        batch_sizes: The batch sizes that it was measured at.
        fusions: The times of each fusion, by the name of its op.
        sizes: Numbers of elements.
        conversions: For each op that converts, the milliseconds for each of `sizes`.
    """

    device: str
    batch_sizes: list[int]
    fusions: Annotated[dict[str, FusionTimes], Field(validation_alias=AliasChoices("fusions", "chains"))]  # of 0.1.0
    sizes: list[int]
    conversions: dict[str, list[float]]


def feeds_of(graph: FrozenGraph, data: Any, batch_sizes: Sequence[int]) -> Feeds:
    """Returns inputs for each batch size: the data's first examples, again and again where there are too few.

    Without data they are zeros. A model whose batch size is fixed gets that one only.
    """
    batch = None if data is None else next(iterate_batches(data, inputs=len(graph.inputs)), None)
    fed = zeros(graph, open_size(graph)) if batch is None else graph.feed(batch[0])
    examples = {name: value.numpy() for name, value in fed.items()}
    fixed = {spec.shape[0] for spec in graph.inputs.values() if spec.shape.rank and spec.shape[0]}
    return {
        size: {
            name: np.resize(value, (size, *value.shape[1:])) if value.ndim else value
            for name, value in examples.items()
        }
        for size in (fixed or batch_sizes)
    }


def read_table(stored: Path, fusions: Sequence[Fusion], feeds: Feeds) -> TimeTable:
    """Returns a stored table.

    Raises:
        ConfigError: The file is none, or one of another model or of other batch sizes.
    """
    try:
        table = TypeAdapter(TimeTable).validate_json(stored.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"node_times must be a file that an export wrote. Received: {stored} ({reason}). Remove it to measure anew."
        ) from error
    missing = [fusion.op for fusion in fusions if fusion.op not in table.fusions]
    if missing or table.batch_sizes != list(feeds):
        wrong = f"which lacks {missing[0]!r}" if missing else f"measured at batch sizes {table.batch_sizes}"
        raise ConfigError(
            f"node_times must be of this model and of batch_sizes={tuple(feeds)}. Received: {stored}, {wrong}. "
            "Remove it to measure anew."
        )
    return table


def measure(
    float_graph: FrozenGraph, int8_graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion], feeds: Feeds
) -> TimeTable:
    """Traces the float graph and the int8 graph.

    Args:
        float_graph, int8_graph: The graph before annotation, and with all fusions in int8.
        editor: An editor of the float graph.
        fusions: Its fusions.
        feeds: Inputs by name for each batch size.
    """
    with TimedGraph(float_graph) as before, TimedGraph(int8_graph) as after:
        single = [before.node_times(inputs, before.rounds(inputs)) for inputs in feeds.values()]
        int8 = [after.node_times(inputs, after.rounds(inputs)) for inputs in feeds.values()]
    times = {
        fusion.op: FusionTimes(
            float_ms=[sum(times.get(name, 0.0) for name in covered) for times in single],
            int8_ms=[sum(times.get(name, 0.0) for name in (*lowered_names(fusion.op), *rest)) for times in int8],
        )
        for fusion in fusions
        for covered, rest in [_covered(editor, fusion, single[0])]
    }
    return TimeTable(
        device=detect().cpu_model or "unknown processor",
        batch_sizes=list(feeds),
        fusions=times,
        sizes=list(SIZES),
        conversions=conversion_times(SIZES),
    )


def _covered(editor: GraphEditor, fusion: Fusion, times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the nodes whose float time is a fusion's, and those of them that int8 leaves to a float kernel.

    TensorFlow may fuse a convolution in float32 with what follows, a sum for example, under the name of that.
    """
    timed = [name for name in fusion.nodes if name in times]
    if timed:
        return timed, []
    fused = [name for name in editor.consumers.get(fusion.output, ()) if name in times]
    return fused, fused
