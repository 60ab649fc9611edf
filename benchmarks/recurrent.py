"""Recurrent layers: the time of a call of tfopt's float32 artifact over that of `model.export`.

    python benchmarks/recurrent.py

LSTM and GRU, and a Bidirectional layer of each, of 64 and 128 units on 28, 100 and 256 steps, one and two layers deep,
at batch 1 and 8. Both SavedModels are called in turns in one process. Results go to benchmarks/results/recurrent.json.
--quick runs 12 steps of 8 units for a moment, as a test. The run takes some five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from tfopt.timing import in_turns, seconds_of

RESULTS = Path(__file__).parent / "results"
KINDS = ("LSTM", "GRU", "Bidirectional LSTM", "Bidirectional GRU")


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: tuple[int, ...] = (28, 100, 256)
    """Lengths of the sequences."""
    units: tuple[int, ...] = (64, 128)
    """Units of each layer, and features of the inputs."""
    layers: tuple[int, ...] = (1, 2)
    """Numbers of layers."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    turns: int = 31
    """Turns of both artifacts."""
    seconds: float = 0.01
    """Calls per turn last about so long."""
    quick: bool = False
    """Run one small model of each kind as a test, not as a measurement."""
    out: Path = RESULTS / "recurrent.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    if options.quick:
        options = Options(steps=(12,), units=(8,), layers=(2,), turns=3, seconds=0.001, out=options.out)
    sizes = list(product(KINDS, options.steps, options.units, options.layers))
    names = ("kind", "steps", "units", "layers")
    rows = [dict(zip(names, size, strict=True)) | {"batch": compared(*size, options)} for size in sizes]
    times = [figures["times"] for row in rows for figures in row["batch"].values()]
    results = {
        "what": "milliseconds of a call, medians; times is the median of Keras' over ours in each turn",
        "hardware": detect().to_dict(),
        "load": os.getloadavg()[0],
        "least_times": min(times),
        "median_times": round(median(times), 2),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def compared(kind: str, steps: int, units: int, count: int, options: Options) -> dict[int, dict[str, float]]:
    import keras
    import tensorflow as tf

    import tfopt

    keras.utils.set_random_seed(0)
    made = getattr(keras.layers, kind.split()[-1])
    stack: list[Any] = [made(units, return_sequences=number < count - 1) for number in range(count)]
    if kind.startswith("Bidirectional"):
        stack = [keras.layers.Bidirectional(layer) for layer in stack]
    model = keras.Sequential([keras.Input((steps, units), name="x"), *stack])
    batches = np.random.default_rng(0).normal(size=(max(options.batch_sizes), steps, units)).astype("float32")
    row = {}
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/keras", verbose=False)
        tfopt.export(model, f"{folder}/tfopt")
        loaded = [tf.saved_model.load(f"{folder}/{side}") for side in ("keras", "tfopt")]
        sides = [each.signatures["serving_default"] for each in loaded]
        for batch_size in options.batch_sizes:
            x = tf.constant(batches[:batch_size])
            calls = [partial(side, x=x) for side in sides]
            outputs = [next(iter(call().values())).numpy() for call in calls]
            number = max(1, int(options.seconds / min(seconds_of(calls[0]) for _ in range(3))))
            turns = in_turns([partial(mean_ms, call, number) for call in calls], options.turns)
            row[batch_size] = {
                "keras_ms": round(median(turns[0]), 3),
                "tfopt_ms": round(median(turns[1]), 3),
                "times": round(median(theirs / ours for theirs, ours in zip(*turns, strict=True)), 2),
                "difference": float(np.abs(outputs[0] - outputs[1]).max()),
            }
    print(kind, steps, units, count, row, file=sys.stderr, flush=True)
    return row


def mean_ms(call: Callable[[], Any], number: int) -> float:
    return 1000 * seconds_of(lambda: [call() for _ in range(number)]) / number


if __name__ == "__main__":
    main(tyro.cli(Options))
