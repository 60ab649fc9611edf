"""The cost of GpuMonitor: the time of a step while it takes ten samples per second, over that without it.

    python benchmarks/profiler_overhead.py

The same model trains on the same data in turns, with the monitor and without; the side that begins alternates. A turn
is a `fit` of two epochs, of which the second is timed. The result is the median of the ratios of two neighbouring
turns, with the interval that holds the true median with 95% probability whatever the distribution (order statistics).
Where there is no GPU the monitor reads the processor load. Results go to benchmarks/results/profiler_overhead.json.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tyro
from mask_overhead import summary
from training_overhead import BATCH, MODELS, Timer, compilation

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 20
    """Number of timed turns of each side."""
    steps: int = 200
    """Steps of an epoch."""
    interval_s: float = 0.1
    """Seconds between two samples."""
    only: tuple[str, ...] = ("mlp", "cnn")
    """Models."""
    out: Path = RESULTS / "profiler_overhead.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    with tfopt.GpuMonitor(0.1) as monitor:
        source = monitor.source
    results = {
        "what": f"training step with GpuMonitor at {1 / options.interval_s:g} samples per second over that without; "
        f"medians over {options.rounds} alternating rounds of {options.steps} steps",
        "device": f"{hardware.cpu_model}, {hardware.logical_cores} cores",
        "source": source,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),
        "models": {name: compare(name, options) for name in options.only},
    }
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def compare(name: str, options: Options) -> dict[str, Any]:
    """Trains one model with the monitor and without, in turns."""
    build, examples = MODELS[name]
    batches = tfopt.data.pipeline(examples(BATCH * options.steps), batch_size=BATCH)
    model = build()
    model.compile(**compilation(), jit_compile=False)

    def turn(monitored: bool) -> Timer:
        timer = Timer()
        watching = [tfopt.GpuMonitor(options.interval_s)] if monitored else []
        model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[timer, *watching])
        return timer

    turn(True)
    wall, processor, steps = [], [], {True: [], False: []}
    for number in range(options.rounds):
        order = (True, False) if number % 2 else (False, True)
        timers = {side: turn(side) for side in order}
        wall.append(timers[True].seconds / timers[False].seconds)
        processor.append(timers[True].processor_seconds / timers[False].processor_seconds)
        for side, timer in timers.items():
            steps[side].append(1e3 * timer.seconds / options.steps)
    result = {
        "step_ms_without": statistics.median(steps[False]),
        "step_ms_with": statistics.median(steps[True]),
        "wall": summary(wall),
        "processor": summary(processor),
    }
    print(f"{name}: {result}", flush=True)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options))
