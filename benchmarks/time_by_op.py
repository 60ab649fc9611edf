"""Times the kernels of exported graphs by kind: where a call spends its time, and what bfloat16 beside int8 saves.

    python benchmarks/time_by_op.py --models efficientnetv2_b0 vit_small

The graphs are those that `tfopt.export` writes: in float32 and int8, each also with compute="bfloat16" if the processor
multiplies that. TensorFlow's trace gives the time of each kernel, one after the other in one inter-op thread and with
all intra-op threads, in one process. Whole calls are timed without the trace, in turns with int8, and `times_of_int8`
is the median of the ratios. Results go to benchmarks/results/time_by_op.json, one entry for each model. Entries of
other models stay.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from int8_models import MODELS, make
from int8_savedmodel import check, write

from tfopt import ExportConfig, timing
from tfopt.exporting.half.rewrite import compute_in_half
from tfopt.exporting.int8.time_table import TimedGraph
from tfopt.exporting.lowering import lower
from tfopt.graph import FrozenGraph
from tfopt.hardware import detect, multiplies_bfloat16

RESULTS = Path(__file__).parent / "results"
CALIBRATION_EXAMPLES = 32
KINDS = {
    "products in int8": ("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"),
    "depthwise convolutions": ("DepthwiseConv2dNative", "FusedDepthwiseConv2dNative"),
    "other products": ("Conv2D", "FusedConv2D", "MatMul", "FusedMatMul", "BatchMatMulV2", "FusedBatchMatMulV2"),
    "activations": ("Swish", "Sigmoid", "Tanh", "Erf", "Erfc", "Relu", "Softmax"),
    "conversions": ("QuantizeV2", "Dequantize", "Cast"),
    "norms and means": ("LayerNorm", "Mean", "Rsqrt", "SquaredDifference"),
}
REST = "the rest"


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("efficientnetv2_b0", "vit_small", "bert_base")
    """Which models."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    rounds: int = 15
    """Number of turns for whole calls."""
    out: Path = RESULTS / "time_by_op.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    check("model", options.models, MODELS)
    results = {}
    for name in options.models:
        results[name] = {"what": MODELS[name].what, **measure(name, options)}
        write({name: results[name]}, options.out)
    return results


def measure(name: str, options: Options) -> dict[str, Any]:
    graphs = make_graphs(name)
    (source,) = graphs["int8"].inputs
    batches = []
    with ExitStack() as stack:
        timed = {kind: stack.enter_context(TimedGraph(graph)) for kind, graph in graphs.items()}
        for batch_size in options.batch_sizes:
            inputs = {source: MODELS[name].inputs(batch_size, 1)}
            by_kind = {kind: by_op(each.kernel_times(inputs)) for kind, each in timed.items()}
            turns = timing.in_turns([partial(each.milliseconds, inputs) for each in timed.values()], options.rounds)
            whole = dict(zip(timed, turns, strict=True))
            batches.append(
                {
                    "batch_size": batch_size,
                    "call_ms": {kind: round(float(np.median(times)), 2) for kind, times in whole.items()},
                    "times_of_int8": {
                        kind: round(float(np.median(np.divide(times, whole["int8"]))), 3)
                        for kind, times in whole.items()
                    },
                    "kernel_ms": by_kind,
                }
            )
    return {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
        "batches": batches,
    }


def make_graphs(name: str) -> dict[str, FrozenGraph]:
    """Returns the graphs of a model in each precision. The products of "int8+bfloat16" are those of "int8"."""
    model, examples = make(MODELS[name]), MODELS[name].inputs(CALIBRATION_EXAMPLES, 0)
    served = {
        precision: lower(model, ExportConfig(precision=precision), examples, None).graphs["serving_default"]
        for precision in ("float32", "int8")
    }
    if not multiplies_bfloat16():
        return served
    halves = {kind: compute_in_half(graph, "bfloat16")[0] for kind, graph in served.items()}
    return {**served, "bfloat16": halves["float32"], "int8+bfloat16": halves["int8"]}


def by_op(kernels: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Returns the milliseconds of each kind of kernel, and of each op within it."""
    kind_of = {op: kind for kind, ops in KINDS.items() for op in ops}
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (_, op), ms in kernels.items():
        plain = op if op in kind_of else op.removeprefix("_").removeprefix("Mkl").removeprefix("Native")
        found[kind_of.get(plain, REST)][op] += ms
    return {
        kind: {"ms": round(sum(ops.values()), 3), "ops": {op: round(ms, 3) for op, ms in ops.items() if ms >= 0.01}}
        for kind in (*KINDS, REST)
        if (ops := found.get(kind))
    }


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
