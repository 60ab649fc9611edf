"""Times float32 artifacts of tfopt against the same with products in bfloat16 or float16.

    python benchmarks/half_precision.py --models resnet50 bert_base efficientnetv2_b0

Both artifacts of a model are timed in processes of their own, in turns. Biases of zeros become small random numbers:
TensorFlow drops a bias of zeros, and does not find the fusion of a product with GELU then. Results go to
benchmarks/results/half_precision.json, one entry for each model. Entries of other models stay.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from int8_models import MODELS, make
from int8_savedmodel import check, compare, first, write

import tfopt
from tfopt.exporting import time_in_turns
from tfopt.exporting.verification.process import SavedModelProcess
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
EXAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("resnet50", "efficientnetv2_b0", "bert_base", "vit_small")
    """Which models."""
    compute: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16",)
    """Types of the products."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    rounds: int = 8
    """Number of timing rounds."""
    seconds: float = 1.5
    """Timing per artifact and round, in seconds."""
    out: Path = RESULTS / "half_precision.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    check("model", options.models, MODELS)
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = {"what": MODELS[name].what, **measure(name, Path(folder), options)}
        write({name: results[name]}, options.out)
    return results


def measure(name: str, folder: Path, options: Options) -> dict[str, Any]:
    model = make(MODELS[name])
    generator = np.random.default_rng(0)
    for variable in model.trainable_variables:
        if not np.any(variable.numpy()):
            variable.assign(0.02 * generator.normal(size=variable.shape))
    inputs = {model.inputs[0].name: MODELS[name].inputs(EXAMPLES, 1)}
    kinds = ("float32", *options.compute)
    artifacts = {kind: tfopt.export(model, folder / kind, tfopt.ExportConfig(compute=kind)) for kind in kinds}
    outputs = {kind: predict(folder / kind, inputs) for kind in kinds}
    latency = []
    for batch_size in options.batch_sizes:
        batch = first(batch_size, inputs)
        rounds = time_in_turns([folder / kind for kind in kinds], batch, options.seconds, options.rounds)
        medians = [float(np.median(times)) for times in rounds]
        latency.append(
            {
                "batch_size": batch_size,
                "median_ms": dict(zip(kinds, (round(median, 2) for median in medians), strict=True)),
                "speed_against_float32": {
                    kind: round(medians[0] / median, 2) for kind, median in zip(kinds, medians, strict=True)
                },
            }
        )
    return {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
        "bytes_on_disk": {kind: artifact.bytes_on_disk for kind, artifact in artifacts.items()},
        "conversions": {kind: int(artifacts[kind].report.metrics["conversions"]) for kind in options.compute},
        "latency": latency,
        "against_float32": {kind: compare(outputs["float32"], outputs[kind]) for kind in options.compute},
    }


def predict(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with SavedModelProcess(path) as process:
        (outputs,) = process.predict(inputs, 8).values()
    return outputs


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
