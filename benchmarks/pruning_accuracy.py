"""Measures what pruning costs in accuracy, on the recipes' real data, for several seeds.

    python benchmarks/pruning_accuracy.py --recipes resnet_cifar --seeds 5

For each seed a recipe trains its model. Each kind of pruning then fine-tunes a model of its own that was trained so:
"unstructured" with 90% zeros, ranked over all layers together; "two_of_four" with the pattern 2:4.
"structured" removes channels down to half of the multiply-adds, or half of the heads and hidden units of a
transformer. "from nothing" is a network of the shrunk shape with new weights, trained for as many epochs as training
and fine-tuning together. The scores are those of the last epoch on the test examples.

Results go to benchmarks/results/pruning_accuracy.json, one entry per recipe. Entries of other recipes stay. A seed of
resnet_cifar takes three minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tyro
from rich.console import Console

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.recipe import ModelConfig, Recipe
from tfopt.recipes import find_recipe

RESULTS = Path(__file__).parent / "results"
HALF_FLOPS = {"target_flops": 0.5}
HALF_WIDTHS = {"ratio": 0.5}
SHRINK = {"vit": HALF_WIDTHS, "gpt": HALF_WIDTHS, "text_encoder": HALF_WIDTHS}
SPARSITY = 0.9


@dataclass(frozen=True, kw_only=True)
class Options:
    recipes: tuple[str, ...] = ("resnet_cifar", "vit")
    """Which recipes."""
    seeds: int = 5
    """Number of seeds."""
    kinds: tuple[str, ...] = ("structured", "unstructured", "two_of_four")
    """Kinds of pruning: structured (with the network trained from nothing), unstructured, and two_of_four."""
    out: Path = RESULTS / "pruning_accuracy.json"
    """Path of the results file."""


def main(options: Options) -> None:
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.recipes:
        entry = results.setdefault(name, {})
        for kind in options.kinds:
            entry.pop(kind, None)
        for seed in range(options.seeds):
            for kind in options.kinds:
                found = KINDS[kind](base(name, seed))
                entry.setdefault(kind, []).append({"seed": seed, **found})
                print(name, kind, entry[kind][-1], flush=True)
        entry["device"] = f"{detect().processor}, {detect().logical_cores} cores"
        entry["medians"] = {kind: medians(entry[kind]) for kind in KINDS if kind in entry}
        write_text(options.out, json.dumps(results, indent=2) + "\n")
        print(name, entry["medians"])


def base(name: str, seed: int) -> Recipe:
    """Returns a recipe that only trains."""
    recipe = find_recipe(name)
    training = replace(recipe.training, seed=seed, checkpoint_dir=None)
    return replace(recipe, training=training, quantization=None, export_dir=None, forms={})


def structured(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pruning is not None
    epochs, rate = recipe.pruning.epochs, recipe.pruning.learning_rate
    change: dict[str, Any] = SHRINK.get(recipe.name, HALF_FLOPS)
    config = tfopt.StructuredPruningConfig(round_to=8, epochs=epochs, learning_rate=rate, **change)
    shrunk = run(replace(recipe, pruning=None, shrink=config))
    metrics = shrunk.report.passes[0].metrics
    builder = Copy(shrunk.model)
    training = replace(recipe.training, epochs=recipe.training.epochs + epochs)
    fresh = replace(recipe, pruning=None, training=training, model=ModelConfig(builder=builder))
    return {
        "dense": scores(shrunk, 0),
        "shrunk": scores(shrunk, 1),
        "from_nothing": scores(run(fresh), 0),
        "share_of_flops": round(metrics["multiply_adds"] / metrics["multiply_adds_before"], 4),
        "share_of_parameters": round(metrics["parameters"] / metrics["parameters_before"], 4),
    }


class Copy:
    """A builder of a model's architecture with new weights."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def __call__(self, input_shape: Any, outputs: int) -> keras.Model:
        return keras.models.clone_model(self.model)


def unstructured(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pruning is not None
    pruned = run(replace(recipe, pruning=replace(recipe.pruning, target_sparsity=SPARSITY, scope="global")))
    return {"dense": scores(pruned, 0), "pruned": scores(pruned, 1), "sparsity": SPARSITY}


def two_of_four(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pruning is not None
    pruned = run(replace(recipe, pruning=replace(recipe.pruning, target_sparsity=0.5, pattern="2:4")))
    return {"dense": scores(pruned, 0), "pruned": scores(pruned, 1), "sparsity": 0.5}


KINDS = {"structured": structured, "unstructured": unstructured, "two_of_four": two_of_four}


def run(recipe: Recipe) -> tfopt.RunResult:
    return tfopt.run(recipe, console=Console(quiet=True))


def scores(result: tfopt.RunResult, phase: int) -> dict[str, float]:
    """Returns the figures of the test examples after the last epoch of a phase."""
    history = result.report.phases[phase].history
    return {name[4:]: round(values[-1], 5) for name, values in history.items() if name.startswith("val_")}


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    models = [name for name, value in runs[0].items() if isinstance(value, dict)]
    return {
        model: {score: statistics.median(run[model][score] for run in runs) for score in runs[0][model]}
        for model in models
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
