"""Times exported models after structured pruning against their dense parents.

    python benchmarks/structured_pruning.py --models resnet50

Each model is shrunk to half of its multiply-adds, and to half of its time of a call at batch size 8. Parent and shrunk
models are exported in float32, the first one also in int8. Keras' own export of the parent is timed as well. Each
artifact runs in a process of its own with nothing but TensorFlow, and the processes are timed in turns. The weights are
random: the time of a call does not depend on them. docs/pruning.md tells what shrinking costs in accuracy.

Results go to benchmarks/results/structured_pruning.json, one entry per model. Entries of other models stay. A model
takes three to eight minutes on two cores. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
CALIBRATION_EXAMPLES = 32
LATENCY_BATCH = 8

MODELS: dict[str, Callable[[], keras.Model]] = {
    "resnet50": lambda: tfopt.models.resnet50((224, 224, 3), 1000),
    "mobilenet_v2": lambda: tfopt.models.mobilenet_v2((224, 224, 3), 1000),
    "vit": lambda: tfopt.models.vit((224, 224, 3), 1000, width=384, heads=6),
    "text_encoder": lambda: tfopt.models.text_encoder((128,), 4, width=512, depth=4, heads=8, units=2048),
    "tiny": lambda: tfopt.models.resnet_cifar((32, 32, 3), 10, depth=8, width=32),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = tuple(name for name in MODELS if name != "tiny")
    """Which models."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    rounds: int = 12
    """Number of timing rounds."""
    seconds: float = 1.0
    """Timing per artifact and round, in seconds."""
    out: Path = RESULTS / "structured_pruning.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.models:
        keras.utils.set_random_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(MODELS[name](), Path(folder), options)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
        print(name, json.dumps(results[name]["latency"], indent=2))
    return results


def measure(model: keras.Model, folder: Path, options: Options) -> dict[str, Any]:
    """Shrinks and exports a model, and times the artifacts in turns."""
    half = tfopt.shrink(model, tfopt.StructuredPruningConfig(target_flops=0.5, round_to=8))
    timed = tfopt.shrink(model, tfopt.StructuredPruningConfig(target_latency=0.5, round_to=8, batch_size=LATENCY_BATCH))
    assert half.model is not None
    assert timed.model is not None
    data = inputs_of(model, CALIBRATION_EXAMPLES)
    artifacts = {name: folder / name for name in ("keras_export", "dense", "shrunk", "shrunk_int8", "half_latency")}
    model.export(artifacts["keras_export"], verbose=False)
    for name, each in (("dense", model), ("shrunk", half.model), ("half_latency", timed.model)):
        tfopt.export(each, artifacts[name], tfopt.ExportConfig(precision="float32"))
    int8 = tfopt.ExportConfig(precision="int8")
    tfopt.export(half.model, artifacts["shrunk_int8"], int8, calibration_data=data)
    with ExitStack() as stack:
        processes = {name: stack.enter_context(SavedModelProcess(path)) for name, path in artifacts.items()}
        latency = [time_calls(processes, data, size, options) for size in options.batch_sizes]
    metrics = half.report.metrics
    return {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "share_of_flops": round(metrics["multiply_adds"] / metrics["multiply_adds_before"], 4),
        "share_of_parameters": round(metrics["parameters"] / metrics["parameters_before"], 4),
        "bytes_on_disk": {
            name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            for name, path in artifacts.items()
        },
        "latency_target": {
            "asked": 0.5,
            "batch_size": LATENCY_BATCH,
            "while_shrinking": round(timed.report.metrics["latency_ms"] / timed.report.metrics["latency_ms_before"], 4),
        },
        "latency": latency,
    }


def inputs_of(model: keras.Model, count: int) -> np.ndarray:
    """Returns random images, or tokens."""
    (tensor,) = model.inputs
    shape = (count, *tensor.shape[1:])
    random = np.random.default_rng(0)
    return random.integers(1, 1000, shape).astype("int32") if "int" in tensor.dtype else random.random(shape, "float32")


def time_calls(
    processes: dict[str, SavedModelProcess], data: np.ndarray, batch_size: int, options: Options
) -> dict[str, Any]:
    """Returns medians, and for each artifact its speed against the dense parent and against Keras' export."""
    for process in processes.values():
        (own,) = process.loaded["inputs"]
        process.renamed = {"inputs": own}
    rounds = alternate(list(processes.values()), {"inputs": data[:batch_size]}, options.seconds, options.rounds)
    turns = {name: np.array([np.median(calls) for calls in each]) for name, each in zip(processes, rounds, strict=True)}

    def speed(name: str, baseline: str) -> dict[str, float]:
        ratios = turns[baseline] / turns[name]
        return {
            "median": round(float(np.median(ratios)), 3),
            "low": round(float(ratios.min()), 3),
            "high": round(float(ratios.max()), 3),
        }

    return {
        "batch_size": batch_size,
        "median_ms": {name: round(float(np.median(each)), 3) for name, each in turns.items()},
        "speed_against_dense": {name: speed(name, "dense") for name in turns if name not in ("dense", "keras_export")},
        "speed_against_keras_export": {name: speed(name, "keras_export") for name in turns if name != "keras_export"},
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
