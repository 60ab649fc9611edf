"""Decides in which type the float32 products of an artifact compute, and says what a machine needs for it.

"auto" never chooses float16. It gains as much as bfloat16 on a GPU and nothing on most processors, and its values may
overflow, which bfloat16 with the range of float32 hardly can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from tfopt.errors import ConfigError
from tfopt.exporting.config import ExportConfig
from tfopt.exporting.half.rewrite import compute_in_half
from tfopt.exporting.int8.selection import WHOLE_TIE, time_ratios
from tfopt.exporting.int8.time_table import TimedGraph, feeds_of
from tfopt.graph import FrozenGraph
from tfopt.hardware import Hardware, computes_bfloat16, detect, multiplies_bfloat16
from tfopt.quantization.calibration.calibrate import computable
from tfopt.report import Change, PassReport

PAYS = 0.95  # of float32's time; half precision costs accuracy, so it must gain more than noise
CHOICE = "compute"  # the kind of the report's step with the decision, and of its note about the machine
ENDS_THE_PROCESS = (
    "ONEDNN_MAX_CPU_ISA leaves oneDNN no AVX512, and TensorFlow ends a process that multiplies bfloat16 under it"
)


def in_compute_type(
    graph: FrozenGraph,
    config: ExportConfig,
    sample: Mapping[str, np.ndarray] | None,
    *,
    beside_int8: bool = False,
    keep: Collection[str] = (),
    stored_in_int8: bool = False,
) -> tuple[FrozenGraph, str, PassReport | None]:
    """Returns a graph with its float32 products in the type that the config asks for, the type, and the report.

    The sample gives the inputs with which "auto" times the graph. A graph with products in int8 computes on the
    processor, even where there is a GPU. The products `keep` stay in float32. The report is None where float32 was
    asked for.

    Raises:
        ConfigError: bfloat16 was asked for, and TensorFlow could not compute it in this process.
    """
    if config.compute == "float32":
        return graph, "float32", None
    if config.compute == "auto":
        if stored_in_int8:
            return graph, "float32", _stays("the weights of what is not in int8 are stored in int8", graph)
        return _fastest(graph, config, sample, beside_int8, keep)
    if config.compute == "bfloat16" and not computes_bfloat16():
        raise ConfigError(
            f"compute must be a type that this process can compute in, to check the outputs. Received: "
            f"compute='bfloat16' where {ENDS_THE_PROCESS}. Unset the variable, or leave compute out."
        )
    converted, report = compute_in_half(graph, config.compute, keep)
    if not report.changed:
        if not beside_int8:
            report.warn_if_unchanged("the model has no product outside of loops" if not report.skipped else "")
        none = _stays(f"no product can compute in {config.compute}", graph)
        report = replace(report, steps=[*report.steps, *none.steps])
        return graph, "float32", report
    drawback = _drawback(config.compute, _machine(beside_int8))
    if drawback:
        detail = f"slower than float32 here, because {drawback}"
        report = replace(report, notes=[Change(name=graph.name, kind=CHOICE, detail=detail)])
    return converted, config.compute, report


def _machine(beside_int8: bool) -> Hardware:
    return replace(detect(), gpus=()) if beside_int8 else detect()


def _drawback(compute: str, hardware: Hardware) -> str:
    """Returns why this machine gains nothing from a half type; "" if it does."""
    if hardware.gpus:
        needed = (7, 0) if compute == "float16" else (8, 0)
        slow = [gpu.name for gpu in hardware.gpus if (gpu.compute_capability or (0, 0)) < needed]
        return f"{slow[0]} has no {compute} tensor cores" if slow else ""
    if compute == "float16":
        return "this processor is not known to multiply float16"
    return "" if multiplies_bfloat16() else "this processor does not multiply bfloat16, or oneDNN may not use it"


def _fastest(
    graph: FrozenGraph, config: ExportConfig, sample: Mapping[str, Any] | None, beside_int8: bool, keep: Collection[str]
) -> tuple[FrozenGraph, str, PassReport]:
    reason, converted = _drawback("bfloat16", _machine(beside_int8)), graph
    report = PassReport(name="compute in float32")
    if config.precision not in ("float32", "bfloat16", "int8"):
        reason = f"the weights are stored for precision={config.precision!r}"
    if not reason:
        converted, report = compute_in_half(graph, "bfloat16", keep)
        reason = "" if report.changed else "no product can compute in bfloat16"
    chosen, ratios = "float32", {}
    if not reason:
        ratios = _time_ratios(graph, converted, feeds_of(graph, sample, config.batch_sizes), gpu=not beside_int8)
        found = " and ".join(f"{ratio:.2f}x at batch size {size}" for size, ratio in ratios.items())
        rest = " for what is not in int8" if beside_int8 else ""
        reason = f"bfloat16{rest} takes {found} of float32's time on this machine"
        if pays_off(list(ratios.values())):
            chosen = "bfloat16"
    if chosen == "float32":
        return graph, chosen, _stays(reason, graph)
    step = Change(name=graph.name, kind=CHOICE, detail=f"{chosen}: {reason}")
    return converted, chosen, replace(report, steps=[step])


def _stays(reason: str, graph: FrozenGraph) -> PassReport:
    step = Change(name=graph.name, kind=CHOICE, detail=f"float32: {reason}")
    return PassReport(name="compute in float32", steps=[step])


def _time_ratios(
    graph: FrozenGraph, converted: FrozenGraph, feeds: Mapping[int, Mapping[str, Any]], *, gpu: bool
) -> dict[int, float]:
    with computable(), ExitStack() as stack:
        single, half = (stack.enter_context(TimedGraph(each, gpu=gpu)) for each in (graph, converted))
        (ratios,) = time_ratios(single, [half], feeds)
    return dict(zip(feeds, ratios, strict=True))


def pays_off(ratios: list[float]) -> bool:
    """Whether half precision is faster on average, and slower at no batch size. The ratios are to float32's time.

    Example:
        >>> pays_off([0.6, 0.4]), pays_off([1.1, 0.4]), pays_off([0.98, 0.97])
        (True, False, False)
    """
    return max(ratios) <= WHOLE_TIE and sum(ratios) / len(ratios) <= PAYS
