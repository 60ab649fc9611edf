"""Runs the recipes and measures what they export: score, size, and speed against Keras' own export.

    python benchmarks/recipes.py [--names digits_cnn ...] [--seeds 5]

Each run is a process of its own. The artifacts of the first seed, and the same model as `model.export` of Keras writes
it, are then loaded in a process each and timed in turns. With several seeds, the scores of all of them are recorded.
A recipe with a teacher is also trained without it, for as many steps.

Results go to benchmarks/results/RECIPE.json. README, docs/recipes.md and the scripts in recipes/ quote them;
write_pages.py writes the table of docs/recipes.md. All recipes with one seed take 40 minutes on two cores.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from write_pages import write_pages

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.exporting.verification.verify import ratio_range
from tfopt.report import score_names

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    names: tuple[str, ...] = tuple(tfopt.recipes.RECIPES)
    """Recipes to run."""
    seeds: int = 1
    """Number of runs of each recipe, with the seeds 0, 1, 2 and so on."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per timed call."""
    rounds: int = 12
    """Number of timing rounds."""
    seconds: float = 0.5
    """Timing per artifact and round, in seconds."""
    out: Path = RESULTS
    """Directory for the results."""


def main(options: Options) -> None:
    options.out.mkdir(exist_ok=True)
    for name in options.names:
        with tempfile.TemporaryDirectory() as directory:
            record = measure(name, Path(directory), options)
        write_text(options.out / f"{name}.json", json.dumps(record, indent=2) + "\n")
        print(name, json.dumps(record["scores"]), json.dumps(record["median_ms"]), flush=True)
    if options.out == RESULTS:
        write_pages()


def measure(name: str, directory: Path, options: Options) -> dict[str, Any]:
    runs = [run(name, seed, directory / str(seed)) for seed in range(options.seeds)]
    first = runs[0]
    receipts = {artifact: tfopt.Receipt(**receipt) for artifact, receipt in first["receipts"].items()}
    (score,) = score_names(receipts.values())
    scores = {
        artifact: [tfopt.Receipt(**each["receipts"][artifact]).score(score) for each in runs] for artifact in receipts
    }
    if tfopt.recipes.RECIPES[name].distillation is not None:
        without = '{"distillation": false, "quantization": false}'
        alone = [run(name, seed, directory / f"{seed}_alone", without) for seed in range(options.seeds)]
        scores["alone"] = [tfopt.Receipt(**each["receipts"]["float32"]).score(score) for each in alone]
    artifacts = directory / "0" / "artifacts"
    for artifact, receipt in first["receipts"].items():
        receipt["artifact"] = f"saved_models/{name}/{artifact}"
        receipt["baseline"] = receipt["baseline"] and f"saved_models/{name}/{Path(receipt['baseline']).name}"
    calls = time_calls(name, [artifacts / each for each in ("keras", *receipts)], options)
    median_ms = {
        size: {artifact: round(median(rounds), 4) for artifact, rounds in each.items()} for size, each in calls.items()
    }
    keras_bytes = sum(file.stat().st_size for file in (artifacts / "keras").rglob("*") if file.is_file())
    return first | {
        "score": score,
        "scores": scores,
        "median_scores": {artifact: statistics.median(each) for artifact, each in scores.items()},
        "median_ms": median_ms,
        "faster_than_keras": {
            size: {artifact: round(each["keras"] / each[artifact], 2) for artifact in receipts}
            for size, each in median_ms.items()
        },
        "int8_against_float32": {
            size: against(each["float32"], each["int8"]) for size, each in calls.items() if "int8" in each
        },
        "keras_bytes": keras_bytes,
        "share_of_keras_bytes": {
            artifact: round(receipt.bytes_on_disk / keras_bytes, 2) for artifact, receipt in receipts.items()
        },
    }


def run(name: str, seed: int, directory: Path, *changes: str) -> dict[str, Any]:
    directory.mkdir()
    subprocess.run([sys.executable, HERE / "recipe_run.py", name, str(seed), directory, *changes], check=True)
    record: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return record


Rounds = list[list[float]]  # the milliseconds of every call, for each round


def time_calls(name: str, paths: list[Path], options: Options) -> dict[str, dict[str, Rounds]]:
    """Returns the times of the calls of each artifact, by batch size and name."""
    examples = tfopt.recipes.RECIPES[name].data.load()
    inputs, *_ = next(examples.batches("test", max(options.batch_sizes)).as_numpy_iterator())
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(SavedModelProcess(path)) for path in paths]
        for process in processes:
            (own,) = process.loaded["inputs"]  # every recipe has one input, which Keras' export names otherwise
            process.renamed = {"inputs": own}
        calls = {
            str(size): alternate(processes, {"inputs": inputs[:size]}, options.seconds, options.rounds)
            for size in options.batch_sizes
        }
    return {size: {path.name: rounds for path, rounds in zip(paths, each, strict=True)} for size, each in calls.items()}


def median(rounds: Rounds) -> float:
    return float(np.median(np.concatenate(rounds)))


def against(baseline: Rounds, artifact: Rounds) -> dict[str, Any]:
    """Returns the speed against a baseline as a receipt does: of the medians, and the range over the rounds."""
    return {
        "speedup": round(median(baseline) / median(artifact), 3),
        "speedup_range": [round(ratio, 3) for ratio in ratio_range(baseline, artifact)],
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
