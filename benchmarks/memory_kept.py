"""What memory trained models leave behind: several are trained in one process, one after the other, and dropped.

    python benchmarks/memory_kept.py

TensorFlow registers a gradient for each trace of a training step, with the graph and all variables that it has
captured, and never removes it. Keras' step leaves it; tfopt's removes it. Each side trains in processes of its own, in
turns with the other. After each model, collected garbage included, the process says how much memory is resident. The
result is the median over the rounds of the growth for each model after the first. Results go to
benchmarks/results/memory_kept.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

RESULTS = Path(__file__).parent / "results"
SIDES = ("keras", "tfopt")
WIDTH = 4000


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 3
    """Number of processes of each side."""
    models: int = 6
    """Models that a process trains."""
    quick: bool = False
    """Run one round of three models as a test, not as a measurement."""
    out: Path = RESULTS / "memory_kept.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    if options.quick:
        options = Options(rounds=1, models=3, out=options.out)
    found: dict[str, list[list[int]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES[:: 1 if number % 2 == 0 else -1]:
            command = [sys.executable, __file__, side, str(options.models)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1])["resident_mib"])
    hardware = detect()
    results = {
        "what": f"resident MiB after each of {options.models} perceptrons that a process trained and dropped, and the "
        f"median growth for each after the first",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "parameters": (2000 + 1) * WIDTH + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10,
        "resident_mib": found,
        "growth_mib": {
            side: round(statistics.median((each[-1] - each[0]) / (len(each) - 1) for each in rows))
            for side, rows in found.items()
        },
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def train(side: str, models: int) -> list[int]:
    """Trains models one after the other, and returns the resident MiB after each."""
    import gc

    import keras
    import numpy as np
    import psutil

    import tfopt

    x, y = np.zeros((64, 2000), "float32"), np.zeros(64, "int32")
    resident = []
    for _ in range(models):
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((2000,)), *hidden, keras.layers.Dense(10)])
        settings = {"optimizer": "adam", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        if side == "keras":
            model.compile(**settings)
        else:
            plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", strategy="none", jit_compile=False))
            tfopt.compile(model, plan, **settings)
        model.fit(x, y, batch_size=16, verbose=0)
        del model, hidden, settings
        gc.collect()
        resident.append(psutil.Process().memory_info().rss >> 20)
    return resident


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SIDES:
        print(json.dumps({"resident_mib": train(sys.argv[1], int(sys.argv[2]))}))
    else:
        print(json.dumps(main(tyro.cli(Options)), indent=2))
