"""Measures what clustering costs in accuracy and saves in bytes, beside int8 and int4, on trained digits.

    python benchmarks/clustering.py --models cnn --seeds 5

For each seed a network is trained on the digits. Each kind of storage then begins with these weights: rounded in the
export ("int8_weight_only", "int4_weight_only"), clustered as they are, or clustered and trained on for some epochs.
Accuracies are those of the SavedModel on the test examples. Sizes are those of its files, and of a .tar.gz of them.

Results go to benchmarks/results/clustering.json, one entry per model. Entries of other models stay. A seed of cnn takes
a minute on two cores.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting.verification.sizes import bytes_on_disk, gzip_bytes
from tfopt.hardware import detect

SHAPE, CLASSES = (32, 32, 1), 10
BUILDERS: dict[str, Callable[[], keras.Model]] = {
    "cnn": lambda: tfopt.models.simple_cnn(SHAPE, CLASSES, filters=[32, 64, 64], kernel_size=3, dropout=0.3),
    "resnet": lambda: tfopt.models.resnet_cifar(SHAPE, CLASSES, depth=8),
}
CODEBOOK = "codebook_weight_only"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the weights are stored, and what is done to them before."""

    precision: str = CODEBOOK
    clusters: int = 0
    per: str = "layer"
    sparsity: float = 0.0
    is_tuned: bool = False


KINDS = {
    "float32": Kind(precision="float32"),
    "int8": Kind(precision="int8_weight_only"),
    "int4": Kind(precision="int4_weight_only"),
    "256 values": Kind(clusters=256),
    "16 values": Kind(clusters=16),
    "16 values, tuned": Kind(clusters=16, is_tuned=True),
    "16 values per channel, tuned": Kind(clusters=16, per="channel", is_tuned=True),
    "4 values": Kind(clusters=4),
    "4 values, tuned": Kind(clusters=4, is_tuned=True),
    "75% zeros, tuned": Kind(precision="float32", sparsity=0.75),
    "75% zeros and 16 values, tuned": Kind(clusters=16, sparsity=0.75, is_tuned=True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = tuple(BUILDERS)
    """Which models."""
    seeds: int = 5
    """Number of seeds."""
    epochs: int = 12
    """Epochs of the training."""
    tuning_epochs: int = 4
    """Epochs of a training with clusters, or with pruning."""
    out: Path = Path(__file__).parent / "results" / "clustering.json"
    """Path of the results file."""


def main(options: Options) -> None:
    results = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    results["device"] = f"{detect().processor}, {detect().logical_cores} cores"
    results["settings"] = {each: getattr(options, each) for each in ("epochs", "tuning_epochs")}
    examples = tfopt.data.DataConfig(source="digits").load()
    for name in options.models:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for seed in range(options.seeds):
            keras.utils.set_random_seed(seed)
            model = BUILDERS[name]()
            fit(model, examples, seed, options.epochs, 2e-3)
            weights = model.get_weights()
            for kind, how in KINDS.items():
                runs[kind].append(measure(name, weights, how, examples, seed, options))
                print(name, seed, kind, runs[kind][-1], flush=True)
            results["models"][name] = {
                "parameters": model.count_params(),
                "seeds": seed + 1,
                "kinds": {kind: summary(runs[kind], runs["float32"]) for kind in KINDS},
            }
            write_text(options.out, json.dumps(results, indent=2) + "\n")


def measure(name: str, weights: Any, how: Kind, examples: Any, seed: int, options: Options) -> dict[str, float]:
    model = BUILDERS[name]()
    model.set_weights(weights)
    if how.sparsity:
        schedule = tfopt.PruningSchedule(model, tfopt.PruningConfig(target_sparsity=how.sparsity))
        fit(model, examples, seed, options.tuning_epochs, 1e-3, [schedule])
    if how.clusters:
        tfopt.cluster(model, tfopt.ClusteringConfig(clusters=how.clusters, per=how.per))
    if how.is_tuned:
        fit(model, examples, seed, options.tuning_epochs, 1e-3)
    config = tfopt.ExportConfig(precision=how.precision, sparse_weights=bool(how.sparsity) and not how.clusters)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "artifact")
        tfopt.export(model, path, config)
        return {
            "accuracy": accuracy(path, examples),
            "bytes": bytes_on_disk(path),
            "gzip_bytes": gzip_bytes(path),
        }


def fit(
    model: keras.Model, examples: Any, seed: int, epochs: int, rate: float, callbacks: list[Any] | None = None
) -> None:
    keras.utils.set_random_seed(seed)
    config = tfopt.TrainingConfig(
        precision="float32", global_batch_size=32, learning_rate=rate, epochs=epochs, seed=seed
    )
    decided = tfopt.plan(config)
    steps = -(-examples.size("train") // config.global_batch_size)
    optimizer = decided.optimizer(steps_per_epoch=steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, decided, optimizer=optimizer, loss=loss)
    augmentation = tfopt.data.Augmentation(tfopt.data.AugmentConfig(crop=4), outputs=CLASSES)
    data = decided.pipeline(examples, augment=augmentation)
    model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)


def accuracy(path: Path, examples: Any) -> float:
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    (key,) = serve.structured_input_signature[1]
    hits = []
    for x, y in examples.batches("test", 256):
        (outputs,) = serve(**{key: tf.cast(x, tf.float32)}).values()
        hits.append(np.argmax(outputs, axis=-1) == np.asarray(y).reshape(-1))
    return float(np.concatenate(hits).mean())


def summary(runs: list[dict[str, float]], before: list[dict[str, float]]) -> dict[str, Any]:
    losses = [100 * (one["accuracy"] - run["accuracy"]) for one, run in zip(before, runs, strict=True)]
    ratios = {
        key: statistics.median(run[key] / one[key] for one, run in zip(before, runs, strict=True))
        for key in ("bytes", "gzip_bytes")
    }
    return {
        "median_accuracy": round(statistics.median(run["accuracy"] for run in runs), 4),
        "points_lost": {
            "median": round(statistics.median(losses), 2),
            "least": round(min(losses), 2),
            "most": round(max(losses), 2),
        },
        "bytes": statistics.median(run["bytes"] for run in runs),
        "gzip_bytes": statistics.median(run["gzip_bytes"] for run in runs),
        "against_float32": {key: round(value, 3) for key, value in ratios.items()},
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
