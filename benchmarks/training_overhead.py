"""The overhead of tfopt's training step compared with Keras' own, and the gain of the plan over Keras' defaults.

    python benchmarks/training_overhead.py

There are two measurements, for an MLP, a CNN and a small transformer:

    overhead  tfopt's step against Keras' with the same settings, on the same data set: time(tfopt) / time(Keras)
    gain      an auto plan with its own pipeline against Keras' defaults on arrays:     time(Keras) / time(tfopt)

Both sides run in one process and take turns. The side that begins also alternates. A turn is a short `fit`, timed from
the end of its first epoch to the end of its last. It therefore contains whole epochs, with all work between them. Each
round gives one ratio of two neighbouring turns. The result is the median over the rounds, because other programs
disturb single turns; the quartiles show the spread. The results also hold the same ratio of the processor time of all
threads of this process. Other programs hardly affect processor time, but it also counts a thread's active waiting.
Results go to benchmarks/results/training_overhead.json. The run takes half an hour on two cores.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from keras import layers

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
CLASSES, BATCH = 10, 64
TOKENS, VOCABULARY, WIDTH, HEADS, BLOCKS = 32, 1000, 64, 4, 2
# Overhead matters most for short steps, as in the MLP, so the MLP is also measured under XLA.
SAME_SETTINGS = (
    ("mlp", {"jit_compile": False, "steps_per_execution": 1}),
    ("mlp", {"jit_compile": False, "steps_per_execution": 10}),
    ("mlp", {"jit_compile": True, "steps_per_execution": 1}),
    ("mlp", {"jit_compile": True, "steps_per_execution": 10}),
    ("cnn", {"jit_compile": False, "steps_per_execution": 1}),
    ("cnn", {"jit_compile": False, "steps_per_execution": 10}),
    ("transformer", {"jit_compile": False, "steps_per_execution": 1}),
    ("transformer", {"jit_compile": False, "steps_per_execution": 10}),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 30
    """Number of timed turns of each side."""
    steps: int = 40
    """Steps per epoch."""
    epochs: int = 2
    """Timed epochs per turn; one more epoch before them is not timed."""
    only: tuple[str, ...] = ("mlp", "cnn", "transformer")
    """Models."""
    quick: bool = False
    """Run two rounds of four steps as a test, not as a measurement."""
    out: Path = RESULTS / "training_overhead.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    if options.quick:
        options = Options(rounds=2, steps=4, epochs=1, only=options.only, out=options.out)
    hardware = detect()
    load = os.getloadavg()[0]
    overhead = [
        {"model": name, **settings, **same_settings(name, settings, options)}
        for name, settings in SAME_SETTINGS
        if name in options.only
    ]
    results = {
        "what": f"training step, batch {BATCH}; medians over {options.rounds} alternating rounds of "
        f"{options.epochs} epochs of {options.steps} steps",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "gpus": [gpu.name for gpu in hardware.gpus],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(load, 2),  # the load of other programs: the machine may be shared
        "overhead": overhead,
        "gain": {name: against_defaults(name, options) for name in options.only},
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def same_settings(name: str, settings: dict[str, Any], options: Options) -> dict[str, Any]:
    """Compares the two steps under the same settings, on the same data set."""
    build, examples = MODELS[name]
    config = tfopt.TrainingConfig(global_batch_size=BATCH, strategy="none", precision="float32", **settings)
    batches = tfopt.data.pipeline(examples(BATCH * options.steps), batch_size=BATCH)
    theirs, ours = build(), build()
    theirs.compile(**compilation(), **settings)
    tfopt.compile(ours, tfopt.plan(config), **compilation())
    turns = {
        "keras": lambda timer: fit(theirs, timer, options, x=batches, shuffle=False),
        "tfopt": lambda timer: fit(ours, timer, options, x=batches, shuffle=False),
    }
    return compare(turns, options, what=f"overhead, {name} {settings}", numerator="tfopt")


def against_defaults(name: str, options: Options) -> dict[str, Any]:
    """Compares an auto plan with Keras' defaults."""
    build, examples = MODELS[name]
    x, y = examples(BATCH * options.steps)
    theirs = build()
    theirs.compile(**compilation())
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH))
    with plan.scope():
        ours = build()
    tfopt.compile(ours, plan, **compilation())
    batches = plan.pipeline((x, y))
    turns = {
        "keras": lambda timer: fit(theirs, timer, options, x=x, y=y, batch_size=BATCH),
        "tfopt": lambda timer: fit(ours, timer, options, x=batches),
    }
    keras_chose = {"jit_compile": theirs.jit_compile, "steps_per_execution": theirs.steps_per_execution}
    tfopt_chose = {decision.setting: decision.value for decision in plan.decisions}
    measured = compare(turns, options, what=f"gain, {name}", numerator="keras")
    return {**measured, "keras_chose": keras_chose, "tfopt_chose": tfopt_chose}


def compilation() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]}


def fit(model: keras.Model, timer: Timer, options: Options, **data: Any) -> None:
    model.fit(**data, epochs=1 + options.epochs, verbose=0, callbacks=[timer])


class Timer(keras.callbacks.Callback):
    """Times one `fit`, from the end of its first epoch to the end of its last. Each `fit` needs a new object."""

    def __init__(self) -> None:
        super().__init__()
        self._made = time.perf_counter()
        self._ends: list[tuple[float, float]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    @property
    def first_epoch_seconds(self) -> float:
        """The time including everything before the first epoch's end."""
        return self._ends[0][0] - self._made

    @property
    def seconds(self) -> float:
        return self._ends[-1][0] - self._ends[0][0]

    @property
    def processor_seconds(self) -> float:
        return self._ends[-1][1] - self._ends[0][1]


def compare(
    turns: dict[str, Callable[[Timer], None]], options: Options, *, what: str, numerator: str
) -> dict[str, Any]:
    """Runs both sides in turns. Prints and returns their step times, and the ratio with its quartiles."""
    steps = options.epochs * options.steps

    def turn(fit_once: Callable[[Timer], None]) -> Timer:
        gc.collect()  # so that no side pays for the garbage collection of the other side
        timer = Timer()
        fit_once(timer)
        return timer

    for fit_once in turns.values():
        turn(fit_once)  # traces and compiles
    rounds = in_turns([partial(turn, fit_once) for fit_once in turns.values()], options.rounds)
    timers = dict(zip(turns, rounds, strict=True))
    keras.backend.clear_session()
    (denominator,) = set(turns) - {numerator}
    seconds = {name: np.array([timer.seconds for timer in timers[name]]) for name in turns}
    processor = {name: np.array([timer.processor_seconds for timer in timers[name]]) for name in turns}
    lower, ratio, upper = np.percentile(seconds[numerator] / seconds[denominator], [25, 50, 75])
    result = {
        "median_step_ms": {name: round(float(np.median(values)) / steps * 1e3, 3) for name, values in seconds.items()},
        f"{numerator}_over_{denominator}": round(float(ratio), 3),
        "quartiles": [round(float(lower), 3), round(float(upper), 3)],
        "processor_time_ratio": round(float(np.median(processor[numerator] / processor[denominator])), 3),
    }
    print(what, result, file=sys.stderr, flush=True)
    return result


def mlp() -> keras.Model:
    return tfopt.models.mlp((32, 32, 3), CLASSES)


def cnn() -> keras.Model:
    return tfopt.models.simple_cnn((32, 32, 3), CLASSES)


def transformer() -> keras.Model:
    """Two blocks of attention and MLP with normalisation before each part, on a short sequence of tokens."""
    tokens = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(BLOCKS):
        normal = layers.LayerNormalization(name=f"norm{number}a")(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"mha{number}")(normal, normal)])
        normal = layers.LayerNormalization(name=f"norm{number}b")(x)
        hidden = layers.Dense(2 * WIDTH, activation="gelu", name=f"up{number}")(normal)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"down{number}")(hidden)])
    pooled = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(tokens, layers.Dense(CLASSES, dtype="float32", name="logits")(pooled), name="transformer")


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.random((count, 32, 32, 3), dtype=np.float32), generator.integers(0, CLASSES, count)


def sentences(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (count, TOKENS), dtype=np.int32)
    return tokens, generator.integers(0, CLASSES, count)


MODELS = {"mlp": (mlp, images), "cnn": (cnn, images), "transformer": (transformer, sentences)}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
