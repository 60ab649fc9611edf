"""Training on a GPU: Keras' defaults and the auto plan of tfopt, for ResNet-50 and a BERT-base encoder.

    python benchmarks/gpu_training.py

Both sides train the same model in one process, in turns. The batch is always the same, so the benchmark measures the
training step and not the reading of data. Images are copied to the GPU as uint8. A turn is timed from the end of its
first epoch to the end of its second.

MFU (model FLOPs utilization) is the share of the GPU's peak that the model's own arithmetic used:

    MFU = 3 * forward FLOPs * examples_per_second / peak of the dtype that its matrix products run in

A multiplication with its addition counts as 2. Only matrix products and convolutions count: once forward and twice
backward (for the inputs and for the weights). Recomputation does not count. GPU utilization is a different figure: the
share of time in which any kernel ran.

Results go to benchmarks/results/gpu-training-DEVICE.json. Without a GPU the script ends with exit code 2. --smoke runs
two steps of tiny models on any device, and writes results only with --out.
"""

from __future__ import annotations

import json
import re
import sys
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
from training_overhead import Timer

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import Hardware, detect
from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
CLASSES = 1000
NO_GPU = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("resnet50", "bert_base")
    """Models to train."""
    batch_size: int = 128
    """Examples per step."""
    steps: int = 40
    """Steps per epoch."""
    rounds: int = 6
    """Number of timed turns of each side."""
    smoke: bool = False
    """Run two steps of tiny models on any device, and write no results unless --out is given."""
    out: Path = RESULTS
    """Directory for the results."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    if options.smoke:
        options = Options(models=options.models, batch_size=4, steps=2, rounds=1, smoke=True, out=options.out)
    elif not hardware.gpus:
        print(f"This benchmark needs a GPU: {hardware.unavailable['gpus']}. Try --smoke.", file=sys.stderr)
        raise SystemExit(NO_GPU)
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=options.batch_size, strategy="none"), hardware)
    results = {
        "what": f"training step, batch {options.batch_size}; medians over {options.rounds} alternating rounds of "
        f"{options.steps} steps",
        "device": hardware.gpus[0].name if hardware.gpus else hardware.cpu_model,
        "compute_capability": hardware.gpus[0].compute_capability if hardware.gpus else None,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "plan": {decision.setting: f"{decision.value} ({decision.reason})" for decision in plan.decisions},
        "models": {name: measure(name, plan, hardware, options) for name in options.models},
    }
    if not options.smoke or options.out != RESULTS:
        options.out.mkdir(exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", str(results["device"]).lower()).strip("-")
        write_text(options.out / f"gpu-training-{device}.json", json.dumps(results, indent=2) + "\n")
    return results


def measure(name: str, plan: tfopt.Plan, hardware: Hardware, options: Options) -> dict[str, Any]:
    build, tiny, examples = MODELS[name]
    arguments = tiny if options.smoke else {}
    theirs = build(**arguments)
    theirs.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with plan.scope():
        ours = build(**arguments)
    tfopt.compile(ours, plan, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    models = {"keras": theirs, "tfopt": ours}
    chosen = {
        "keras": {
            "precision": "float32",
            "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        },
        "tfopt": {"precision": plan.precision, "tensor_float_32": plan.tensor_float_32},
    }
    batch = examples(theirs, options.batch_size)
    data = tf.data.Dataset.from_tensors(batch).repeat(options.steps).prefetch(2)
    monitors = {side: tfopt.GpuMonitor(interval_s=0.1) for side in models}

    def turn(side: str, monitored: bool = True) -> Timer:
        timer = Timer()
        callbacks = [timer, monitors[side]] if monitored else [timer]
        models[side].fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return timer

    first = {side: turn(side, monitored=False) for side in models}
    rounds = in_turns([partial(turn, side) for side in models], options.rounds)
    seconds = {
        side: [timer.seconds / options.steps for timer in timers] for side, timers in zip(models, rounds, strict=True)
    }
    flops = tfopt.count_flops(theirs).flops
    per_round = np.divide(seconds["keras"], seconds["tfopt"])
    lower, ratio, upper = np.percentile(per_round, [25, 50, 75])
    result: dict[str, Any] = {
        "forward_gflop_per_example": round(flops / 1e9, 3),
        "keras_over_tfopt": round(float(ratio), 3),
        "quartiles": [round(float(lower), 3), round(float(upper), 3)],
    }
    for side in models:
        step = float(np.median(seconds[side]))
        rate = options.batch_size / step
        dtype, peak = matrix_peak(hardware, **chosen[side])
        result[side] = {
            **chosen[side],
            "jit_compile": models[side].jit_compile,
            "steps_per_execution": models[side].steps_per_execution,
            "examples_per_second": round(rate, 1),
            "step_time_ms": round(step * 1e3, 3),
            # The time of the very first epoch minus its steps: tracing, compilation, set-up.
            "startup_s": round(first[side].first_epoch_seconds - step * options.steps, 1),
            "mfu": None if peak is None else round(3 * flops * rate / (peak * 1e12), 4),
            "mfu_peak": "unavailable (no peak is known for this device)"
            if peak is None
            else f"{peak} TFLOP/s, {dtype}",
            **utilization(monitors[side]),
        }
    ledger = tfopt.ledger(ours)
    result["tfopt"] |= {
        "trace_s": round(ledger.trace_seconds, 2),
        "compile_s": round(ledger.compile_seconds, 2),
        "xla_fallback": ledger.fallback,
    }
    keras.backend.clear_session()
    return result


def matrix_peak(hardware: Hardware, *, precision: str, tensor_float_32: bool) -> tuple[str, float | None]:
    """Returns the dtype of matrix products, and the first GPU's peak for this dtype in 10^12 operations per second."""
    peaks = (hardware.gpus[0].peak_tflops if hardware.gpus else None) or {}
    dtype = precision.removeprefix("mixed_")
    if dtype == "float32" and tensor_float_32 and "tensorfloat32" in peaks:
        dtype = "tensorfloat32"
    return dtype, peaks.get(dtype)


def utilization(monitor: tfopt.GpuMonitor) -> dict[str, Any]:
    """Returns the monitor's figures of the first GPU. They cover whole fits, including the ends of epochs."""
    summary = monitor.summary()
    return {
        "gpu_utilization_percent": summary.get("gpu0_gpu_utilization_percent_mean"),
        "memory_peak_bytes": summary.get("gpu0_memory_used_bytes_max"),
        "utilization_source": monitor.source,
    }


def resnet50(size: int = 224) -> keras.Model:
    """ResNet-50 on images of uint8."""
    images = keras.Input((size, size, 3), dtype="uint8", name="image")
    scaled = layers.Rescaling(1 / 127.5, offset=-1, name="scale")(images)
    return keras.Model(images, tfopt.models.resnet50((size, size, 3), CLASSES)(scaled), name="resnet50")


def bert(length: int = 128, **arguments: int) -> keras.Model:
    """The encoder of BERT-base on sentences of one length: no token fills short ones."""
    return tfopt.models.text_encoder((length,), CLASSES, max_length=length, pad_token=None, **arguments)


def images(model: keras.Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (count, *model.input_shape[1:]), dtype=np.uint8)
    return x, generator.integers(0, CLASSES, count)


def sentences(model: keras.Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    vocabulary = model.get_layer("embedding").input_dim
    x = generator.integers(0, vocabulary, (count, *model.input_shape[1:]), dtype=np.int32)
    return x, generator.integers(0, CLASSES, count)


# Each model with its arguments for a tiny version, and its data.
MODELS: dict[str, tuple[Callable[..., keras.Model], dict[str, int], Callable[..., tuple[np.ndarray, np.ndarray]]]] = {
    "resnet50": (resnet50, {"size": 32}, images),
    "bert_base": (bert, {"length": 8, "depth": 2, "width": 32, "heads": 4, "units": 128, "vocabulary": 50}, sentences),
}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
