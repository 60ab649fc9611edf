"""The cost of pruning masks in training: the time of a step with masks that change every 100 steps, over that without.

    python benchmarks/mask_overhead.py

Both sides train the same model on the same data set in one process, and take turns; the side that begins alternates. A
turn is a `fit` of two epochs of 100 steps, of which the second is timed. Before each step 0 of an epoch the masks are
chosen anew, for a sparsity that rises with every update, so each timed epoch contains one update. Each round gives one
ratio of two neighbouring turns. The result is the median of the ratios, with the interval that holds the true median
with 95% probability whatever the distribution (order statistics). The processor time of all threads is compared in the
same way; other programs hardly affect it. Results go to benchmarks/results/mask_overhead.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from training_overhead import BATCH, MODELS, Timer, compilation

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import estimate, in_turns

RESULTS = Path(__file__).parent / "results"
FREQUENCY = 100


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 20
    """Number of timed turns of each side."""
    frequency: int = FREQUENCY
    """Steps between two updates of the masks, and per epoch."""
    only: tuple[str, ...] = ("mlp", "cnn", "transformer")
    """Models."""
    xla: bool = False
    """Whether XLA compiles the step. It joins the masks with the update of the weights."""
    quick: bool = False
    """Run two rounds of four steps as a test, not as a measurement."""
    out: Path = RESULTS / "mask_overhead.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    if options.quick:
        options = Options(rounds=2, frequency=4, only=options.only, xla=options.xla, out=options.out)
    hardware = detect()
    results = {
        "what": f"training step with masks over that without, batch {BATCH}; medians over {options.rounds} alternating "
        f"rounds of {options.frequency} steps with one update of the masks",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),  # of other programs: the machine may be shared
        "models": {name: compare(name, options) for name in options.only},
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def compare(name: str, options: Options) -> dict[str, Any]:
    """Trains one model with masks and a second one without, in turns."""
    build, examples = MODELS[name]
    batches = tfopt.data.pipeline(examples(BATCH * options.frequency), batch_size=BATCH)
    sides = {"plain": build(), "masked": build()}
    for model in sides.values():
        model.compile(**compilation(), jit_compile=options.xla)
    turns = 0

    def turn(side: str) -> Timer:
        nonlocal turns
        timer = Timer()
        callbacks: list[Any] = [timer]
        if side == "masked":
            turns += 1
            low, high = (0.9 * (1 - 1 / (turns + share)) for share in (0, 0.5))  # masks never lose zeros
            config = tfopt.PruningConfig(
                target_sparsity=high,
                schedule=lambda step: high if step else low,
                frequency=options.frequency,
                gradient_batches=1,
            )
            callbacks.insert(0, tfopt.PruningSchedule(sides[side], config))
        gc.collect()  # so that no side pays for the garbage collection of the other side
        sides[side].fit(batches, epochs=2, verbose=0, callbacks=callbacks, shuffle=False)
        return timer

    for side in sides:
        turn(side)  # traces
    rounds = in_turns([partial(turn, side) for side in sides], options.rounds)
    timers = dict(zip(sides, rounds, strict=True))
    keras.backend.clear_session()
    seconds = {side: np.array([timer.seconds for timer in timers[side]]) for side in sides}
    processor = {side: np.array([timer.processor_seconds for timer in timers[side]]) for side in sides}
    result = {
        "weights": int(sum(np.prod(v.shape) for v in sides["masked"].trainable_variables if len(v.shape) > 1)),
        "median_step_ms": {
            side: round(float(np.median(each)) / options.frequency * 1e3, 3) for side, each in seconds.items()
        },
        "masked_over_plain": summary(seconds["masked"] / seconds["plain"]),
        "processor_time_ratio": summary(processor["masked"] / processor["plain"]),
    }
    print(name, result, file=sys.stderr, flush=True)
    return result


def summary(ratios: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns the median of ratios and its 95% interval."""
    found = estimate(ratios)
    return {
        "median": round(float(found.median), 3),
        "interval": [round(float(found.least), 3), round(float(found.most), 3)],
    }


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
