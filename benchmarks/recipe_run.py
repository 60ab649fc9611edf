"""Runs one recipe, and writes its report and receipts, and the same model as Keras exports it.

    python benchmarks/recipe_run.py NAME SEED DIRECTORY [CHANGES]

CHANGES are settings of the recipe in JSON, for example '{"training": {"epochs": 3}}'. recipes.py and text_baselines.py
start it, in a process of its own for each run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import keras

import tfopt
from tfopt.atomic.files import write_text
from tfopt.recipe import with_changes


def main(name: str, seed: int, directory: Path, changes: str = "{}") -> None:
    recipe = with_changes(tfopt.recipes.find_recipe(name), json.loads(changes))
    recipe = replace(
        recipe, export_dir=str(directory / "artifacts"), training=replace(recipe.training, seed=seed), forms={}
    )
    start = time.perf_counter()
    result = tfopt.run(recipe)
    seconds = time.perf_counter() - start
    record = {
        "seconds": round(seconds, 1),
        "environment": result.report.environment,
        "receipts": {artifact: receipt.to_dict() for artifact, receipt in result.receipts.items()},
    }
    write_text(directory / "run.json", json.dumps(record))
    examples = recipe.data.load()
    keras.backend.clear_session()
    model = recipe.model.build(examples.input_shape, examples.outputs)  # its time does not depend on the weights
    model.export(str(directory / "artifacts" / "keras"), verbose=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
