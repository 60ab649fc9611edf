"""The accuracy cost of int8 in all nodes for trained models, and the saturation, with and without reduce_range.

    python benchmarks/reduce_range.py --models DIR
    python benchmarks/reduce_range.py --quick

- `accuracy`: models trained on the digits, in int8 with the default settings and all nodes, with reduce_range on and
  off: tfopt's builders (899 held-out digits) and models of keras.applications (450 held-out digits). Accuracies are
  those of the annotated graph, which computes with the int8 values. `points_lost` holds the mean over the trainings of
  each model, and the worst training.
- `saturation`: the same artifacts under each instruction set (ONEDNN_MAX_CPU_ISA), each in its own process. Measures
  the distance of the outputs from the outputs of the float model, relative to the float outputs.

Results go to benchmarks/results/reduce_range.json after each model.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hard_models
import keras
import numpy as np
import tensorflow as tf
import trained_digits
import tyro
from keras import layers

from tfopt.atomic.files import write_text
from tfopt.data import digits
from tfopt.exporting import ExportConfig, SavedModelProcess, export
from tfopt.hardware import detect
from tfopt.quantization import QuantizationConfig, quantize

RESULTS = Path(__file__).parent / "results"
BUILDERS = {"mlp": 25, "simple_cnn": 25, "resnet_cifar": 15, "transformer": 40}
APPLICATIONS = ("efficientnetv2b0", "mobilenetv3small", "mobilenetv2", "resnet50v2", "densenet121", "convnext", "gelu")
SETTINGS = {"full": QuantizationConfig(reduce_range=False), "reduced": QuantizationConfig(reduce_range=True)}
INSTRUCTIONS = ("DEFAULT", "AVX512_CORE", "AVX2", "SSE41")
CALIBRATION = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    models: Path | None = None
    """Directory of the trained models; models that are already there are not trained again."""
    seeds: int = 5
    """Number of trainings per model."""
    trained_only: bool = False
    """Measure only models of keras.applications that are already in the directory."""
    quick: bool = False
    """Run one epoch of the smallest model and two instruction sets as a test; write no results."""
    out: Path = RESULTS / "reduce_range.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    results: dict[str, Any] = {
        "what": "digits of scikit-learn, 899 held out for tfopt's builders and 450 for keras.applications",
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "accuracy": {},
        "saturation": {},
    }
    seeds = range(1 if options.quick else options.seeds)

    def keep() -> None:
        if not options.quick:
            options.out.parent.mkdir(exist_ok=True)
            write_text(options.out, json.dumps(results, indent=2) + "\n")

    examples = digits(test_fraction=0.5)
    for name in ["mlp"] if options.quick else BUILDERS:
        models = (builder(name, seed, options) for seed in seeds)
        results["accuracy"][name] = [
            measure(model, examples.x_train, examples.x_test, examples.y_test) for model in models
        ]
        print(name, results["accuracy"][name], flush=True)
        keep()
    held = trained_digits.data()
    for name in () if options.quick else APPLICATIONS:
        rows = [
            measure(application(name, seed, options), held.x_train, held.x_test, held.y_test)
            for seed in seeds
            if not options.trained_only or (options.models and (options.models / f"{name}_{seed}.keras").exists())
        ]
        if rows:
            results["accuracy"][name] = rows
            print(name, rows, flush=True)
            keep()
    results["points_lost"] = points_lost(results["accuracy"])
    for name, (model, x) in saturating(options, list(results["accuracy"])):
        results["saturation"][name] = saturation(model, x, INSTRUCTIONS[::2] if options.quick else INSTRUCTIONS)
        print(name, results["saturation"][name], flush=True)
        keep()
    return results


def builder(name: str, seed: int, options: Options) -> keras.Model:
    file = options.models and options.models / f"{name}_{seed}.keras"
    if file and file.exists():
        return keras.saving.load_model(file, compile=False)
    model = hard_models.trained(name, digits(test_fraction=0.5), 1 if options.quick else BUILDERS[name], seed=seed)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        model.save(file)
    return model


def application(name: str, seed: int, options: Options) -> keras.Model:
    return trained_digits.train(name, seed, options.models)


def measure(model: keras.Model, calibration: np.ndarray, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Returns the accuracy in float and int8, and the distance of the outputs relative to the float outputs."""
    exact = model.predict(x, verbose=0)
    row = {"float_accuracy": hard_models.top1_accuracy(y, exact)}
    for name, config in SETTINGS.items():
        quantized = quantize(model, config, calibration_data=calibration[:CALIBRATION])
        outputs = np.concatenate([quantized.predict(x[start : start + 150]) for start in range(0, len(x), 150)])
        row[f"{name}_accuracy"] = hard_models.top1_accuracy(y, outputs)
        row[f"{name}_error"] = relative(outputs, exact)
    return {name: round(value, 5) for name, value in row.items()}


def points_lost(accuracy: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns the accuracy points that int8 loses: mean and worst training of each model, and the mean over all."""
    lost = {}
    for name, rows in accuracy.items():
        points = {each: [100 * (row["float_accuracy"] - row[f"{each}_accuracy"]) for row in rows] for each in SETTINGS}
        lost[name] = {each: float(np.mean(values)) for each, values in points.items()}
        lost[name] |= {f"{each}_worst": max(values) for each, values in points.items()} | {"trainings": len(rows)}
    over_all = {setting: float(np.mean([each[setting] for each in lost.values()])) for setting in SETTINGS}
    costs = {"cost of reduce_range": over_all["reduced"] - over_all["full"]}
    rounded = {name: {key: round(value, 3) for key, value in each.items()} for name, each in lost.items()}
    return {"models": rounded, "all": {key: round(value, 3) for key, value in (over_all | costs).items()}}


def saturating(options: Options, measured: Collection[str]) -> Iterator[tuple[str, tuple[keras.Model, np.ndarray]]]:
    """Yields the models to run under each instruction set, with names and inputs."""
    keras.utils.set_random_seed(0)
    image = (16, 16, 64)
    x = np.random.default_rng(0).random((64, *image), dtype="float32")
    convolutions = [layers.Conv2D(64, 3, activation="relu"), layers.Conv2D(64, 3)]
    yield "two Conv2D on 16x16x64", (keras.Sequential([keras.Input(image), *convolutions]), x)
    if "resnet_cifar" in measured:
        yield "resnet_cifar", (builder("resnet_cifar", 0, options), digits(test_fraction=0.5).x_test[:64])
    for name in ("mobilenetv2", "resnet50v2"):
        if name in measured:
            yield name, (application(name, 0, options), trained_digits.data().x_test[:64])


def saturation(model: keras.Model, x: np.ndarray, limits: Sequence[str] = INSTRUCTIONS) -> dict[str, dict[str, float]]:
    """Returns the error under each instruction set, for each weight range."""
    exact, errors = model.predict(x, verbose=0), {}
    with tempfile.TemporaryDirectory() as directory:
        for name, config in SETTINGS.items():
            path = Path(directory, name)
            settings = ExportConfig(precision="int8", int8_nodes="all", quantization=config)
            export(model, path, settings, calibration_data=x)
            errors[name] = {limit: round(relative(outputs_under(limit, path, x), exact), 5) for limit in limits}
    return errors


def outputs_under(limit: str, artifact: Path, x: np.ndarray) -> np.ndarray:
    """Returns an artifact's outputs in a process whose oneDNN uses this instruction set at most."""
    with environment("ONEDNN_MAX_CPU_ISA", limit), SavedModelProcess(artifact) as process:
        (outputs,) = process.predict({next(iter(process.loaded["inputs"])): x}).values()
    return outputs


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def relative(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
