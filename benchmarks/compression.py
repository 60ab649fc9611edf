"""Compresses the models of three recipes to a budget, against what shrinking, pruning or int8 alone reach.

    python benchmarks/compression.py --recipes resnet_cifar

Each recipe's model is trained, and exported by Keras' own `model.export`. The budget is half a point of the score, a
tenth of that export's bytes and a quarter of its time at batch 8. `tfopt.compress` has ten minutes for it, and so has
the same search with shrinking alone: float32, healed by the labels. Weights are pruned by the settings of the recipe.
int8 alone needs no training. All artifacts are then measured side by side.

Results go to benchmarks/results/compression.json, one entry per recipe. Entries of other recipes stay. A recipe takes
half an hour. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.errors import ConfigError
from tfopt.hardware import detect
from tfopt.recipes import RECIPES, find_recipe

RESULTS = Path(__file__).parent / "results"
RECIPES_HERE = ("resnet_cifar", "mobilenet_v2", "unet")
BATCH, DROP, SMALLER, FASTER = 8, 0.005, 10, 4


@dataclass(frozen=True, kw_only=True)
class Options:
    recipes: tuple[str, ...] = RECIPES_HERE
    """Which recipes."""
    minutes: float = 10.0
    """Time of each search."""
    epochs: int = 12
    """Epochs for which each smaller model is healed."""
    quick: bool = False
    """Train the models by their quick recipes."""
    seed: int = 0
    """Seed of the proposals."""
    out: Path = RESULTS / "compression.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), options)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
        print(name, json.dumps(results[name], indent=2), flush=True)
    return results


def measure(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Trains a recipe's model, compresses it in several ways, and measures the artifacts side by side."""
    recipe = find_recipe(name)
    recipe = replace(recipe.quick() if options.quick else recipe, shrink=None, quantization=None, forms={})
    pruning, recipe = recipe.pruning, replace(recipe, pruning=None, export_dir=None)
    data = recipe.data.load()
    model = tfopt.run(recipe).model
    model.save(folder / "keras.keras")
    score = recipe.find_task().score(data)
    first = tfopt.benchmark([folder / "keras.keras"], batch_sizes=(BATCH,)).models[0]
    config = tfopt.CompressionConfig(
        max_score_drop=DROP,
        max_latency_ms=(first.times[0].latency_ms_median / FASTER,),
        max_bytes=(first.bytes_on_disk or 0) // SMALLER,
        batch_sizes=(BATCH,),
        metric=score if isinstance(score, str) else score.name,
        time_limit_s=60 * options.minutes,
        seed=options.seed,
        shrink=tfopt.StructuredPruningConfig(round_to=8, epochs=options.epochs),
        training=recipe.training,
        augment=recipe.data.augment,
    )
    found = {"compress": search(model, data, config, folder / "compress")}
    alone = replace(config, max_latency_ms=(), max_bytes=None, quantization=None, distillation=None)
    found["shrink"] = search(model, data, alone, folder / "shrink")
    paths = {"keras": folder / "keras.keras", "int8": folder / "compress" / "unshrunk" / "artifact"}
    for kind, report in found.items():
        if report is not None and report.best is not None:
            paths[kind] = Path(report.best.artifact)
    if pruning is not None:
        paths["prune"] = folder / "prune"
        pruned = tfopt.run(replace(recipe, pruning=pruning)).model
        tfopt.export(pruned, paths["prune"], tfopt.ExportConfig(sparse_weights=True))
    paths = {kind: path for kind, path in paths.items() if path.exists()}
    bench = tfopt.benchmark(list(paths.values()), batch_sizes=(BATCH,), data=data.batches("test", 64), metric=score)
    rows = dict(zip(paths, bench.models, strict=True))
    keras_ms = rows["keras"].times[0].latency_ms_median
    report = found["compress"]
    return {
        "device": f"{detect().cpu_model}, {detect().logical_cores} cores",
        "budget": config.budget,
        "seconds": None if report is None else round(report.seconds, 1),
        "trained": None if report is None else sum(each.state == "measured" for each in report.trials),
        "missed": None if report is None else report.missed,
        "front": []
        if report is None
        else [{"multiply_adds": each.multiply_adds, **each.figures} for each in report.front],
        "artifacts": {
            kind: {
                "score": next(iter(row.scores.values()), None),
                "bytes": row.bytes_on_disk,
                "latency_ms": row.times[0].latency_ms_median,
                "smaller": round((rows["keras"].bytes_on_disk or 0) / (row.bytes_on_disk or 1), 2),
                "faster": round(keras_ms / row.times[0].latency_ms_median, 2),
            }
            for kind, row in rows.items()
            if not row.failure
        },
    }


def search(model: Any, data: Any, config: Any, folder: Path) -> Any:
    """Returns the report of a search, or None if its budget cannot be met, which it says."""
    try:
        return tfopt.compress(model, data, config, directory=folder, on_step=lambda words: print(words, flush=True))
    except ConfigError as error:
        print(error, flush=True)
        return None


if __name__ == "__main__":
    assert set(RECIPES_HERE) <= set(RECIPES)
    main(tyro.cli(Options, description=__doc__))
