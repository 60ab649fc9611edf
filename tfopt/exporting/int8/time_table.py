"""The time table: the times of each fusion of a model in int8 and in float32, which can be stored in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from tfopt.errors import ConfigError
from tfopt.exporting.int8.kernels import lowered_names
from tfopt.exporting.int8.node_times import NodeTimes
from tfopt.graph import GraphEditor
from tfopt.hardware import detect
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.report import Record


@dataclass(frozen=True, kw_only=True)
class FusionTimes(Record):
    """The milliseconds of one fusion for each batch size."""

    float_ms: list[float]
    int8_ms: list[float]

    def __str__(self) -> str:
        int8, single = (" and ".join(f"{value:.3f}" for value in times) for times in (self.int8_ms, self.float_ms))
        return f"{int8} ms in int8, {single} ms in float32"


@dataclass(frozen=True, kw_only=True)
class TimeTable(Record):
    """The times of a model's fusions and of conversions, on one machine.

    Attributes:
        device: The processor of the machine.
        batch_sizes: The batch sizes of the measurement.
        fusions: The times of each fusion, by the name of its op. Version 0.1.0 called them "chains".
        sizes: Numbers of elements.
        conversions: For each op that converts a tensor, the milliseconds for each of `sizes`.
    """

    device: str
    batch_sizes: list[int]
    fusions: Annotated[dict[str, FusionTimes], Field(validation_alias=AliasChoices("fusions", "chains"))]
    sizes: list[int]
    conversions: dict[str, list[float]]


def table_of(nodes: NodeTimes, editor: GraphEditor, fusions: Sequence[Fusion]) -> TimeTable:
    """Returns the time of each fusion: the sum of the times of its nodes.

    Args:
        nodes: The times of the nodes.
        editor: An editor of the float graph.
        fusions: Its fusions.
    """
    times = {
        fusion.op: FusionTimes(
            float_ms=[sum(times.get(name, 0.0) for name in covered) for times in nodes.float_ms],
            int8_ms=[
                sum(times.get(name, 0.0) for name in (*lowered_names(fusion.op), *rest)) for times in nodes.int8_ms
            ],
        )
        for fusion in fusions
        for covered, rest in [_covered(editor, fusion, nodes.float_ms[0])]
    }
    return TimeTable(
        device=detect().cpu_model or "unknown processor",
        batch_sizes=nodes.batch_sizes,
        fusions=times,
        sizes=nodes.sizes,
        conversions=nodes.conversions_ms,
    )


def read_table(stored: Path, fusions: Sequence[Fusion], batch_sizes: Sequence[int]) -> TimeTable:
    """Returns a stored table.

    Raises:
        ConfigError: The file is not a time table, or it is of another model or of other batch sizes.
    """
    try:
        table = TypeAdapter(TimeTable).validate_json(stored.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"node_times must be a file that an export wrote. Received: {stored} ({reason}). Remove it to measure anew."
        ) from error
    missing = [fusion.op for fusion in fusions if fusion.op not in table.fusions]
    if missing or table.batch_sizes != list(batch_sizes):
        wrong = f"which lacks {missing[0]!r}" if missing else f"measured at batch sizes {table.batch_sizes}"
        raise ConfigError(
            f"node_times must be of this model and of batch_sizes={tuple(batch_sizes)}. Received: {stored}, {wrong}. "
            "Remove it to measure anew."
        )
    return table


def _covered(editor: GraphEditor, fusion: Fusion, times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the nodes whose float time belongs to a fusion, and those of them that are also in the int8 graph.

    In float32, TensorFlow may fuse a convolution with the node behind the fusion, for example a sum. The time is then
    under the name of that node, which int8 leaves to a float kernel.
    """
    timed = [name for name in fusion.nodes if name in times]
    if timed:
        return timed, []
    fused = [name for name in editor.consumers.get(fusion.output, ()) if name in times]
    return fused, fused
