"""Runs the recipes without changes, and records the time of each recipe and the receipts of its artifacts.

    python benchmarks/recipes.py

Results go to benchmarks/results/RECIPE.json. README and the scripts in recipes/ quote them. The run takes two to three
minutes on two cores.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

import tfopt
from tfopt.atomic.files import write_text

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    names: tuple[str, ...] = tuple(tfopt.recipes.RECIPES)
    """Recipes to run."""
    out: Path = RESULTS
    """Directory for the results."""


def main(options: Options) -> None:
    options.out.mkdir(exist_ok=True)
    for name in options.names:
        with tempfile.TemporaryDirectory() as directory:
            recipe = replace(tfopt.recipes.RECIPES[name], export_dir=f"{directory}/{name}")
            start = time.perf_counter()
            result = tfopt.run(recipe)
            seconds = time.perf_counter() - start
        receipts = {
            artifact: receipt.to_dict()
            | {
                "artifact": f"saved_models/{name}/{artifact}",
                "baseline": receipt.baseline and f"saved_models/{name}/{Path(receipt.baseline).name}",
            }
            for artifact, receipt in result.receipts.items()
        }
        recorded = {"seconds": round(seconds, 1), "environment": result.report.environment, "receipts": receipts}
        write_text(options.out / f"{name}.json", json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
