"""The estimate of tfopt.training_memory against the measured peak of a training.

    python benchmarks/training_memory.py [--only resnet_cifar_32 ...]

Each cell trains in a process of its own, by Keras' `fit` under a plan without XLA. The measured figure has two parts.
Weights, variables of the optimizer and the batch are counted. To them comes the peak of the resident memory in `fit`,
above that of the process at rest between two calls, which already holds them, the graph and TensorFlow itself. It is
the median over several calls, after a first one that is not measured. glibc gives freed blocks back to the system at
once. oneDNN is off, because it allocates from a pool that keeps what is freed. The estimate holds the tensors alone;
the difference is the work space of the kernels and what two threads compute at the same time.

Results go to benchmarks/results/training_memory.json: `median_error` and `largest_error` are relative to the measured
peak. The run takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

RESULTS = Path(__file__).parent / "results" / "training_memory.json"
STEPS, ROUNDS = 2, 3
# Blocks above this size are mapped by themselves, and go back to the system when they are freed.
MMAP_THRESHOLD = 65_536


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model that is trained.

    Attributes:
        builder: Name of the builder.
        input_shape: Shape of one example.
        outputs: Number of classes.
        arguments: Arguments of the builder.
        batch_sizes: The batch sizes, each a cell.
        precisions: The dtype policies, each a cell.
        tokens: Whether the inputs are whole numbers, below this; 0 for values.
        optimizer: Name of the optimizer.
    """

    builder: str
    input_shape: tuple[int, ...]
    outputs: int = 10
    arguments: dict[str, Any]
    batch_sizes: tuple[int, int]
    precisions: tuple[str, ...] = ("float32",)
    tokens: int = 0
    optimizer: str = "adam"


CASES: dict[str, Case] = {
    "mlp_4096": Case(builder="mlp", input_shape=(784,), arguments={"units": (4096, 4096)}, batch_sizes=(64, 2048)),
    "simple_cnn_128": Case(builder="simple_cnn", input_shape=(128, 128, 3), arguments={}, batch_sizes=(128, 512)),
    "resnet_cifar_20": Case(
        builder="resnet_cifar",
        input_shape=(32, 32, 3),
        arguments={"depth": 20},
        batch_sizes=(128, 512),
        precisions=("float32", "mixed_bfloat16"),
        optimizer="sgd",
    ),
    "mobilenet_v2_96": Case(builder="mobilenet_v2", input_shape=(96, 96, 3), arguments={}, batch_sizes=(16, 64)),
    "resnet50_128": Case(builder="resnet50", input_shape=(128, 128, 3), arguments={}, batch_sizes=(4, 16)),
    "vit_tiny_64": Case(
        builder="vit",
        input_shape=(64, 64, 3),
        arguments={"patch_size": 8},
        batch_sizes=(32, 128),
        precisions=("float32", "mixed_bfloat16"),
        optimizer="adamw",
    ),
    "lstm_100": Case(builder="lstm", input_shape=(100, 32), arguments={"units": (256,)}, batch_sizes=(64, 256)),
    "unet_128": Case(
        builder="unet", input_shape=(128, 128, 3), arguments={"width": 16, "depth": 4}, batch_sizes=(8, 32), outputs=4
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Cases to run, all by default. The results of the others stay."""
    cell: str | None = None
    """Internal: run one cell in this process, given as JSON, and print the figures."""


def main(options: Options) -> None:
    if options.cell is not None:
        print(json.dumps(run_cell(json.loads(options.cell))))
        return
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": []}
    names = options.only or tuple(CASES)
    cells = [cell for cell in recorded["cells"] if cell["case"] not in names and cell["case"] in CASES]
    for name in names:
        case = CASES[name]
        for precision in case.precisions:
            for batch_size in case.batch_sizes:
                cells.append(_start({"case": name, "batch_size": batch_size, "precision": precision}))
                print(cells[-1], flush=True)
                write(sorted(cells, key=lambda cell: list(CASES).index(cell["case"])))


def write(cells: list[dict[str, Any]]) -> None:
    import tensorflow as tf

    from tfopt.atomic.files import write_text

    errors = [abs(cell["relative_error"]) for cell in cells]
    results = {
        "what": f"weights, optimizer and batch, and the peak of {STEPS} training steps above the process at rest, "
        f"median of {ROUNDS}; without XLA and oneDNN, on a CPU",
        "tensorflow": tf.__version__,
        "median_error": round(median(errors), 3),
        "largest_error": round(max(errors), 3),
        "cells": cells,
    }
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")


def _start(cell: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(MMAP_THRESHOLD),
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"The cell {cell} failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures the peak of one training, and estimates it."""
    import tfopt
    from tfopt.models import BUILDERS

    case, batch_size = CASES[cell["case"]], cell["batch_size"]
    plan = tfopt.plan(
        tfopt.TrainingConfig(
            global_batch_size=batch_size, precision=cell["precision"], jit_compile=False, strategy="none"
        )
    )
    with plan.scope():
        model = BUILDERS[case.builder](case.input_shape, case.outputs, **case.arguments)
    data = train(model, plan, case, batch_size)
    peaks = []
    for _ in range(ROUNDS):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free inside the heap goes back to the system too
        at_rest = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        model.fit(data, verbose=0, shuffle=False)
        peaks.append(resident("VmHWM") - at_rest)
    estimate = tfopt.training_memory(model, batch_size, optimizer=case.optimizer)
    held = estimate.weights_bytes + estimate.optimizer_bytes + estimate.input_bytes
    measured = held + int(median(peaks))
    return {
        **cell,
        "measured_bytes": measured,
        "measured_range_bytes": [held + min(peaks), held + max(peaks)],
        "estimated_bytes": estimate.total_bytes,
        "relative_error": round(estimate.total_bytes / measured - 1, 3),
        "parts": {name: value for name, value in estimate.to_dict().items() if name.endswith("_bytes")},
    }


def train(model: Any, plan: Any, case: Case, batch_size: int) -> Any:
    """Trains for a few steps, and returns the data."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfopt

    tfopt.compile(
        model, plan, optimizer=case.optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    shape = (batch_size, *case.input_shape)
    make: Callable[[], Any] = (
        (lambda: tf.random.uniform(shape, maxval=case.tokens, dtype=tf.int32))
        if case.tokens
        else (lambda: tf.random.uniform(shape))
    )
    targets = np.zeros((batch_size, *model.output_shape[1:-1]), np.int32)
    data = tf.data.Dataset.from_tensors((make(), targets)).repeat(STEPS)
    model.fit(data, verbose=0, shuffle=False)
    return data


def resident(name: str) -> int:
    """Returns a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
