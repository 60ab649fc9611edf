"""A recipe with 8 times the batch and the scaled learning rate against the original, on the digits.

    python benchmarks/scaled_rates.py

Each recipe trains as it is, with 8 times the batch at the scaled rate (`base_batch_size`, with the warm-up that
`tfopt.tuning` advises), and with 8 times the batch at the original rate. These have the same epochs, so an eighth of
the steps. "longer" is scaled too, and has the epochs that are advised for the noise scale at the end of the originals.
The score is the accuracy on the held-out digits at the end. The batches of the originals are smaller than those of the
recipes, which the rates are scaled for by the same rule: 8 times the recipe's batch would leave 6 steps in an epoch of
1,437 digits.

Results go to benchmarks/results/scaled_rates.json. On two cores, the residual network takes half an hour,
and the vision transformer an hour and a half.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tyro
from write_pages import write_pages

import tfopt
from tfopt.atomic.files import write_text
from tfopt.data import epoch_steps
from tfopt.hardware import detect
from tfopt.recipe import Recipe, with_changes
from tfopt.tasks.label_smoothing import smoothed
from tfopt.training.step.noise import NoiseEstimate
from tfopt.tuning.advice import advise

RESULTS = Path(__file__).parent / "results"
TIMES = 8
# What differs from the recipe: the batch of the original, and what makes the run shorter.
ORIGINALS: dict[str, dict[str, Any]] = {
    "resnet_cifar": {"training": {"global_batch_size": 8, "base_batch_size": 32}},
    "vit": {"training": {"global_batch_size": 8, "base_batch_size": 32}},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    seeds: int = 5
    """Number of trainings of each kind, with the seeds 0, 1, 2 and so on."""
    only: tuple[str, ...] = tuple(ORIGINALS)
    """Recipes."""
    kinds: tuple[str, ...] = ("original", "scaled", "unscaled", "longer")
    """Kinds of training."""
    epochs: int | None = None
    """Number of epochs, in place of the recipes' own."""
    out: Path = RESULTS / "scaled_rates.json"
    """Path of the results file, to which finished runs are added."""


def main(options: Options) -> None:
    results: dict[str, Any] = {"times": TIMES, "recipes": {}}
    if options.out.exists():
        results = json.loads(options.out.read_text())
    results |= {"device": f"{detect().processor}, {detect().logical_cores} cores", "tensorflow": tf.__version__}
    for name in options.only:
        kept = results["recipes"].setdefault(name, {})
        for kind in options.kinds:
            recipe = recipe_of(kind, name, options.epochs, kept.get("original", {}).get("noise_scale", {}))
            for seed in range(options.seeds):
                found = kept.setdefault(kind, {"settings": settings_of(recipe), "scores": {}})
                if str(seed) in found["scores"]:
                    continue
                begin = time.perf_counter()
                score, noise = train(recipe, seed)
                found["scores"][str(seed)] = score
                if noise is not None:
                    found.setdefault("noise_scale", {})[str(seed)] = noise
                found["median"] = statistics.median(found["scores"].values())
                seconds = time.perf_counter() - begin
                print(f"{name} {kind} {seed}: {score:.4f}, {noise}, {seconds:.0f} s", file=sys.stderr, flush=True)
                write_text(options.out, json.dumps(results, indent=2) + "\n")
    if options.out == Options().out:
        write_pages()


def recipe_of(kind: str, name: str, epochs: int | None, noise_scales: Mapping[str, float]) -> Recipe:
    original = with_changes(tfopt.recipes.find_recipe(name), ORIGINALS[name])
    if epochs is not None:
        original = with_changes(original, {"training": {"epochs": epochs}})
    training = original.training
    size = TIMES * training.global_batch_size
    if kind == "original":
        return original
    if kind == "unscaled":
        rate = training.learning_rate * (training.global_batch_size / (training.base_batch_size or 1)) ** 0.5
        unscaled = {"global_batch_size": size, "base_batch_size": None, "learning_rate": rate}
        return replace(original, training=replace(training, **unscaled))
    noise = NoiseEstimate(noise_scale=statistics.median(noise_scales.values())) if kind == "longer" else None
    advised = advise(training, largest=size, global_batch_size=size, noise=noise)
    return with_changes(original, {"training": dict(advised.settings)})


def settings_of(recipe: Recipe) -> dict[str, Any]:
    names = ("global_batch_size", "base_batch_size", "learning_rate", "warmup_epochs", "epochs", "optimizer")
    settings = {name: value for name, value in asdict(recipe.training).items() if name in names}
    rates = [each.value for each in tfopt.plan(recipe).decisions if each.setting == "learning_rate"]
    return {**settings, "rate": float(rates[0]) if rates else recipe.training.learning_rate}


def train(recipe: Recipe, seed: int) -> tuple[float, float | None]:
    """Trains a recipe's model. Returns its accuracy on the held-out digits, and the noise scale at the end."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    recipe = replace(recipe, training=replace(recipe.training, seed=seed, precision="float32"))
    examples = recipe.data.load()
    plan = tfopt.plan(recipe)
    with plan.scope():
        model = recipe.model.build(examples.input_shape, examples.outputs)
    loss = smoothed(keras.losses.SparseCategoricalCrossentropy(from_logits=True), recipe.training.label_smoothing)
    optimizer = plan.optimizer(epoch_steps(examples, recipe.training.global_batch_size))
    tfopt.compile(model, plan, optimizer=optimizer, loss=loss, metrics=["accuracy"])
    noise = tfopt.NoiseScale(every=10)
    model.fit(plan.pipeline(examples), epochs=recipe.training.epochs, verbose=0, callbacks=[noise])
    score = model.evaluate(plan.pipeline(examples, training=False), verbose=0, return_dict=True)["accuracy"]
    return float(score), noise.report.last.noise_scale


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
