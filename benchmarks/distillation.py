"""Measures what a small student gains from a teacher, on real data, for several seeds.

    python benchmarks/distillation.py --seeds 5

For each seed a network is trained on the digits: the teacher. A student of a small share of its parameters is trained
twice from the same weights, for as long: on the labels alone, and with the teacher. The scores are accuracies on the
test examples. Results go to benchmarks/results/distillation.json. A seed takes two minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
SHAPE, CLASSES = (32, 32, 1), 10
TEACHER = {"filters": [32, 64, 64], "kernel_size": 3, "dropout": 0.3}
STUDENTS = {
    "small": {"filters": [8, 16, 16], "kernel_size": 3, "units": [32]},
    "tiny": {"filters": [4, 4, 8], "kernel_size": 3, "units": [8]},
}
AUGMENT = tfopt.data.AugmentConfig(crop=4)


@dataclass(frozen=True, kw_only=True)
class Options:
    seeds: int = 5
    """Number of seeds."""
    students: tuple[str, ...] = tuple(STUDENTS)
    """Which students."""
    epochs: int = 20
    """Epochs of every training."""
    temperature: float = 3.0
    """Temperature of the distillation."""
    weight: float = 0.5
    """Share of the teacher in the loss."""
    out: Path = RESULTS / "distillation.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    examples = tfopt.data.DataConfig(source="digits").load()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.students}
    for seed in range(options.seeds):
        teacher, score = train(seed, TEACHER, examples, options)
        for name in options.students:
            found = {"seed": seed, "teacher": score, "teacher_parameters": teacher.count_params()}
            for kind, given in (("alone", None), ("distilled", teacher)):
                student, found[kind] = train(seed + 100, STUDENTS[name], examples, options, given)
            found["parameters"] = student.count_params()
            runs[name].append(found)
            print(name, found, flush=True)
    results = {
        "device": f"{detect().cpu_model}, {detect().logical_cores} cores",
        "settings": {each: getattr(options, each) for each in ("epochs", "temperature", "weight")},
        "students": {name: summary(found) for name, found in runs.items()},
    }
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def train(
    seed: int, arguments: dict[str, Any], examples: Any, options: Options, teacher: keras.Model | None = None
) -> tuple[keras.Model, float]:
    """Returns a network that was trained on the digits, and its accuracy on the test examples."""
    keras.utils.set_random_seed(seed)
    config = tfopt.TrainingConfig(
        precision="float32", global_batch_size=32, learning_rate=2e-3, epochs=options.epochs, seed=seed
    )
    decided = tfopt.plan(config)
    model = tfopt.models.simple_cnn(SHAPE, CLASSES, **arguments)
    if teacher is not None:
        tfopt.distill(model, teacher, tfopt.DistillationConfig(temperature=options.temperature, weight=options.weight))
    steps = -(-examples.size("train") // config.global_batch_size)
    tfopt.compile(
        model,
        decided,
        optimizer=decided.optimizer(steps_per_epoch=steps),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    augmentation = tfopt.data.Augmentation(AUGMENT, outputs=CLASSES)
    model.fit(decided.pipeline(examples, augment=augmentation), epochs=options.epochs, verbose=0)
    return model, float(
        model.evaluate(decided.pipeline(examples, training=False), verbose=0, return_dict=True)["accuracy"]
    )


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {kind: statistics.median(run[kind] for run in runs) for kind in ("teacher", "alone", "distilled")}
    gains = [100 * (run["distilled"] - run["alone"]) for run in runs]
    return {
        "share_of_parameters": round(runs[0]["parameters"] / runs[0]["teacher_parameters"], 4),
        "median_accuracy": {kind: round(value, 4) for kind, value in medians.items()},
        "gain_points": {
            "median": round(float(np.median(gains)), 2),
            "least": round(min(gains), 2),
            "most": round(max(gains), 2),
        },
        "runs": runs,
    }


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__))["students"], indent=2))
