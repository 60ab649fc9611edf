"""The time table: the times of each fusion of a model in int8 and in float32, measured or read from a file.

A fusion takes as long as its nodes. Each node of a frozen graph is timed within the graph, on the CPU: TensorFlow's
trace records when each kernel begins and ends. So a node is measured with inputs that are in the cache, or not, as its
neighbours leave them. A loop over a single op would not show that. The nodes run one after the other in one inter-op
thread, so that no node is charged for the work of another. Each uses all intra-op threads.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import numpy as np
import tensorflow as tf
from pydantic import AliasChoices, Field, TypeAdapter

from tfopt.atomic.checked_json import EDITED, is_as_written
from tfopt.atomic.files import read_stored
from tfopt.errors import ConfigError
from tfopt.exporting.int8.layer_norm import LayerNorm, fused_name
from tfopt.exporting.int8.weights import lowered_names
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, AttrValue, GraphDef, dtype_attr, text
from tfopt.graph.frozen import free_graphs, full_name
from tfopt.graph.inputs import open_size, zeros
from tfopt.hardware import detect
from tfopt.quantization.annotation.fusion import Fusion
from tfopt.report import Record

v1 = tf.compat.v1
NS_PER_MS = 1e6
SECONDS = 0.6
FEWEST, MOST = 3, 15
SIZES = tuple(2**exponent for exponent in range(8, 23, 2))  # of the tensors that are converted
AS_SERVED, IN_ORDER = 0, 1  # a session's inter-op thread pools
Feeds = Mapping[int, Mapping[str, Any]]


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
        fusions: The times of each fusion, by the name of its op. Version 0.1.0 called them "chains".
        conversions: For each op that converts a tensor, the milliseconds for each number of elements in `sizes`.
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


def measure_table(
    single: TimedGraph,
    int8: TimedGraph,
    feeds: Feeds,
    editor: GraphEditor,
    fusions: Sequence[Fusion],
    norms: Sequence[LayerNorm],
) -> TimeTable:
    """Times the nodes of a float graph and of the same graph in int8, and adds them up to the times of each fusion."""
    in_float = [single.node_times(inputs) for inputs in feeds.values()]
    in_int8 = [int8.node_times(inputs) for inputs in feeds.values()]

    def times_of(covered: Sequence[str], lowered: Sequence[str]) -> FusionTimes:
        return FusionTimes(
            float_ms=[sum(times.get(name, 0.0) for name in covered) for times in in_float],
            int8_ms=[sum(times.get(name, 0.0) for name in lowered) for times in in_int8],
        )

    fusion_times = {}
    for fusion in fusions:
        covered, rest = _covered(editor, fusion, in_float[0])
        fusion_times[fusion.op] = times_of(covered, [*lowered_names(fusion.op), *rest])
    return TimeTable(
        device=detect().processor,
        batch_sizes=list(feeds),
        fusions=fusion_times,
        sizes=list(SIZES),
        conversions=_conversion_times(SIZES),
        layer_norms={norm.nodes[-1]: times_of(norm.nodes, [fused_name(norm.nodes[-1])]) for norm in norms},
    )


def read_table(stored: Path, fusions: Sequence[Fusion], batch_sizes: Sequence[int]) -> TimeTable:
    """Returns a stored table. Raises ConfigError if it is none, or of another model or of other batch sizes."""
    try:
        content = json.loads(read_stored(stored))
        table = TypeAdapter(TimeTable).validate_python(content)
    except (OSError, ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"node_times must be a file that an export wrote. Received: {stored} ({reason}). Remove it to measure anew."
        ) from error
    measured = (table.fusions | table.layer_norms).items()
    lists = [(name, each) for name, times in measured for each in (times.float_ms, times.int8_ms)]
    by_batch = [("batch sizes", table.batch_sizes, name, each) for name, each in (*lists, *table.whole.items())]
    by_size = [("sizes", table.sizes, name, each) for name, each in table.conversions.items()]
    for kind, known, name, each in (*by_batch, *by_size):
        if len(each) != len(known) or not all(0 <= ms < math.inf for ms in each):
            raise ConfigError(
                f"node_times must have a time of at least 0 for each of its {kind} {known}. "
                f"Received: {stored}, with {each} for {name!r}. Remove it to measure anew."
            )
    # Tables of earlier versions lack the grouped convolutions, whose weights have one range.
    missing = [fusion.op for fusion in fusions if fusion.per_channel and fusion.op not in table.fusions]
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


class TimedGraph:
    """A frozen graph in a session, to be timed as a whole or node by node, on the CPU unless `gpu` says otherwise.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> graph = freeze(keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(2, name="head")]))
        >>> with TimedGraph(graph) as timed:
        ...     times = timed.node_times({"x": np.zeros((1, 4), "float32")})
        >>> any("head" in name and ms >= 0 for name, ms in times.items())
        True
    """

    def __init__(self, graph: FrozenGraph, *, gpu: bool = False) -> None:
        self._names = {name: full_name(spec.name) for name, spec in graph.inputs.items()}
        self._outputs = [full_name(tensor) for tensor, _ in graph.outputs.values()]
        self._graph_def, self._tables = graph.graph_def, graph.tables
        self._gpu = gpu

    def __enter__(self) -> Self:
        with tf.Graph().as_default() as graph:
            handles = {full_name(name): table.make().resource_handle for name, table in self._tables.items()}
            tf.graph_util.import_graph_def(self._graph_def, handles, name="")
            fill_tables = v1.tables_initializer()
        # Without a GPU where the kernels of the CPU are compared. The session optimizes its graph only once for both
        # thread pools. TensorFlow chooses the number of threads where it is 0.
        options = v1.ConfigProto(device_count={} if self._gpu else {"GPU": 0})
        for threads in (0, 1):  # AS_SERVED, IN_ORDER
            options.session_inter_op_thread_pool.add(num_threads=threads)
        self._session = v1.Session(graph=graph, config=options)
        self._session.run(fill_tables)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        del self._session
        free_graphs(self._graph_def)

    def rounds(self, inputs: Mapping[str, Any], most: int, pool: int = AS_SERVED) -> int:
        """Returns how often to run the graph: as often as fits into SECONDS, at least FEWEST and at most `most` times.

        The two runs that this takes also warm the graph up.
        """
        self.milliseconds(inputs, pool)
        return int(np.clip(SECONDS * 1e3 / self.milliseconds(inputs, pool), FEWEST, most))

    def milliseconds(self, inputs: Mapping[str, Any], pool: int = AS_SERVED) -> float:
        start = time.perf_counter()
        self._session.run(self._outputs, self._fed(inputs), v1.RunOptions(inter_op_thread_pool=pool))
        return (time.perf_counter() - start) * 1e3

    def node_times(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Returns the median milliseconds of each node's kernel.

        The time of nodes that TensorFlow fuses is under the name of the last one. The others are missing.
        """
        return {name: ms for (name, _), ms in self.kernel_times(inputs).items()}

    def kernel_times(self, inputs: Mapping[str, Any]) -> dict[tuple[str, str], float]:
        """Returns the median milliseconds of each kernel by its node's name and its op, after TensorFlow's fusions."""
        rounds = self.rounds(inputs, MOST, IN_ORDER)
        options = v1.RunOptions(trace_level=v1.RunOptions.SOFTWARE_TRACE, inter_op_thread_pool=IN_ORDER)
        calls: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            metadata = v1.RunMetadata()
            self._session.run(self._outputs, self._fed(inputs), options, metadata)
            for device in metadata.step_stats.dev_stats:
                for node in device.node_stats:
                    elapsed = (node.op_end_rel_nanos - node.op_start_rel_nanos) / NS_PER_MS
                    op = node.timeline_label.partition(" = ")[2].partition("(")[0]
                    calls.setdefault((node.node_name, op), []).append(elapsed)
        return {kernel: float(np.median(times)) for kernel, times in calls.items()}

    def _fed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {self._names[name]: value for name, value in inputs.items()}


def feeds_of(graph: FrozenGraph, sample: Mapping[str, np.ndarray] | None, batch_sizes: Sequence[int]) -> Feeds:
    """Returns inputs for each batch size: the first examples of the sample, repeated where there are too few.

    Without a sample the inputs are zeros. A model with a fixed batch size gets that size only.
    """
    examples = sample or {name: value.numpy() for name, value in zeros(graph, open_size(graph)).items()}
    fixed = {spec.shape[0] for spec in graph.inputs.values() if spec.shape.rank and spec.shape[0]}
    return {
        size: {
            name: np.resize(value, (size, *value.shape[1:])) if value.ndim else value
            for name, value in examples.items()
        }
        for size in (fixed or batch_sizes)
    }


def _conversion_times(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Returns the milliseconds of "QuantizeV2" and of "Dequantize" for tensors of each size."""
    editor, quint8 = GraphEditor(GraphDef()), dtype_attr(tf.quint8)
    ends = [editor.add_constant(name, np.float32(value)) for name, value in (("low", 0.0), ("high", 1.0))]
    for size in sizes:
        source = editor.add("Placeholder", f"x{size}", (), dtype=FLOAT32)
        options = {"round_mode": text("HALF_TO_EVEN"), "ensure_minimum_range": AttrValue(f=0.0)}  # as in activations.py
        name = f"QuantizeV2{size}"
        quantized = editor.add("QuantizeV2", name, [source, *ends], T=quint8, mode=text("SCALED"), **options)
        editor.add("Dequantize", f"Dequantize{size}", [quantized, *ends], T=quint8, mode=text("MIN_COMBINED"))
    graph = FrozenGraph(
        graph_def=editor.graph_def(editor.nodes),
        inputs={f"x{size}": tf.TensorSpec([None], tf.float32, f"x{size}") for size in sizes},
        outputs={f"y{size}": (f"Dequantize{size}", tf.TensorSpec([None])) for size in sizes},
        name="conversions",
    )
    with TimedGraph(graph) as timed:
        times = timed.node_times({f"x{size}": np.ones(size, np.float32) for size in sizes})
    return {op: [times[f"{op}{size}"] for size in sizes] for op in ("QuantizeV2", "Dequantize")}
