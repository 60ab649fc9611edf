"""Writes the costs that `tfopt models` and `tfopt recipes` list.

    python benchmarks/costs.py [--only resnet50 vit_base] [--only-new]

The models are the published ones of tfopt/models/table.py and those of all recipes in all forms. The shapes of examples
that are not on every machine are known, and nothing is downloaded. Nothing is trained: parameters, multiply-adds and
the memory of training come from the graphs. A few minutes on two cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tyro
from training_memory import RESULTS

from tfopt.advisor.shapes import known_shape
from tfopt.atomic.files import write_text
from tfopt.models.table import PUBLISHED_MODELS
from tfopt.profiling.cost import model_cost
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES

COSTS = Path(__file__).parents[1] / "tfopt" / "cli" / "costs.json"
MEMORY_OF = {"batch_size": 32, "precision": "float32", "optimizer": "adam"}
OPEN_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Models and recipes to count, all by default."""
    only_new: bool = False
    """Count only what is not stored yet."""


def main(options: Options) -> None:
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {"models": {}, "recipes": {}}

    def wanted(kind: str, name: str) -> bool:
        stored = costs[kind].get(name)
        is_stored = stored is not None and (kind == "models" or list(stored["forms"]) == list(RECIPES[name].forms))
        return (not options.only or name in options.only) and not (options.only_new and is_stored)

    for name in PUBLISHED_MODELS:
        if wanted("models", name):
            costs["models"][name] = count_model(name)
            print(name, costs["models"][name], flush=True)
            write(costs)
    for name, recipe in RECIPES.items():
        if wanted("recipes", name):
            costs["recipes"][name] = count_recipe(recipe)
            print(name, costs["recipes"][name], flush=True)
            write(costs)
    write(costs)


def write(costs: dict[str, Any]) -> None:
    """Writes the costs in the order of the tables, without those of models and recipes that are gone."""
    measured = json.loads(RESULTS.read_text())
    whole = {
        "memory_of": MEMORY_OF,
        "open_size": OPEN_SIZE,
        "memory_error": {"median": measured["median_error"], "largest": measured["largest_error"]},
        "models": {name: costs["models"][name] for name in PUBLISHED_MODELS if name in costs["models"]},
        "recipes": {name: costs["recipes"][name] for name in RECIPES if name in costs["recipes"]},
    }
    write_text(COSTS, json.dumps(whole, indent=1) + "\n")


def count_model(name: str) -> dict[str, Any]:
    """Returns the cost of a published model, with the memory of a batch of MEMORY_OF."""
    entry = PUBLISHED_MODELS[name]
    return {"task": entry.task, **_count(entry.build(), **MEMORY_OF)}


def count_recipe(recipe: Recipe) -> dict[str, Any]:
    """Returns the cost of a recipe as it stands, and of its forms, with the memory of its own batch."""
    forms = {form: _count_form(recipe.form(form)) for form in recipe.forms}
    return {**(_count_form(recipe) or {}), "forms": forms}


def _count_form(recipe: Recipe) -> dict[str, Any] | None:
    """Returns the cost of a form; None if the shape of its examples is unknown."""
    shape = known_shape(recipe.data)
    if shape is None:
        return None
    model = recipe.model.build(shape.input_shape, shape.outputs)
    optimizer = recipe.training.optimizer
    batch_size = recipe.training.global_batch_size
    cost = _count(model, batch_size=batch_size, precision="float32", optimizer=optimizer)
    return {"task": recipe.find_task().name, "batch_size": batch_size, "optimizer": optimizer, **cost}


def _count(model: keras.Model, **settings: Any) -> dict[str, Any]:
    cost = model_cost(model, open_size=OPEN_SIZE, **settings)
    keras.backend.clear_session()
    if cost.uncounted:
        raise SystemExit(f"{cost.name} cannot be counted: {cost.uncounted}")
    return {
        "input_shape": cost.input_shape,
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "memory_bytes": cost.memory.total_bytes,
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
