"""The cost of GpuMonitor: the time of a step while it takes ten samples per second, over that without it.

    python benchmarks/profiler_overhead.py

The same model trains on the same data in turns, with the monitor and without; the side that begins alternates. A turn
is a `fit` of six epochs. The fastest but the first counts, as in timeit: other programs only make epochs longer. The
result is the median of the ratios of two neighbouring turns, with the interval that holds the true median with 95%
probability whatever the distribution (order statistics). `thread_share` is the processor time of the monitor's thread
over the time of the turns. Where there is no GPU the monitor reads the processor load. Results go to
benchmarks/results/profiler_overhead.json.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tyro
from mask_overhead import summary
from training_overhead import BATCH, MODELS, compilation

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 20
    """Number of timed turns of each side."""
    steps: int = 100
    """Steps of an epoch."""
    epochs: int = 5
    """Timed epochs of a turn; one more epoch before them is not timed."""
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
        f"medians over {options.rounds} alternating rounds, of each the fastest of {options.epochs} epochs of "
        f"{options.steps} steps",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "source": source,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),
        "models": {name: compare(name, options) for name in options.only},
    }
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


class Timer(keras.callbacks.Callback):
    """Times the epochs of a `fit` after the first one, and the monitor's thread meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []
        self._busy: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._ends.append(time.perf_counter())
        self._busy.append(monitor_seconds())

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest epoch."""
        return min(end - begin for begin, end in pairwise(self._ends))

    @property
    def thread_share(self) -> float:
        """The processor time of the monitor's thread over the time of the epochs."""
        return (self._busy[-1] - self._busy[0]) / (self._ends[-1] - self._ends[0])


def monitor_seconds() -> float:
    """Returns the processor time of the monitor's thread until now; 0 without one. Linux counts it in nanoseconds."""
    for thread in threading.enumerate():
        if thread.name == "tfopt-GpuMonitor":
            return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def compare(name: str, options: Options) -> dict[str, Any]:
    """Trains one model with the monitor and without, in turns."""
    build, examples = MODELS[name]
    batches = tfopt.data.pipeline(examples(BATCH * options.steps), batch_size=BATCH)
    model = build()
    model.compile(**compilation(), jit_compile=False)

    def turn(monitored: bool) -> Timer:
        timer = Timer()
        watching = [tfopt.GpuMonitor(options.interval_s)] if monitored else []
        model.fit(batches, epochs=1 + options.epochs, verbose=0, shuffle=False, callbacks=[timer, *watching])
        return timer

    turn(True)
    without, monitored = in_turns([lambda: turn(False), lambda: turn(True)], options.rounds)
    result = {
        "step_ms_without": statistics.median(1e3 * timer.fastest_s / options.steps for timer in without),
        "step_ms_with": statistics.median(1e3 * timer.fastest_s / options.steps for timer in monitored),
        "ratio": summary([one.fastest_s / other.fastest_s for one, other in zip(monitored, without, strict=True)]),
        "thread_share": round(statistics.median(timer.thread_share for timer in monitored), 5),
    }
    print(f"{name}: {result}", flush=True)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options))
