"""The noise scale that the training step measures, against the exact one, and what measuring it costs.

    python benchmarks/noise_scale.py

Three small models on the digits of scikit-learn. At fixed weights (a learning rate of 0), before and after some epochs
of training, `tfopt.NoiseScale` measures batches that are drawn with replacement: from micro-batches, and from the
halves of batches of one part. The exact noise scale is computed from the gradient of each of the examples.

The cost is the time of a step with the callback over that without it, in turns of a short `fit`. The callback measures
OFTEN times as often as by default, and what it adds is divided by OFTEN: so the cost by default is told from the noise
of a machine that others use too. The interval is that of the median.

Results go to benchmarks/results/noise_scale.json. The run takes ten minutes on two cores.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from sklearn.datasets import load_digits
from training_overhead import Timer
from write_pages import write_pages

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import estimate, in_turns
from tfopt.training.step.noise import EVERY

RESULTS = Path(__file__).parent / "results"
CLASSES, BATCH = 10, 64
PARTS = {"micro-batches": 4, "halves": 1}  # the accumulate of each way of measuring
STEPS, OFTEN = 512, 16  # steps of a timed epoch, and how many times as often as by default they are measured


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: int = 1500
    """Number of batches that an estimate averages."""
    epochs: int = 8
    """Number of epochs of training before the second estimate."""
    turns: int = 40
    """Number of timed turns of each side."""
    only: tuple[str, ...] = ("MLP", "CNN", "transformer")
    """Models to measure. The results of the others stay."""
    costs: bool = False
    """Measure the costs alone; the estimates stay."""
    quick: bool = False
    """Take few steps as a test, not as a measurement."""
    out: Path = RESULTS / "noise_scale.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    if options.quick:
        options = replace(options, steps=20, epochs=1, turns=2)
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype("float32"), digits.target
    before = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    results: dict[str, Any] = {
        "what": f"noise scale of {len(x)} digits, from {options.steps} batches of {BATCH} drawn with replacement",
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "every": EVERY,
        "models": before,
    }
    for name, build in ((name, MODELS[name]) for name in options.only):
        results["models"][name] = {
            "parameters": build().count_params(),
            "estimates": before[name]["estimates"] if options.costs else list(estimates(build, x, y, options)),
            "turns": options.turns,
            "cost": {way: cost(build, x, y, accumulate, options) for way, accumulate in PARTS.items()},
        }
        print(name, results["models"][name], file=sys.stderr, flush=True)
    errors = [abs(each["error"]) for model in results["models"].values() for each in model["estimates"]]
    costs = [way["cost"] for model in results["models"].values() for way in model["cost"].values()]
    results |= {"largest_error": max(errors), "largest_cost": max(costs)}
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    if options.out == Options().out:
        write_pages()
    return results


def estimates(build: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray, options: Options) -> Any:
    """Yields the estimates of both ways, before and after training."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    for epochs in (0, options.epochs):
        model.compile("adam", loss())
        if epochs:
            model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
        expected = exact(model, x, y)
        chosen = np.random.default_rng(0).integers(0, len(x), options.steps * BATCH)
        for way, accumulate in PARTS.items():
            compiled(model, accumulate, keras.optimizers.SGD(0.0))
            noise = tfopt.NoiseScale(every=1, momentum=1 - 1e-9)
            model.fit(batches(x[chosen], y[chosen]), verbose=0, callbacks=[noise])
            found = noise.report.last
            yield {
                "epochs": epochs,
                "way": way,
                "exact": expected,
                **found.to_dict(),
                "error": None if found.noise_scale is None else found.noise_scale / expected - 1,
            }


def exact(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Returns the noise scale from the gradient of each example."""

    @tf.function
    def gradient(one: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = keras.losses.sparse_categorical_crossentropy(target, model(one), from_logits=True)
        found = tape.gradient(value, [each.value for each in model.trainable_weights])
        return tf.concat([tf.reshape(each, [-1]) for each in found], 0)

    total, squares = 0.0, 0.0
    for one in range(len(x)):
        each = gradient(tf.constant(x[one : one + 1]), tf.constant(y[one : one + 1])).numpy().astype("float64")
        total, squares = total + each, squares + np.sum(each**2)
    mean = np.sum((total / len(x)) ** 2)
    return float((squares / len(x) - mean) / mean)


def cost(
    build: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray, accumulate: int, options: Options
) -> dict[str, Any]:
    """Returns what the callback adds to a step by default, as a share of the step without it."""
    keras.backend.clear_session()
    chosen = np.random.default_rng(0).integers(0, len(x), STEPS * BATCH)
    data = batches(x[chosen], y[chosen]).cache().prefetch(2)
    sides = []
    for callbacks in ([tfopt.NoiseScale(every=EVERY // OFTEN)], []):
        model = build()
        compiled(model, accumulate, "adam")
        sides.append(partial(turn, model, data, callbacks))
    for side in sides:
        side()  # traces
    measured, plain = in_turns(sides, options.turns)
    pairs = list(zip(measured, plain, strict=True))
    added = estimate([(one.seconds / other.seconds - 1) / OFTEN for one, other in pairs])
    processor = estimate([(one.processor_seconds / other.processor_seconds - 1) / OFTEN for one, other in pairs])
    return {
        "step_ms": round(float(np.median([each.seconds for each in plain])) / STEPS * 1e3, 3),
        "cost": round(added.median, 5),
        "interval": [round(added.least, 5), round(added.most, 5)],
        "cost_in_processor_time": round(processor.median, 5),
    }


def turn(model: keras.Model, data: tf.data.Dataset, callbacks: list[Any]) -> Timer:
    gc.collect()
    timer = Timer()
    model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, timer])
    return timer


def compiled(model: keras.Model, accumulate: int, optimizer: Any) -> None:
    config = tfopt.TrainingConfig(
        precision="float32", strategy="none", global_batch_size=BATCH, accumulate=accumulate, steps_per_execution=16
    )
    tfopt.compile(model, tfopt.plan(config), optimizer=optimizer, loss=loss())


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def mlp() -> keras.Model:
    return tfopt.models.mlp((8, 8, 1), CLASSES, units=(64, 32))


def cnn() -> keras.Model:
    return tfopt.models.simple_cnn((8, 8, 1), CLASSES, filters=(8,), kernel_size=3, units=(32,))


def transformer() -> keras.Model:
    return tfopt.models.vit((8, 8, 1), CLASSES, patch_size=2, width=16, depth=2, heads=2, mlp_units=32)


MODELS = {"MLP": mlp, "CNN": cnn, "transformer": transformer}

if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
