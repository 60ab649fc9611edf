"""Times each node of a frozen graph within the graph, on the CPU.

TensorFlow's trace records when each kernel begins and ends. So a node is measured with inputs that are in the cache, or
not, as its neighbours leave them. A loop over a single op would not show that. The nodes run one after the other in one
inter-op thread, so that no node is charged for the work of another. Each uses all intra-op threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfopt.graph import FrozenGraph
from tfopt.graph.edit import AttrValue, GraphDef, dtype_attr, text
from tfopt.graph.frozen import free_graphs, full_name
from tfopt.graph.inputs import open_size, zeros

v1 = tf.compat.v1
NS_PER_MS = 1e6
SECONDS = 0.6
FEWEST, MOST = 3, 15
SIZES = tuple(2**exponent for exponent in range(8, 23, 2))  # of the tensors that are converted
AS_SERVED, IN_ORDER = 0, 1  # a session's inter-op thread pools
Feeds = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class NodeTimes:
    """The milliseconds of each node of a float graph and of its int8 graph, by name.

    Attributes:
        batch_sizes: The batch sizes.
        float_ms: The nodes of the float graph, for each batch size.
        int8_ms: The nodes of the int8 graph, for each batch size.
        sizes: Numbers of elements.
        conversions_ms: For each op that converts a tensor, the time for each of `sizes`.
    """

    batch_sizes: list[int]
    float_ms: list[dict[str, float]]
    int8_ms: list[dict[str, float]]
    sizes: list[int]
    conversions_ms: dict[str, list[float]]


class TimedGraph:
    """A frozen graph in a session, to be timed as a whole or node by node.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> graph = freeze(keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(2, name="head")]))
        >>> with TimedGraph(graph) as timed:
        ...     times = timed.node_times({"x": np.zeros((1, 4), "float32")})
        >>> any("head" in name and ms >= 0 for name, ms in times.items())
        True
    """

    def __init__(self, graph: FrozenGraph) -> None:
        self._names = {name: full_name(spec.name) for name, spec in graph.inputs.items()}
        self._outputs = [full_name(tensor) for tensor, _ in graph.outputs.values()]
        self._graph_def, self._tables = graph.graph_def, graph.tables

    def __enter__(self) -> Self:
        with tf.Graph().as_default() as graph:
            handles = {full_name(name): table.make().resource_handle for name, table in self._tables.items()}
            tf.graph_util.import_graph_def(self._graph_def, handles, name="")
            fill_tables = v1.tables_initializer()
        # Without a GPU, because the kernels of the CPU are compared. The session optimizes its graph only once for both
        # thread pools. TensorFlow chooses the number of threads where it is 0.
        options = v1.ConfigProto(device_count={"GPU": 0})
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
        """Runs the graph once and returns how long it took."""
        start = time.perf_counter()
        self._session.run(self._outputs, self._fed(inputs), v1.RunOptions(inter_op_thread_pool=pool))
        return (time.perf_counter() - start) * 1e3

    def node_times(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Returns the median milliseconds of each node's kernel.

        The time of nodes that TensorFlow fuses is under the name of the last one. The others are missing.
        """
        rounds = self.rounds(inputs, MOST, IN_ORDER)
        options = v1.RunOptions(trace_level=v1.RunOptions.SOFTWARE_TRACE, inter_op_thread_pool=IN_ORDER)
        calls: dict[str, list[float]] = {}
        for _ in range(rounds):
            metadata = v1.RunMetadata()
            self._session.run(self._outputs, self._fed(inputs), options, metadata)
            for device in metadata.step_stats.dev_stats:
                for node in device.node_stats:
                    elapsed = (node.op_end_rel_nanos - node.op_start_rel_nanos) / NS_PER_MS
                    calls.setdefault(node.node_name, []).append(elapsed)
        return {name: float(np.median(times)) for name, times in calls.items()}

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


def measure_nodes(single: TimedGraph, int8: TimedGraph, feeds: Feeds) -> NodeTimes:
    """Times the nodes of both graphs, and the conversions between float and int8.

    Args:
        single: The graph in float32.
        int8: The same graph with all fusions in int8.
        feeds: Inputs by name for each batch size.
    """
    return NodeTimes(
        batch_sizes=list(feeds),
        float_ms=[single.node_times(inputs) for inputs in feeds.values()],
        int8_ms=[int8.node_times(inputs) for inputs in feeds.values()],
        sizes=list(SIZES),
        conversions_ms=_conversion_times(SIZES),
    )


def _conversion_times(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Returns the milliseconds of "QuantizeV2" and of "Dequantize" for tensors of each size."""
    graph_def = GraphDef()
    for name, value in (("low", 0.0), ("high", 1.0)):
        node = graph_def.node.add(name=name, op="Const")
        node.attr["dtype"].CopyFrom(dtype_attr(tf.float32))
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.float32(value)))
    for size in sizes:
        source = graph_def.node.add(name=f"x{size}", op="Placeholder")
        source.attr["dtype"].CopyFrom(dtype_attr(tf.float32))
        quantize = graph_def.node.add(name=f"QuantizeV2{size}", op="QuantizeV2", input=[source.name, "low", "high"])
        dequantize = graph_def.node.add(name=f"Dequantize{size}", op="Dequantize", input=[quantize.name, "low", "high"])
        for node in (quantize, dequantize):
            node.attr["T"].CopyFrom(dtype_attr(tf.quint8))
            node.attr["mode"].CopyFrom(text("SCALED" if node is quantize else "MIN_COMBINED"))  # as in activations.py
        quantize.attr["round_mode"].CopyFrom(text("HALF_TO_EVEN"))
        quantize.attr["ensure_minimum_range"].CopyFrom(AttrValue(f=0.0))
    graph = FrozenGraph(
        graph_def=graph_def,
        inputs={f"x{size}": tf.TensorSpec([None], tf.float32, f"x{size}") for size in sizes},
        outputs={f"y{size}": (f"Dequantize{size}", tf.TensorSpec([None])) for size in sizes},
        name="conversions",
    )
    with TimedGraph(graph) as timed:
        times = timed.node_times({f"x{size}": np.ones(size, np.float32) for size in sizes})
    return {op: [times[f"{op}{size}"] for size in sizes] for op in ("QuantizeV2", "Dequantize")}
