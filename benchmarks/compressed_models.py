"""Compresses the models of three recipes to a budget, against what shrinking, pruning or int8 alone reach.

    python benchmarks/compressed_models.py --recipes resnet_cifar

Each recipe's model is trained, and exported by Keras' own `model.export`. The budget is half a point of the score, a
tenth of that export's bytes and a quarter of its time at batch 8. `tfopt.compress` has ten minutes for it, and so has
the same search with shrinking alone: float32, healed by the labels. The artifacts are written for LiteRT. Weights are
pruned by the settings of the recipe. int8 alone needs no training. All artifacts are then measured side by side: those
of the front, those of the others, and Keras' export. That has every weight twice, so the float32 artifact of tfopt,
which has each once, is measured too.

Results go to benchmarks/results/compression.json, one entry per recipe, and the plot to docs/images. Entries of other
recipes stay. A recipe takes 25 minutes, less with --models of an earlier run. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import tyro

import tfopt
import tfopt.tasks.label_smoothing  # a trained file names its loss
from tfopt.atomic.files import write_text
from tfopt.compression.config import DROP
from tfopt.data import Examples, epoch_steps
from tfopt.errors import ConfigError
from tfopt.exporting.config import Format
from tfopt.hardware import detect
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES, find_recipe

RESULTS = Path(__file__).parent / "results"
RECIPES_HERE = ("resnet_cifar", "mobilenet_v2", "unet")
BATCH, DROPPED, SMALLER, FASTER = 8, 0.005, 10, 4
SAME_TIME = 1.05  # two times that differ by less are the same


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
    format: Format = "litert"
    """Format of all artifacts but Keras' own export."""
    models: Path | None = None
    """Directory of the trained models. One that is not there is trained and saved there."""
    out: Path = RESULTS / "compression.json"
    """Path of the results file."""
    plot: Path = RESULTS.parents[1] / "docs" / "images" / "compression.svg"
    """Path of the plot."""


def main(options: Options) -> dict[str, Any]:
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), options)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
        draw(results, options.plot)
        print(name, json.dumps(results[name], indent=2), flush=True)
    return results


def measure(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Trains a recipe's model, compresses it in several ways, and measures the artifacts side by side."""
    recipe = find_recipe(name)
    recipe = replace(recipe.quick() if options.quick else recipe, shrink=None, quantization=None, export_dir=None)
    data = recipe.data.load()
    file = (options.models or folder) / f"{name}.keras"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        tfopt.run(replace(recipe, pruning=None, forms={})).model.save(file)
    model = keras.saving.load_model(file)
    score = recipe.find_task().score(data)
    export = tfopt.benchmark([file], batch_sizes=(BATCH,)).models[0]  # a .keras file is exported by Keras itself
    assert export.bytes_on_disk is not None
    config = tfopt.CompressionConfig(
        max_score_drop=DROPPED,
        max_latency_ms=(export.times[0].latency_ms_median / FASTER,),
        max_bytes=export.bytes_on_disk // SMALLER,
        batch_sizes=(BATCH,),
        metric=score if isinstance(score, str) else score.name,
        format=options.format,
        time_limit_s=60 * options.minutes,
        seed=options.seed,
        shrink=tfopt.StructuredPruningConfig(round_to=8, epochs=options.epochs),
        training=recipe.training,
        augment=recipe.data.augment,
    )
    found = search(model, data, config, folder / "compress")
    alone = replace(config, max_latency_ms=(), max_bytes=None, quantization=None, distillation=None)
    shrunk = search(model, data, alone, folder / "shrink")
    paths = {
        "keras": file,
        "float32": folder / "compress" / "float32",
        "int8": folder / "compress" / "unshrunk" / "artifact",
    }
    if shrunk is not None and shrunk.best is not None:
        paths["shrink"] = Path(shrunk.best.artifact)
    if recipe.pruning is not None:
        paths["prune"] = folder / "prune"
        sparse = options.format == "saved_model"  # the other formats store every zero
        settings = tfopt.ExportConfig(format=options.format, sparse_weights=sparse)
        tfopt.export(pruned(file, recipe, data), paths["prune"], settings)
    paths = {kind: path for kind, path in paths.items() if path.exists()}  # a search says at once what is out of reach
    front = {} if found is None else {each.name: each for each in found.front}
    paths |= {name: Path(each.artifact) for name, each in front.items() if name != "unshrunk"}
    bench = tfopt.benchmark(list(paths.values()), batch_sizes=(BATCH,), data=data.batches("test", 64), metric=score)
    rows = {kind: row for kind, row in zip(paths, bench.models, strict=True) if not row.failure}
    figures = {kind: figures_of(row, rows["keras"]) for kind, row in rows.items()}
    in_front = {name: figures["int8" if name == "unshrunk" else name] for name in front}
    best = None if found is None or found.best is None else found.best.name
    return {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "format": options.format,
        "budget": config.budget,
        "keras": figures["keras"],
        "best": best and {"name": best, **in_front[best], **against(front[best], in_front[best])},
        "missed": None if found is None else found.missed,
        "seconds": {kind: round(each.seconds, 1) for kind, each in (("compress", found), ("shrink", shrunk)) if each},
        "trials": {
            kind: Counter(trial.state for trial in each.trials)
            for kind, each in (("compress", found), ("shrink", shrunk))
            if each
        },
        "front": {name: {**each, **against(front[name], each)} for name, each in in_front.items()},
        "alone": {
            kind: {**figures[kind], "points_ahead": points_ahead(in_front, figures[kind])}
            for kind in ("float32", "int8", "shrink", "prune")
            if kind in figures
        },
    }


def search(model: keras.Model, data: Examples, config: Any, folder: Path) -> Any:
    """Returns the report of a search, or None if its budget cannot be met, which it says."""
    try:
        return tfopt.compress(model, data, config, directory=folder, on_step=lambda words: print(words, flush=True))
    except ConfigError as error:
        print(error, flush=True)
        return None


def pruned(file: Path, recipe: Recipe, data: Examples) -> keras.Model:
    """Returns the trained model after the pruning of its recipe."""
    settings, training = recipe.pruning, recipe.training
    assert settings is not None
    changed: Any = {"epochs": settings.epochs, "warmup_epochs": 0.0, "ema_momentum": None}
    training = replace(training, **changed, learning_rate=settings.learning_rate or training.learning_rate)
    plan = tfopt.plan(training)
    model = keras.saving.load_model(file)
    loss = keras.saving.deserialize_keras_object(model.get_compile_config())["loss"]
    optimizer = plan.optimizer(steps_per_epoch=epoch_steps(data, training.global_batch_size))
    tfopt.compile(model, plan, optimizer=optimizer, loss=loss)
    batches = plan.pipeline(data, augment=recipe.data.augmentation(data))
    schedule = tfopt.PruningSchedule(model, settings)
    model.fit(batches, epochs=settings.epochs, shuffle=False, verbose=0, callbacks=[schedule])
    return model


def figures_of(row: Any, export: Any) -> dict[str, Any]:
    """Returns what was measured of one artifact, and how it compares with Keras' export."""
    ms, export_ms = row.times[0].latency_ms_median, export.times[0].latency_ms_median
    score, export_score = (next(iter(each.scores.values())) for each in (row, export))
    return {
        "score": score,
        "points_lost": round(100 * (export_score - score), 4),
        "bytes": row.bytes_on_disk,
        "latency_ms": ms,
        "smaller": round(export.bytes_on_disk / row.bytes_on_disk, 3),
        "faster": round(export_ms / ms, 3),
    }


def against(model: Any, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what else is known of a model of the front, and whether it keeps the three bounds here."""
    kept = (figures["points_lost"] <= 100 * DROPPED + 1e-6, figures["smaller"] >= SMALLER, figures["faster"] >= FASTER)
    searched = {"multiply_adds": model.multiply_adds, "points_lost_in_search": round(100 * model.figures[DROP], 4)}
    return {**searched, "kept": dict(zip(("score", "bytes", "latency"), kept, strict=True))}


def points_ahead(front: Mapping[str, Mapping[str, Any]], other: Mapping[str, Any]) -> float | None:
    """Returns by how many points the best model of the front that is as small and as fast is better than another one.

    None means that no model of the front is as small and as fast.
    """
    scores = [
        each["score"]
        for each in front.values()
        if each["bytes"] <= other["bytes"] and each["latency_ms"] <= SAME_TIME * other["latency_ms"]
    ]
    return round(100 * (max(scores) - other["score"]), 4) if scores else None


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws the points lost by each artifact against how much faster than Keras' export it is."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compression"}):
        figure, panels = plt.subplots(
            1, len(results), figsize=(4 * len(results), 3.6), layout="constrained", squeeze=False
        )
        for axes, (name, found) in zip(panels[0], results.items(), strict=True):
            front = sorted(found["front"].values(), key=lambda each: each["faster"])
            axes.plot(*along(front), "o-", color="#0072b2", label="compressed")
            for (kind, each), marker in zip(found["alone"].items(), "sD^v", strict=False):
                axes.plot(*along([each]), marker, color="#d55e00", label=kind if kind == "float32" else f"{kind} alone")
            for each in (*front, *found["alone"].values()):
                axes.annotate(f" {each['smaller']:.0f}x", (each["faster"], each["points_lost"]), fontsize=8)
            axes.axhline(100 * DROPPED, color="#b5b8bc", linestyle="--")
            axes.axvline(FASTER, color="#b5b8bc", linestyle="--")
            axes.set(title=name, xlabel="times faster than Keras' export, batch 8")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0][0].set_ylabel("points lost")
        panels[0][-1].legend(fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def along(found: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [each["faster"] for each in found], [each["points_lost"] for each in found]


if __name__ == "__main__":
    assert set(RECIPES_HERE) <= set(RECIPES)
    main(tyro.cli(Options, description=__doc__))
