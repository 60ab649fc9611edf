"""Measures on this machine the settings that "auto" decides: precision, XLA, steps per execution and prefetch.

    python benchmarks/plan_choices.py

Trains each builder with a baseline (float32, no XLA, one step per execution, two prefetched batches) and with one
setting changed. The variants take turns, one epoch each. Reports the median time per step and the speed relative to
the baseline. Results go to benchmarks/results/plan_choices.json. The run takes three minutes on two cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import in_turns, seconds_of

RESULTS = Path(__file__).parent / "results"
INPUT_SHAPE, CLASSES, BATCH = (32, 32, 3), 10, 64
MODELS = {
    "mlp": (tfopt.models.mlp, {}),
    "simple_cnn": (tfopt.models.simple_cnn, {}),
    "resnet_cifar_8": (tfopt.models.resnet_cifar, {"depth": 8}),
}
PLAIN = {"precision": "float32", "jit_compile": False, "steps_per_execution": 1, "prefetch": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed_bfloat16": {"precision": "mixed_bfloat16"},
    "jit_compile": {"jit_compile": True},
    "steps_per_execution_10": {"steps_per_execution": 10},
    "prefetch_autotune": {"prefetch": tf.data.AUTOTUNE},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: int = 40
    """Steps per epoch."""
    rounds: int = 6
    """Number of timing rounds; the first one is not counted."""
    out: Path = RESULTS / "plan_choices.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    results = {
        "what": f"training step, batch {BATCH} of {INPUT_SHAPE}, one setting changed",
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
        "gpus": [gpu.name for gpu in detect().gpus],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "models": {name: measure(builder, arguments, options) for name, (builder, arguments) in MODELS.items()},
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def measure(builder: Any, arguments: dict[str, Any], options: Options) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    x = generator.random((BATCH * options.steps, *INPUT_SHAPE), dtype=np.float32)
    y = generator.integers(0, CLASSES, len(x))
    fits = {name: prepare(builder, arguments, x, y, {**PLAIN, **change}) for name, change in CHANGES.items()}
    rounds = in_turns([partial(seconds_of, fit) for fit in fits.values()], options.rounds)
    seconds = dict(zip(fits, rounds, strict=True))
    medians = {name: float(np.median(times[1:])) / options.steps * 1e3 for name, times in seconds.items()}
    return {
        "median_step_ms": {name: round(value, 2) for name, value in medians.items()},
        "speed_against_plain": {name: round(medians["plain"] / value, 2) for name, value in medians.items()},
        "first_epoch_s": {name: round(times[0], 1) for name, times in seconds.items()},
    }


def prepare(builder: Any, arguments: dict[str, Any], x: np.ndarray, y: np.ndarray, settings: dict[str, Any]) -> Any:
    prefetch = settings.pop("prefetch")
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, strategy="none", **settings))
    with plan.scope():
        model = builder(INPUT_SHAPE, CLASSES, **arguments)
    tfopt.compile(model, plan, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = tfopt.data.pipeline((x, y), batch_size=BATCH, prefetch=prefetch)
    return lambda: model.fit(batches, shuffle=False, verbose=0)


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
