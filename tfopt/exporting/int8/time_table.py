"""The time table: the times of each fusion of a model in int8 and in float32, which can be stored in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AliasChoices, Field, TypeAdapter

from tfopt.atomic.checked_json import EDITED, is_as_written
from tfopt.errors import ConfigError
from tfopt.exporting.int8.kernels import lowered_names
from tfopt.exporting.int8.layer_norm import LayerNorm, fused_name
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
        layer_norms: The times of each layer normalisation as single nodes and in one kernel of oneDNN, by the name of
            its last node. Older files have none: then each gets the kernel.
        whole: The time of the whole model in int8, divided by that in float32, for each batch size: with the "chosen"
            nodes in int8, and with "all". Older files have none: then the times of the nodes alone decide.
    """

    device: str
    batch_sizes: list[int]
    fusions: Annotated[dict[str, FusionTimes], Field(validation_alias=AliasChoices("fusions", "chains"))]
    sizes: list[int]
    conversions: dict[str, list[float]]
    layer_norms: dict[str, FusionTimes] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)

    @property
    def slower_norms(self) -> frozenset[str]:
        """The layer normalisations that the kernel makes slower."""
        return frozenset(name for name, times in self.layer_norms.items() if self.is_slower(times))

    def is_slower(self, times: FusionTimes) -> bool:
        """Whether int8 is slower than float32. Each batch size has the same weight."""
        totals = np.sum([[1e-3] * len(self.batch_sizes), *(each.float_ms for each in self.fusions.values())], axis=0)
        return bool(np.sum(np.array(times.int8_ms) / totals) > np.sum(np.array(times.float_ms) / totals))


def table_of(nodes: NodeTimes, editor: GraphEditor, fusions: Sequence[Fusion], norms: Sequence[LayerNorm]) -> TimeTable:
    """Returns the time of each fusion: the sum of the times of its nodes.

    Args:
        nodes: The times of the nodes.
        editor: An editor of the float graph.
        fusions: Its fusions.
        norms: Its layer normalisations.
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
        layer_norms={
            norm.nodes[-1]: FusionTimes(
                float_ms=[sum(times.get(name, 0.0) for name in norm.nodes) for times in nodes.float_ms],
                int8_ms=[times.get(fused_name(norm.nodes[-1]), 0.0) for times in nodes.int8_ms],
            )
            for norm in norms
        },
    )


def read_table(stored: Path, fusions: Sequence[Fusion], batch_sizes: Sequence[int]) -> TimeTable:
    """Returns a stored table.

    Raises:
        ConfigError: The file is not a time table, or it is of another model or of other batch sizes.
    """
    try:
        content = json.loads(stored.read_bytes())
        table = TypeAdapter(TimeTable).validate_python(content)
    except (OSError, ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"node_times must be a file that an export wrote. Received: {stored} ({reason}). Remove it to measure anew."
        ) from error
    measured = (table.fusions | table.layer_norms).items()
    lists = [(name, each) for name, times in measured for each in (times.float_ms, times.int8_ms)]
    for name, each in (*lists, *table.whole.items()):
        if len(each) != len(table.batch_sizes) or not all(0 <= ms < math.inf for ms in each):
            raise ConfigError(
                f"node_times must have a time of at least 0 for each of its batch sizes {table.batch_sizes}. "
                f"Received: {stored}, with {each} for {name!r}. Remove it to measure anew."
            )
    for name, each in table.conversions.items():
        if len(each) != len(table.sizes) or not all(0 <= ms < math.inf for ms in each):
            raise ConfigError(
                f"node_times must have a time of at least 0 for each of its sizes {table.sizes}. "
                f"Received: {stored}, with {each} for {name!r}. Remove it to measure anew."
            )
    missing = [fusion.op for fusion in fusions if fusion.op not in table.fusions]
    if missing or table.batch_sizes != list(batch_sizes):
        wrong = f"which lacks {missing[0]!r}" if missing else f"measured at batch sizes {table.batch_sizes}"
        raise ConfigError(
            f"node_times must be of this model and of batch_sizes={tuple(batch_sizes)}. Received: {stored}, {wrong}. "
            "Remove it to measure anew."
        )
    if not is_as_written(content):
        raise ConfigError(
            f"node_times must be as an export wrote it. Received: {stored} ({EDITED}). Remove it to measure anew."
        )
    return table


def _covered(editor: GraphEditor, fusion: Fusion, times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the nodes whose float time belongs to a fusion, and those of them that are also in the int8 graph.

    TensorFlow may fuse a float convolution with the node behind the fusion, for example a sum. The time is then under
    the name of that node, which int8 leaves to a float kernel.
    """
    timed = [name for name in fusion.nodes if name in times]
    if timed:
        return timed, []
    fused = [name for name in editor.consumers.get(fusion.output, ()) if name in times]
    return fused, fused
