"""Times each node of a frozen graph where it stands, on the CPU.

TensorFlow's own trace tells when each kernel began and ended. A node is so measured with its inputs as cold or warm as
its neighbours leave them, which a loop over a single op would not show. Nodes run one after the other (one inter-op
thread), so that no node is charged for another's work; each uses all intra-op threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfopt.graph import FrozenGraph
from tfopt.graph.edit import AttrValue, GraphDef, dtype_attr, text
from tfopt.graph.frozen import free_graphs, full_name

v1 = tf.compat.v1
NS_PER_MS = 1e6
WARM_UPS = 2
SECONDS = 0.6
FEWEST, MOST = 3, 15


class TimedGraph:
    """A frozen graph in a session, to be timed as a whole or node by node.

    Args:
        graph: The graph.
        in_order: Whether nodes run one after the other, as node_times needs. Else they run as in a served model.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> graph = freeze(keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(2, name="head")]))
        >>> with TimedGraph(graph) as timed:
        ...     times = timed.node_times({"x": np.zeros((1, 4), "float32")}, rounds=2)
        >>> any("head" in name and ms >= 0 for name, ms in times.items())
        True
    """

    def __init__(self, graph: FrozenGraph, *, in_order: bool = True) -> None:
        self._names = {name: full_name(spec.name) for name, spec in graph.inputs.items()}
        self._outputs = [full_name(tensor) for tensor, _ in graph.outputs.values()]
        self._graph_def = graph.graph_def
        self._inter_op_threads = 1 if in_order else 0  # 0 is TensorFlow's own choice

    def __enter__(self) -> Self:
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(self._graph_def, name="")
        # Without a GPU: what is weighed here are the CPU's kernels.
        options = v1.ConfigProto(inter_op_parallelism_threads=self._inter_op_threads, device_count={"GPU": 0})
        self._session = v1.Session(graph=graph, config=options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        del self._session
        free_graphs(self._graph_def)

    def rounds(self, inputs: Mapping[str, Any], most: int = MOST) -> int:
        """Returns how often it is worth running: as often as fits into SECONDS, within bounds."""
        self.milliseconds(inputs)
        return int(np.clip(SECONDS * 1e3 / self.milliseconds(inputs), FEWEST, most))

    def milliseconds(self, inputs: Mapping[str, Any]) -> float:
        """Runs the graph once and returns how long it took."""
        start = time.perf_counter()
        self._session.run(self._outputs, self._fed(inputs))
        return (time.perf_counter() - start) * 1e3

    def node_times(self, inputs: Mapping[str, Any], rounds: int) -> dict[str, float]:
        """Returns the median milliseconds of each node's kernel.

        What TensorFlow fuses runs under the name of the last node fused, and the others are missing.
        """
        for _ in range(WARM_UPS):
            self.milliseconds(inputs)
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
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


def conversion_times(sizes: Sequence[int], rounds: int = MOST) -> dict[str, list[float]]:
    """Returns the milliseconds that quantizing and dequantizing take, for tensors of so many elements.

    Returns: For "QuantizeV2" and "Dequantize" one figure for each size.
    """
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
            node.attr["mode"].CopyFrom(text("SCALED" if node is quantize else "MIN_COMBINED"))  # as in int8.py
        quantize.attr["round_mode"].CopyFrom(text("HALF_TO_EVEN"))
        quantize.attr["ensure_minimum_range"].CopyFrom(AttrValue(f=0.0))
    graph = FrozenGraph(
        graph_def=graph_def,
        inputs={f"x{size}": tf.TensorSpec([None], tf.float32, f"x{size}") for size in sizes},
        outputs={f"y{size}": (f"Dequantize{size}", tf.TensorSpec([None])) for size in sizes},
        name="conversions",
    )
    with TimedGraph(graph) as timed:
        times = timed.node_times({f"x{size}": np.ones(size, np.float32) for size in sizes}, rounds)
    return {op: [times[f"{op}{size}"] for size in sizes] for op in ("QuantizeV2", "Dequantize")}
