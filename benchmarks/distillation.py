"""Measures what a student gains from a teacher, and what a cached teacher saves, on real data for several seeds.

    python benchmarks/distillation.py --seeds 5

Every row compares two trainings from the same weights, for as many steps, by their accuracy on the test digits:

    small, tiny    a student of a small share of the teacher's parameters: on all labels, and beside its teacher
    few labels     teacher and student have 100 labels. Alone, the student trains on them; with the teacher, it learns
                   from the teacher's outputs for all training images, and from no label
    healed         a ResNet that was shrunk to a quarter of its multiply-adds: healed by labels, and beside its parent
    cached         processor seconds of an epoch with the live teacher and with its outputs from disk

Results go to benchmarks/results/distillation.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
SHAPE, CLASSES, BATCH = (16, 16, 1), 10, 32
TEACHER = {"filters": [32, 64], "kernel_size": 3, "dropout": 0.3}
STUDENTS = {
    "small": {"filters": [8, 16], "kernel_size": 3, "units": [32]},
    "tiny": {"filters": [4, 6], "kernel_size": 3, "units": [8]},
}
FEW = 100
AUGMENT = tfopt.data.AugmentConfig(crop=2)
Row = Literal["small", "tiny", "few labels", "healed", "cached"]


@dataclass(frozen=True, kw_only=True)
class Options:
    seeds: int = 5
    """Number of seeds."""
    rows: tuple[Row, ...] = ("small", "tiny", "few labels", "healed", "cached")
    """What is measured. The others stay in the results file as they are."""
    epochs: int = 30
    """Epochs of every training, of all training images. Fewer images are repeated for as many steps."""
    healing_epochs: int = 4
    """Epochs after the shrink."""
    temperature: float = 2.0
    """Temperature of the distillation."""
    weight: float = 0.7
    """Share of the teacher in the loss, where there are labels."""
    rounds: int = 7
    """Rounds of the timing."""
    out: Path = RESULTS / "distillation.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    digits = tfopt.data.digits(image_size=SHAPE[0])
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in options.rows if row != "cached"}
    names = ("epochs", "healing_epochs", "temperature", "weight")
    settings = {each: getattr(options, each) for each in names}
    results = json.loads(options.out.read_text()) if options.out.is_file() else {"rows": {}}
    results = {**results, "device": f"{detect().cpu_model}, {detect().logical_cores} cores"}
    if "cached" in options.rows:
        results["cached"] = cached(digits, options)
        print(results["cached"], flush=True)
        write(options.out, results)
    for seed in range(options.seeds):
        teacher = None
        if {"small", "tiny"} & runs.keys():
            teacher = trained(cnn(seed, **TEACHER), seed, digits, options)
        for row, found in runs.items():
            if row in STUDENTS:
                found.append(students(seed, STUDENTS[row], teacher, digits, options))
            else:
                found.append((few_labels if row == "few labels" else healed)(seed, digits, options))
            print(row, found[-1], flush=True)
            results["rows"][row] = {**summary(found), "seeds": len(found), "settings": settings}
        write(options.out, results)  # what is there if it is stopped
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    write_text(path, json.dumps(results, indent=2) + "\n")


def students(seed: int, arguments: dict[str, Any], teacher: Any, digits: Any, options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": seed, "teacher": accuracy(teacher, digits)}
    for kind, given in (("alone", None), ("taught", teacher)):
        student = trained(cnn(seed + 100, **arguments), seed, digits, options, given)
        found[kind] = accuracy(student, digits)
    return {**found, "share_of_parameters": student.count_params() / teacher.count_params()}


def few_labels(seed: int, digits: Any, options: Options) -> dict[str, Any]:
    few = replace(digits, train=digits.train.shuffle(2000, seed, reshuffle_each_iteration=False).take(FEW))
    teacher = trained(cnn(seed, **TEACHER), seed, few, options, steps_of=digits)
    found: dict[str, Any] = {"seed": seed, "teacher": accuracy(teacher, digits)}
    for kind, data, given in (("alone", few, None), ("taught", digits, teacher)):
        student = cnn(seed + 100, **STUDENTS["small"])
        trained(student, seed, data, options, given, steps_of=digits, labels=given is None)
        found[kind] = accuracy(student, digits)
    return {**found, "share_of_parameters": student.count_params() / teacher.count_params()}


def healed(seed: int, digits: Any, options: Options) -> dict[str, Any]:
    keras.utils.set_random_seed(seed)
    parent = tfopt.models.resnet_cifar(SHAPE, CLASSES, depth=8, norm_momentum=0.9)
    trained(parent, seed, digits, options)
    found: dict[str, Any] = {"seed": seed, "teacher": accuracy(parent, digits)}
    shrinking = tfopt.StructuredPruningConfig(target_flops=0.25)
    healing = replace(options, epochs=options.healing_epochs)
    for kind, given in (("alone", None), ("taught", parent)):
        smaller = tfopt.shrink(parent, shrinking).model
        found["shrunk"] = accuracy(smaller, digits)
        found[kind] = accuracy(trained(smaller, seed, digits, healing, given), digits)
    return {**found, "share_of_parameters": smaller.count_params() / parent.count_params()}


def cnn(seed: int, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return tfopt.models.simple_cnn(SHAPE, CLASSES, **arguments)


def trained(
    model: keras.Model,
    seed: int,
    examples: Any,
    options: Options,
    teacher: keras.Model | None = None,
    *,
    steps_of: Any = None,
    labels: bool = True,
) -> keras.Model:
    """Trains a model on augmented examples, for as many steps as the epochs of `steps_of` have."""
    keras.utils.set_random_seed(seed)
    decided = tfopt.plan(
        tfopt.TrainingConfig(
            precision="float32",
            global_batch_size=BATCH,
            learning_rate=2e-3,
            epochs=options.epochs,
            seed=seed,
            steps_per_epoch=-(-(steps_of or examples).size("train") // BATCH),
        )
    )
    if teacher is not None:
        weight = options.weight if labels else 1.0
        tfopt.distill(model, teacher, tfopt.DistillationConfig(temperature=options.temperature, weight=weight))
    steps = decided.config.steps_per_epoch
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if labels else None
    tfopt.compile(model, decided, optimizer=decided.optimizer(steps_per_epoch=steps), loss=loss)
    augment = tfopt.data.Augmentation(AUGMENT, outputs=CLASSES)
    batches = decided.pipeline(examples, augment=augment, repeat=True)
    model.fit(batches, epochs=options.epochs, steps_per_epoch=steps, verbose=0)
    return model


def accuracy(model: keras.Model, examples: Any) -> float:
    outputs = model.predict(examples.x_test, batch_size=256, verbose=0)
    return float(np.mean(np.argmax(outputs, -1) == examples.y_test))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [each for each in ("teacher", "shrunk", "alone", "taught") if each in runs[0]]
    gains = [100 * (run["taught"] - run["alone"]) for run in runs]
    return {
        "share_of_parameters": round(statistics.median(run["share_of_parameters"] for run in runs), 4),
        "median_accuracy": {kind: round(statistics.median(run[kind] for run in runs), 4) for kind in kinds},
        "gain_points": {
            "median": round(statistics.median(gains), 2),
            "least": round(min(gains), 2),
            "most": round(max(gains), 2),
        },
        "runs": runs,
    }


def cached(digits: Any, options: Options) -> dict[str, Any]:
    """Returns the processor seconds of an epoch without a teacher, with a large one, and with its outputs from disk."""
    teacher = tfopt.models.resnet_cifar(SHAPE, CLASSES, depth=20)
    with tempfile.TemporaryDirectory() as directory:
        stored = tfopt.cache_teacher(teacher, digits, Path(directory) / "teacher")
        sides = {
            "alone": epoch(digits, None),
            "live": epoch(digits, teacher),
            "cached": epoch(stored.examples, stored),
        }
        turns = dict(zip(sides, in_turns(list(sides.values()), most=options.rounds), strict=True))
    medians = {side: statistics.median(seconds) for side, seconds in turns.items()}
    ratios = [live / quick for live, quick in zip(turns["live"], turns["cached"], strict=True)]
    return {
        "processor_seconds_of_epoch": {side: round(value, 3) for side, value in medians.items()},
        "teacher_share_of_step": round(1 - medians["alone"] / medians["live"], 3),
        "speedup": round(statistics.median(ratios), 2),
        "report": str(stored.report),
        "rounds": options.rounds,
    }


def epoch(examples: Any, teacher: Any) -> Callable[[], float]:
    """Returns a function that trains a student for an epoch and returns the processor seconds."""
    student = cnn(1, **STUDENTS["tiny"])
    decided = tfopt.plan(tfopt.TrainingConfig(precision="float32", global_batch_size=BATCH))
    if teacher is not None:
        tfopt.distill(student, teacher)
    tfopt.compile(student, decided, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = decided.pipeline(examples)
    student.fit(batches, epochs=1, verbose=0)  # the traces

    def run() -> float:
        begin = time.process_time()
        student.fit(batches, epochs=3, verbose=0)
        return (time.process_time() - begin) / 3

    return run


if __name__ == "__main__":
    found = main(tyro.cli(Options, description=__doc__))
    print(
        json.dumps(
            {row: found["rows"][row]["gain_points"] for row in found["rows"]} | {"cached": found["cached"]}, indent=2
        )
    )
