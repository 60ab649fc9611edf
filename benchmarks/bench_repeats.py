"""How often `tfopt.benchmark` names the same fastest model when it is repeated.

    python benchmarks/bench_repeats.py [--repeats 10]

MobileNetV2 with random weights, in five forms: tfopt's float32 and int8 SavedModels, its float32 and int8 ONNX files,
and the .keras file. Each repetition starts all processes anew. Results go to benchmarks/results/bench_repeats.json: for
each batch size what every repetition named, None where it found no clear winner, the times of the best two models, and
how often the most frequent name came. The run takes some ten minutes on two cores.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from onnxruntime import __version__ as onnxruntime_version

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    repeats: int = 10
    """Number of repetitions."""
    size: int = 96
    """Height and width of the images."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    threads: tuple[int, ...] = (0, 1)
    """Numbers of threads."""
    seconds: float = 0.15
    """Timing per model and round, in seconds."""
    out: Path = RESULTS / "bench_repeats.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        paths = write_models(Path(directory), options.size)
        reports = []
        for _ in range(options.repeats):
            reports.append(
                tfopt.benchmark(
                    paths, batch_sizes=options.batch_sizes, threads=options.threads, seconds=options.seconds
                )
            )
            print(reports[-1], flush=True)
    results = {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "onnxruntime": onnxruntime_version,
        "repeats": options.repeats,
        "image_size": options.size,
        "batches": {str(size): of_batch(reports, place) for place, size in enumerate(options.batch_sizes)},
    }
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def of_batch(reports: list[tfopt.BenchmarkReport], place: int) -> dict[str, Any]:
    """Returns what the reports name at one place of their batch sizes."""
    named = [report.fastest[place].model for report in reports]
    size = reports[0].batch_sizes[place]
    medians = [sorted(each.best(size).latency_ms_median for each in report.measured)[:2] for report in reports]
    return {"named": named, "best_two_ms": medians, "agree": Counter(named).most_common(1)[0][1]}


def write_models(directory: Path, size: int) -> list[Path]:
    keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).random((32, size, size, 3), dtype="float32")
    model = keras.applications.MobileNetV2((size, size, 3), weights=None, classes=10)
    model.save(directory / "mobilenet_v2.keras")
    for form in ("saved_model", "onnx"):
        for precision in ("float32", "int8"):
            config = tfopt.ExportConfig(format=form, precision=precision)
            tfopt.export(model, directory / f"{form}_{precision}", config, calibration_data=images)
    return sorted(directory.iterdir())


if __name__ == "__main__":
    main(tyro.cli(Options))
