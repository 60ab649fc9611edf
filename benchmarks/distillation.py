"""Measures what a student gains from a teacher, and what a cached teacher saves, on real data for several seeds.

    python benchmarks/distillation.py --seeds 5

Every row compares two trainings of a student from the same weights, for as many steps, by their score on the test part:

    small, tiny    a student of a small share of the teacher's parameters: on all labels, and beside its teacher
    few labels     teacher and student have 100 labels. Alone, the student trains on them; with the teacher, it learns
                   from the teacher's outputs for all training images, and from no label
    healed         the network of the recipe resnet_cifar, shrunk to a quarter of its multiply-adds: healed by labels,
                   and beside its parent
    text           a narrow text classifier, on the data of the recipe text_encoder, and beside the recipe's network,
                   whose outputs are cached
    gpt            a small decoder of bytes, on the data of the recipe gpt, and beside a larger one
    cached         processor seconds of an epoch with the live teacher and with its outputs from disk

The digits have a teacher for each seed; text and gpt have one teacher for all. Results go to
benchmarks/results/distillation.json, after each seed. The rows that are not measured stay as they are.
"""

from __future__ import annotations

import functools
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
from tfopt.data import Examples
from tfopt.hardware import detect
from tfopt.tasks.scores import BitsPerByte
from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
SHAPE, CLASSES = (16, 16, 1), 10
DIGITS = tfopt.TrainingConfig(precision="float32", global_batch_size=32, learning_rate=2e-3, epochs=30)
TEACHER = {"filters": [32, 64], "kernel_size": 3, "dropout": 0.3}
STUDENTS = {
    "small": {"filters": [8, 16], "kernel_size": 3, "units": [32]},
    "tiny": {"filters": [4, 6], "kernel_size": 3, "units": [8]},
}
FEW = 100
AUGMENT = tfopt.data.AugmentConfig(crop=2)
Row = Literal["small", "tiny", "few labels", "healed", "text", "gpt", "cached"]


@dataclass(frozen=True, kw_only=True)
class Options:
    seeds: int = 5
    """Number of seeds."""
    rows: tuple[Row, ...] = ("small", "tiny", "few labels", "healed", "text", "gpt", "cached")
    """What is measured. The others stay in the results file as they are."""
    epochs: int = 30
    """Epochs of every training on digits, of all training images. Fewer images are repeated for as many steps."""
    healing_epochs: int = 4
    """Epochs after the shrink."""
    text_epochs: int = 4
    """Epochs of the text classifiers."""
    gpt_steps: int = 1000
    """Steps of the decoders."""
    temperature: float = 2.0
    """Temperature of the distillation."""
    weight: float = 0.7
    """Share of the teacher in the loss, where there are labels."""
    rounds: int = 7
    """Rounds of the timing."""
    out: Path = RESULTS / "distillation.json"
    """Path of the results file."""

    @property
    def distillation(self) -> tfopt.DistillationConfig:
        return tfopt.DistillationConfig(temperature=self.temperature, weight=self.weight)

    @property
    def of_digits(self) -> tfopt.TrainingConfig:
        return replace(DIGITS, epochs=self.epochs)


def main(options: Options) -> dict[str, Any]:
    kinds = [row for row in options.rows if row != "cached"]
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in kinds}
    names = ("epochs", "healing_epochs", "text_epochs", "gpt_steps", "temperature", "weight")
    settings = {each: getattr(options, each) for each in names}
    results = json.loads(options.out.read_text()) if options.out.is_file() else {"rows": {}}
    device = f"{detect().processor}, {detect().logical_cores} cores"
    if "cached" in options.rows:
        results["cached"] = {**cached(options), "device": device}
        print(results["cached"], flush=True)
        write(options.out, results)
    for seed in range(options.seeds):
        for row, found in runs.items():
            begin = time.perf_counter()
            found.append({"seed": seed, **MEASURE[row](seed, options)})
            found[-1]["seconds"] = round(time.perf_counter() - begin, 1)
            print(row, found[-1], flush=True)
            results["rows"][row] = {**summary(found), "seeds": len(found), "settings": settings, "device": device}
            write(options.out, results)  # what is there if it is stopped
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    write_text(path, json.dumps(results, indent=2) + "\n")


def students(kind: str, seed: int, options: Options) -> dict[str, Any]:
    teacher = teacher_of_digits(seed, options)
    found: dict[str, Any] = {"teacher": accuracy(teacher, digits())}
    for side, given in (("alone", None), ("taught", teacher)):
        student = trained(cnn(seed + 100, **STUDENTS[kind]), seed, digits(), options.of_digits, given, options)
        found[side] = accuracy(student, digits())
    return {**found, "share_of_parameters": student.count_params() / teacher.count_params()}


@functools.cache
def teacher_of_digits(seed: int, options: Options) -> keras.Model:
    return trained(cnn(seed, **TEACHER), seed, digits(), options.of_digits)


def few_labels(seed: int, options: Options) -> dict[str, Any]:
    few = replace(digits(), train=digits().train.shuffle(2000, seed, reshuffle_each_iteration=False).take(FEW))
    steps = steps_of(digits(), DIGITS)
    training = replace(options.of_digits, steps_per_epoch=steps)
    teacher = trained(cnn(seed, **TEACHER), seed, few, training)
    found: dict[str, Any] = {"teacher": accuracy(teacher, digits())}
    for side, data, given in (("alone", few, None), ("taught", digits(), teacher)):
        student = cnn(seed + 100, **STUDENTS["small"])
        trained(student, seed, data, training, given, options, labels=given is None)
        found[side] = accuracy(student, digits())
    return {**found, "share_of_parameters": student.count_params() / teacher.count_params()}


def healed(seed: int, options: Options) -> dict[str, Any]:
    recipe = tfopt.recipes.RECIPES["resnet_cifar"]
    keras.utils.set_random_seed(seed)
    parent = trained(recipe.model.build(SHAPE, CLASSES), seed, digits(), replace(DIGITS, epochs=recipe.training.epochs))
    found: dict[str, Any] = {"teacher": accuracy(parent, digits())}
    for side, given in (("alone", None), ("taught", parent)):
        smaller = tfopt.shrink(parent, tfopt.StructuredPruningConfig(target_flops=0.25, round_to=8)).model
        found["shrunk"] = accuracy(smaller, digits())
        healing = replace(DIGITS, epochs=options.healing_epochs)
        found[side] = accuracy(trained(smaller, seed, digits(), healing, given, options), digits())
    return {**found, "share_of_parameters": smaller.count_params() / parent.count_params()}


def text(seed: int, options: Options) -> dict[str, Any]:
    recipe, examples, training, teacher, stored = text_teacher(options)
    narrow = {**recipe.model.arguments, "width": 8, "heads": 1, "units": 16}
    found: dict[str, Any] = {"teacher": accuracy(teacher, examples)}
    for side, given in (("alone", None), ("taught", stored)):
        student = built(replace(recipe.model, arguments=narrow), examples, seed + 100)
        data = examples if given is None else stored.examples
        trained(student, seed, data, training, given, options, augmented=False)
        found[side] = accuracy(student, examples)
    return {**found, "share_of_parameters": student.count_params() / teacher.count_params()}


@functools.cache
def text_teacher(options: Options) -> tuple[Any, ...]:
    recipe = tfopt.recipes.RECIPES["text_encoder"]
    examples = replace(recipe.data, arguments={**recipe.data.arguments, "overlap": 0}).load()
    training = replace(recipe.training, precision="float32", epochs=options.text_epochs)
    teacher = trained(built(recipe.model, examples, 0), 0, examples, training, augmented=False)
    directory = Path(tempfile.mkdtemp()) / "teacher"
    return recipe, examples, training, teacher, tfopt.cache_teacher(teacher, examples, directory)


def gpt(seed: int, options: Options) -> dict[str, Any]:
    recipe, examples, training, teacher = gpt_teacher(options)
    small = replace(recipe.model, arguments={"width": 16, "depth": 1, "heads": 2})
    found: dict[str, Any] = {"teacher": bits_per_byte(teacher, examples)}
    for side, given in (("alone", None), ("taught", teacher)):
        student = trained(built(small, examples, seed + 100), seed, examples, training, given, options, augmented=False)
        found[side] = bits_per_byte(student, examples)
    share = student.count_params() / teacher.count_params()
    return {**found, "score": "bits_per_byte", "share_of_parameters": share}


@functools.cache
def gpt_teacher(options: Options) -> tuple[Any, ...]:
    recipe = tfopt.recipes.RECIPES["gpt"]
    examples = replace(recipe.data, arguments={**recipe.data.arguments, "length": 64}).load()
    examples = replace(examples, test=examples.test.take(1000))
    training = replace(recipe.training, precision="float32", epochs=4, steps_per_epoch=options.gpt_steps // 4)
    large = replace(recipe.model, arguments={"width": 64, "depth": 2, "heads": 4})
    teacher = trained(built(large, examples, 0), 0, examples, training, augmented=False)
    return recipe, examples, training, teacher


MEASURE: dict[str, Callable[[int, Options], dict[str, Any]]] = {
    **{kind: functools.partial(students, kind) for kind in STUDENTS},
    "few labels": few_labels,
    "healed": healed,
    "text": text,
    "gpt": gpt,
}


@functools.cache
def digits() -> Any:
    return tfopt.data.digits(image_size=SHAPE[0])


def cnn(seed: int, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return tfopt.models.simple_cnn(SHAPE, CLASSES, **arguments)


def built(model: tfopt.ModelConfig, examples: Examples, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return model.build(examples.input_shape, examples.outputs)


def steps_of(examples: Examples, training: tfopt.TrainingConfig) -> int:
    return training.steps_per_epoch or -(-(examples.size("train") or 0) // training.global_batch_size)


def trained(
    model: keras.Model,
    seed: int,
    examples: Examples,
    training: tfopt.TrainingConfig,
    teacher: Any = None,
    options: Options | None = None,
    *,
    labels: bool = True,
    augmented: bool = True,
) -> keras.Model:
    """Trains a model, the digits with augmentation. Without labels, it learns from the teacher alone."""
    keras.utils.set_random_seed(seed)
    decided = tfopt.plan(replace(training, seed=seed))
    if teacher is not None and options is not None:
        tfopt.distill(model, teacher, replace(options.distillation, weight=options.weight if labels else 1.0))
    steps = steps_of(examples, training)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if labels else None
    tfopt.compile(model, decided, optimizer=decided.optimizer(steps_per_epoch=steps), loss=loss)
    augment = tfopt.data.Augmentation(AUGMENT, outputs=CLASSES) if augmented else None
    batches = decided.pipeline(examples, augment=augment, repeat=True)
    model.fit(batches, epochs=training.epochs, steps_per_epoch=steps, verbose=0)
    tfopt.end_distillation(model)
    return model


def accuracy(model: keras.Model, examples: Examples) -> float:
    right = total = 0
    for inputs, labels in examples.batches("test", 256):
        right += int(np.sum(np.argmax(model(inputs, training=False), -1) == labels))
        total += len(labels)
    return right / total


def bits_per_byte(model: keras.Model, examples: Examples) -> float:
    score = BitsPerByte(examples.bytes_per_target)
    for inputs, targets in examples.batches("test", 50):
        score.update(targets.numpy(), model(inputs, training=False).numpy())
    return score.result()


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over the seeds. A gain is in points of accuracy, or in bits per byte."""
    kinds = [each for each in ("teacher", "shrunk", "alone", "taught") if each in runs[0]]
    score = runs[0].get("score", "accuracy")
    factor = 100 if score == "accuracy" else -1  # fewer bits are better
    gains = [factor * (run["taught"] - run["alone"]) for run in runs]
    return {
        "score": score,
        "share_of_parameters": round(statistics.median(run["share_of_parameters"] for run in runs), 4),
        "medians": {kind: round(statistics.median(run[kind] for run in runs), 4) for kind in kinds},
        "gain": {
            name: round(of(gains), 4 if factor == -1 else 2)
            for name, of in (("median", statistics.median), ("least", min), ("most", max))
        },
        "runs": runs,
    }


def cached(options: Options) -> dict[str, Any]:
    """Returns the processor seconds of an epoch without a teacher, with a large one, and with its outputs from disk."""
    teacher = tfopt.models.resnet_cifar(SHAPE, CLASSES, depth=20)
    with tempfile.TemporaryDirectory() as directory:
        stored = tfopt.cache_teacher(teacher, digits(), Path(directory) / "teacher")
        sides = {
            "alone": epoch(digits(), None),
            "live": epoch(digits(), teacher),
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


def epoch(examples: Examples, teacher: Any) -> Callable[[], float]:
    """Returns a function that trains a student for an epoch and returns the processor seconds."""
    student = cnn(1, **STUDENTS["tiny"])
    decided = tfopt.plan(replace(DIGITS, epochs=1))
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
    print(json.dumps({row: each["gain"] for row, each in found["rows"].items()}, indent=2))
