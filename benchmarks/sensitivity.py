"""Measures the sensitivity of the recipe resnet_cifar, and what an allocation by it is worth without fine-tuning.

    python benchmarks/sensitivity.py

The network is trained on the digits. Each layer, and each group of channels, is then pruned alone, and the held-out
digits are scored. Then all layers are pruned together: with the same share for each, ranked over all layers together,
and as allocated from the curves of the training digits' last tenth, which no score below uses.

Results go to benchmarks/results/sensitivity.json, and the plots to docs/images. It takes three minutes on two cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro
from rich.console import Console

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.recipes import find_recipe

HERE = Path(__file__).parent
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
FLOPS = (0.9, 0.8, 0.7)
SHARES = (0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, kw_only=True)
class Options:
    seed: int = 0
    """Seed of the training."""
    out: Path = HERE / "results" / "sensitivity.json"
    """Path of the results file."""
    images: Path = HERE.parent / "docs" / "images"
    """Directory of the plots."""


def main(options: Options) -> None:
    recipe = find_recipe("resnet_cifar")
    training = replace(recipe.training, seed=options.seed, checkpoint_dir=None)
    recipe = replace(recipe, training=training, pruning=None, quantization=None, export_dir=None, forms={})
    model = tfopt.run(recipe, console=Console(quiet=True)).model
    examples = recipe.data.load()
    train, test = (examples.batches(part, 360) for part in ("train", "test"))
    held_out = [tuple(batch) for batch in train.as_numpy_iterator()][-1:]
    scored = [tuple(batch) for batch in test.as_numpy_iterator()]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["sparse_categorical_accuracy"])
    configs: dict[str, Any] = {"zeros": tfopt.PruningConfig(), "channels": tfopt.StructuredPruningConfig(round_to=8)}
    options.images.mkdir(exist_ok=True)
    results: dict[str, Any] = {"recipe": recipe.name, "device": f"{detect().processor}, {detect().logical_cores} cores"}
    for kind, config in configs.items():
        curves = tfopt.sensitivity(model, scored, config, shares=SHARES)
        curves.plot(options.images / f"sensitivity_{kind}.svg")
        results[kind] = {"baseline": curves.baseline, "shares": curves.shares, "curves": curves.curves}
        print(curves)
    by_loss = {kind: tfopt.sensitivity(model, held_out, configs[kind], shares=SHARES, score="loss") for kind in configs}
    results["together"] = {
        "zeros": {
            str(target): {
                name: pruned_score(model, scored, config)
                for name, config in {
                    "uniform": tfopt.PruningConfig(target_sparsity=target),
                    "global": tfopt.PruningConfig(target_sparsity=target, scope="global"),
                    "allocated": by_loss["zeros"].allocate(target_sparsity=target),
                }.items()
            }
            for target in SPARSITIES
        },
        "channels": {
            str(target): {
                name: shrunk_score(model, scored, config)
                for name, config in {
                    "uniform": tfopt.StructuredPruningConfig(target_flops=target, round_to=8),
                    "global": tfopt.StructuredPruningConfig(target_flops=target, scope="global", round_to=8),
                    "allocated": by_loss["channels"].allocate(target_flops=target),
                }.items()
            }
            for target in FLOPS
        },
    }
    print(json.dumps(results["together"], indent=1))
    write_text(options.out, json.dumps(results, indent=2) + "\n")


def pruned_score(model: keras.Model, batches: Any, config: tfopt.PruningConfig) -> float:
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    tfopt.prune(copy, config)
    return accuracy(copy, batches)


def shrunk_score(model: keras.Model, batches: Any, config: tfopt.StructuredPruningConfig) -> float:
    return accuracy(tfopt.shrink(model, config).model, batches)


def accuracy(model: keras.Model | None, batches: Any) -> float:
    assert model is not None
    right = [np.argmax(model.predict(inputs, verbose=0), -1) == labels for inputs, labels, *_ in batches]
    return round(float(np.concatenate(right).mean()), 5)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
