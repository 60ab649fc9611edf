"""The accuracy cost of int8 on the digits, the effect of each technique, and the result of the accuracy budget.

    python benchmarks/quantization_accuracy.py

Four small models are trained once on half of the digits. There are three measurements:

- `builders`: the accuracy cost of static int8 with the default settings, for each of tfopt's builders.
- `hard`: models that are made hard to quantize, with the same float outputs (benchmarks/hard_models.py). Measures the
  cost of min-max calibration alone, and the effect of the matching technique.
- `budget`: the same kind of models, with min-max calibration alone and max_accuracy_drop=0.005. Counts the float nodes
  that tfopt needs, and those that an exhaustive greedy search needs, which measures every node again in each step.
  Measures the accuracy on examples that neither search has used.

Accuracies are those of the annotated graph, which computes with the int8 values. Results go to
benchmarks/results/quantization_accuracy.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hard_models
import keras
import numpy as np
import tensorflow as tf
import tyro

from tfopt.atomic.files import write_text
from tfopt.data import Examples, digits
from tfopt.hardware import detect
from tfopt.quantization import QuantizationConfig, QuantizedModel, quantize
from tfopt.quantization.post_training.accuracy_budget import AccuracyEvaluator, Trial

RESULTS = Path(__file__).parent / "results"
EPOCHS = {"mlp": 25, "simple_cnn": 25, "resnet_cifar": 15, "transformer": 40}
MIN_MAX = QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)
DROP = 0.005


@dataclass(frozen=True, kw_only=True)
class Options:
    epochs: int | None = None
    """Number of training epochs for every model, for a test run."""
    models: Path | None = None
    """Directory of the trained models; models that are already there are not trained again."""
    out: Path = RESULTS / "quantization_accuracy.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    examples = digits(test_fraction=0.5)
    models = {name: model(name, examples, options) for name in EPOCHS}
    results = {
        "what": "digits of scikit-learn, 898 to train on and 899 held out",
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "builders": {name: builder(trained, examples) for name, trained in models.items()},
        "hard": hard(models, examples),
        "budget": budgets(models, examples),
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def model(name: str, examples: Examples, options: Options) -> keras.Model:
    file = options.models and options.models / f"{name}.keras"
    if file and file.exists():
        return keras.saving.load_model(file)
    trained = hard_models.trained(name, examples, options.epochs or EPOCHS[name])
    if file:
        trained.save(file)
    return trained


def builder(model: keras.Model, examples: Examples) -> dict[str, float]:
    """Returns the accuracy in float and int8 and the distance of the outputs, for each technique."""
    exact = model.predict(examples.x_test, verbose=0)
    settings = {
        "min_max": MIN_MAX,
        "bias_correction": replace(MIN_MAX, bias_correction=True),
        "adaptive_rounding": replace(MIN_MAX, rounding="adaptive"),
        "default": QuantizationConfig(),
    }
    results = {"float_accuracy": hard_models.top1_accuracy(examples.y_test, exact)}
    for name, config in settings.items():
        outputs = quantize(model, config, calibration_data=examples.x_train).predict(examples.x_test)
        results |= {
            f"{name}_accuracy": hard_models.top1_accuracy(examples.y_test, outputs),
            f"{name}_error": round(float(np.linalg.norm(outputs - exact) / np.linalg.norm(exact)), 5),
        }
    return {name: round(value, 5) for name, value in results.items()}


def hard(models: dict[str, keras.Model], examples: Examples) -> dict[str, dict[str, float]]:
    """Returns the accuracy of each hard model in float, with min-max alone, and with the matching technique."""
    mlp, hot_train = hard_models.hot_pixels(models["mlp"], examples.x_train)
    _, hot_test = hard_models.hot_pixels(models["mlp"], examples.x_test)
    equalization = replace(MIN_MAX, equalization=True)
    cases: dict[str, tuple[keras.Model, QuantizationConfig, np.ndarray, np.ndarray]] = {
        "simple_cnn, channels four decades apart: equalization": (
            hard_models.wide_channels(models["simple_cnn"]), equalization, examples.x_train, examples.x_test
        ),
        "resnet_cifar, channels four decades apart: equalization": (
            hard_models.wide_blocks(models["resnet_cifar"]), equalization, examples.x_train, examples.x_test
        ),
        "transformer, two channels 100 times as large: smooth_quant": (
            hard_models.outlier_channels(models["transformer"]),
            replace(MIN_MAX, smooth_quant=0.5),
            examples.x_train,
            examples.x_test,
        ),
        "mlp, a pixel 1000 times as bright: percentile": (
            mlp, replace(MIN_MAX, observer="percentile", percentile=99.9), hot_train, hot_test
        ),
    }  # fmt: skip
    results = {}
    for name, (model, config, train, test) in cases.items():
        accuracies = {"float": hard_models.top1_accuracy(examples.y_test, model.predict(test, verbose=0))}
        for label, setting in {"min_max": MIN_MAX, "recovered": config, "default": QuantizationConfig()}.items():
            quantized = quantize(model, setting, calibration_data=train)
            accuracies[label] = hard_models.top1_accuracy(examples.y_test, quantized.predict(test))
        results[name] = {label: round(value, 5) for label, value in accuracies.items()}
    return results


def budget_cases(models: dict[str, keras.Model]) -> dict[str, keras.Model]:
    """Returns models that lose more than the budget in int8 with min-max alone, each because of several nodes."""
    return {
        "simple_cnn": hard_models.wide_channels(models["simple_cnn"], writers=("conv2", "dense2")),
        "resnet_cifar": hard_models.wide_blocks(models["resnet_cifar"]),
        "transformer": hard_models.outlier_channels(models["transformer"], 1000.0, ("norm1a", "norm1b", "norm2a")),
    }


def budgets(models: dict[str, keras.Model], examples: Examples) -> dict[str, dict[str, Any]]:
    half = len(examples.x_test) // 2
    evaluation = several(examples.x_test[:half], examples.y_test[:half])
    held_out = several(examples.x_test[half:], examples.y_test[half:])
    config = replace(MIN_MAX, max_accuracy_drop=DROP)
    results = {}
    for name, model in budget_cases(models).items():
        kept = quantize(model, config, calibration_data=examples.x_train, evaluation_data=evaluation)
        plain = quantize(model, MIN_MAX, calibration_data=examples.x_train)
        trials = trials_of(plain, evaluation)
        floor = trials.score(trials.names).value - DROP
        results[name] = {
            "nodes": len(trials.names),
            "left_float": len(kept.report.skipped) - len(plain.report.skipped),
            "left_float_by_greedy": len(greedy(trials.names, trials.score, floor)),
            "evaluation": {key: round(value, 5) for key, value in kept.report.metrics.items()},
            "held_out": {
                key: round(hard_models.top1_accuracy(held_out[1], predict(held_out[0])), 5)
                for key, predict in {
                    "float": lambda x, model=model: model.predict(x, verbose=0),
                    "int8": plain.predict,
                    "kept": kept.predict,
                }.items()
            },
        }
    return results


def several(images: np.ndarray, labels: np.ndarray, times: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns each image at several positions, so that half a point of accuracy is more than one or two examples."""
    moved = [hard_models.shifted(images, 2, seed=1000 + number) for number in range(times)]
    return np.concatenate(moved), np.tile(labels, times)


def trials_of(quantized: QuantizedModel, evaluation: tuple[np.ndarray, np.ndarray]) -> AccuracyEvaluator:
    inputs, labels = evaluation
    batches = [quantized.float_graph.feed(inputs[start : start + 256]) for start in range(0, len(inputs), 256)]
    left_float = {skip.name: skip.reason for skip in quantized.report.skipped}
    graph, ranges, adjustments = quantized.float_graph, quantized.ranges, quantized.adjustments
    return AccuracyEvaluator(graph, left_float, ranges, adjustments, batches, labels, "accuracy", quantized.weight_grid)


def greedy(names: Collection[str], score: Callable[[Collection[str]], Trial], floor: float) -> list[str]:
    """Returns the float nodes of a greedy search. Each step measures all nodes and moves the best one to float."""
    chosen: list[str] = []
    while score(chosen).value < floor - 1e-9:
        tried = {name: score([*chosen, name]) for name in names if name not in chosen}
        chosen.append(max(tried, key=lambda name: (tried[name].value, -tried[name].error)))
    return chosen


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
