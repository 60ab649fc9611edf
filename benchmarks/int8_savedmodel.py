"""Compares int8 SavedModels of tfopt with Keras' own export, tfopt's float32, and the int8 of other runtimes.

    python benchmarks/int8_savedmodel.py --models resnet50 --runtimes keras_export tfopt_int8 onnxruntime

The other runtimes are Intel Neural Compressor (inc), LiteRT, ONNX Runtime and OpenVINO. Each quantizes the same float
SavedModel on the same calibration data. They are installed on demand, with pinned versions, in their own virtual
environments under --cache. Each runtime has its own process with one thread per core. The processes are timed in turns,
so that a change in the machine's load affects all of them. Runtimes that are faster with a static batch size get one.
tfopt_onnx and so on are tfopt's int8 in the other file formats, each in its runtime as tfopt.verify runs it.
tfopt_int8_caller_thread is tfopt's int8 artifact in a process whose environment lets the calling thread compute too.
The runtimes ..._one_thread are SavedModels in processes with one intra-op thread. "throughput" has the examples per
second of such a process that one caller for each core calls at the same time, with the smallest batch size, and those
of one caller of the process with all threads, with the largest.
The times of loading and of the first call, and the peak memory after it, are medians over fresh processes, of the
runtimes that are SavedModels. The results also hold each runtime's distance from the float model on inputs outside the
calibration data. A runtime that cannot be installed, converted or run is listed with the reason.

Results go to benchmarks/results/int8_savedmodel.json, one entry per model. Entries of other models stay. The run takes
about ten minutes per model on two cores, most of it for conversion, and ten more minutes for the installation. --work
keeps the converted artifacts: run once with --rounds 0 to convert only, then run again to measure only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from int8_artifacts import (
    CALIBRATION_EXAMPLES,
    FLOAT,
    HELD_OUT_EXAMPLES,
    ONE_THREAD,
    RUNTIMES,
    SAME_ARTIFACT,
    TENSORFLOW,
    open_process,
    prepare,
)
from int8_models import MODELS
from runtimes.peers import ConversionError

from tfopt.atomic.files import write_text
from tfopt.errors import ArtifactError
from tfopt.exporting.verification.process import RuntimeProcess, alternate
from tfopt.hardware import detect
from tfopt.timing import estimate, in_turns

RESULTS = Path(__file__).parent / "results"
OURS = "tfopt_int8"


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = tuple(name for name in MODELS if name != "tiny")
    """Which models."""
    runtimes: tuple[str, ...] = RUNTIMES
    """Runtimes to compare; keras_export is always included."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    rounds: int = 8
    """Number of timing rounds; 0 converts and does not measure."""
    cold_starts: int = 3
    """Fresh processes for the first call of each SavedModel, in turns."""
    seconds: float = 1.5
    """Timing per runtime and round, in seconds."""
    out: Path = RESULTS / "int8_savedmodel.json"
    """Path of the results file."""
    work: Path | None = None
    """Directory of converted artifacts, which are reused; None means a temporary directory."""
    cache: Path = Path("~/.cache/tfopt-benchmarks")
    """Directory of the environments of other runtimes."""


def main(options: Options) -> dict[str, Any]:
    check("model", options.models, MODELS)
    check("runtime", options.runtimes, RUNTIMES)
    needed = {FLOAT, *options.runtimes} | {SAME_ARTIFACT[name] for name in options.runtimes if name in SAME_ARTIFACT}
    runtimes = tuple(name for name in RUNTIMES if name in needed)  # an artifact before its further processes
    cache = options.cache.expanduser().absolute()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            folder = (options.work or Path(temporary)) / name
            records = prepare(MODELS[name], folder, runtimes, options.batch_sizes, cache)
            if options.rounds:
                results[name] = {"what": MODELS[name].what, **measure(folder, records, cache, options)}
                write(results, options.out)
    return results


def check(kind: str, names: Collection[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"Unknown {kind} {unknown[0]!r}. Expected some of: {', '.join(known)}.")


def measure(folder: Path, records: dict[str, dict[str, Any]], cache: Path, options: Options) -> dict[str, Any]:
    """Compares the outputs of the runtimes, then times the runtimes."""
    with np.load(folder / "held_out.npz") as arrays:
        held_out = dict(arrays)
    failed = {runtime: record["failed"] for runtime, record in records.items() if "failed" in record}
    processes: dict[str, RuntimeProcess] = {}
    outputs: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        for runtime in records:
            if runtime not in failed:
                try:
                    process = stack.enter_context(open_process(runtime, folder, cache))
                    for batch_size in sorted(options.batch_sizes):  # checks that each of them runs
                        batches = HELD_OUT_EXAMPLES // batch_size if batch_size == max(options.batch_sizes) else 1
                        (outputs[runtime],) = process.predict(
                            first(batches * batch_size, held_out), batch_size
                        ).values()
                    processes[runtime] = process
                except (ArtifactError, ConversionError) as error:
                    failed[runtime] = str(error)
        latency = [time_calls(processes, held_out, batch_size, options) for batch_size in options.batch_sizes]
        throughput = compare_throughput(processes, held_out, options)
    kept = {runtime: records[runtime] for runtime in processes}
    return {
        "cold_start": start_cold([name for name in kept if name in TENSORFLOW], folder, cache, held_out, options),
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
        "versions": {name: number for record in kept.values() for name, number in record["versions"].items()},
        "calibration_examples": CALIBRATION_EXAMPLES,
        "bytes_on_disk": {runtime: record["bytes_on_disk"] for runtime, record in kept.items()},
        "tfopt_int8_nodes": kept.get(OURS, {}).get("nodes"),
        "failed": failed,
        "latency": latency,
        "throughput": throughput,
        "against_float": {runtime: compare(outputs[FLOAT], outputs[runtime]) for runtime in kept},
    }


def start_cold(
    runtimes: list[str], folder: Path, cache: Path, held_out: dict[str, np.ndarray], options: Options
) -> dict[str, dict[str, float]]:
    """Returns the median times of loading and of the first call on one example, and the median peak of memory."""
    started: dict[str, list[dict[str, float | None]]] = {runtime: [] for runtime in runtimes}
    for _ in range(options.cold_starts):
        for runtime, figures in started.items():
            with open_process(runtime, folder, cache) as process:
                process.predict(first(1, held_out), 1)
                figures.append(process.cold_start())
    return {
        runtime: {key: round(float(np.median([each[key] for each in figures])), 1) for key in figures[0]}
        for runtime, figures in started.items()
        if figures and None not in figures[0].values()
    }


def time_calls(
    processes: dict[str, RuntimeProcess], held_out: dict[str, np.ndarray], batch_size: int, options: Options
) -> dict[str, Any]:
    inputs = first(batch_size, held_out)
    rounds = alternate(list(processes.values()), inputs, options.seconds, options.rounds)
    calls = {runtime: np.concatenate(times) for runtime, times in zip(processes, rounds, strict=True)}
    medians = {runtime: float(np.median(times)) for runtime, times in calls.items()}
    figures: dict[str, Any] = {
        "batch_size": batch_size,
        "median_ms": {runtime: round(median, 2) for runtime, median in medians.items()},
        "calls": {runtime: len(times) for runtime, times in calls.items()},
        "speed_against_keras_export": {
            runtime: round(medians[FLOAT] / median, 2) for runtime, median in medians.items()
        },
    }
    if OURS in medians:  # above 1 if tfopt is faster
        ratios = {runtime: round(median / medians[OURS], 2) for runtime, median in medians.items() if runtime != OURS}
        figures["speed_of_tfopt_int8_against"] = ratios
    return figures


def compare_throughput(
    processes: dict[str, RuntimeProcess], held_out: dict[str, np.ndarray], options: Options
) -> dict[str, dict[str, Any]]:
    """Returns the examples per second of calls at the same time on one thread each, and of large batches."""
    callers, small, large = detect().logical_cores, min(options.batch_sizes), max(options.batch_sizes)
    measured = [name for name, one in ONE_THREAD.items() if {name, one} <= processes.keys()]
    sides = []
    for name in measured:
        one_thread = processes[ONE_THREAD[name]]
        sides.append(partial(one_thread.calls_per_second, first(small, held_out), options.seconds, callers))
        sides.append(partial(processes[name].calls_per_second, first(large, held_out), options.seconds))
    rates = np.array(in_turns(sides, options.rounds)).reshape(len(measured), 2, options.rounds) * [[small], [large]]
    return {
        name: {
            "parallel_calls": callers,
            "batch_sizes": [small, large],
            "parallel_examples_per_s": round(float(np.median(parallel)), 1),
            "batch_examples_per_s": round(float(np.median(batched)), 1),
            "parallel_over_batch": round(estimate(parallel / batched).median, 2),
        }
        for name, (parallel, batched) in zip(measured, rates, strict=True)
    }


def first(count: int, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[:count] for name, array in examples.items()}


def compare(exact: np.ndarray, quantized: np.ndarray) -> dict[str, float]:
    """Returns the distance of a runtime's outputs from the outputs of Keras' own export."""
    # An output minus its mean over the inputs shows what the network distinguishes.
    varying = exact - exact.mean(axis=0)
    error = np.linalg.norm(quantized - exact)
    return {
        "relative_error": round(float(error / np.linalg.norm(exact)), 4),
        "relative_error_of_what_varies": round(float(error / np.linalg.norm(varying)), 4),
        "top1_agreement": float(np.mean(exact.argmax(axis=1) == quantized.argmax(axis=1))),
    }


def write(results: dict[str, Any], out: Path) -> None:
    """Replaces the entries of the measured models."""
    earlier = json.loads(out.read_text())["models"] if out.is_file() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps({"models": earlier | results}, indent=2) + "\n")


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
