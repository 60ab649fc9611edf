"""Training on a GPU: Keras' defaults and the auto plan of tfopt, for ResNet-50, a BERT-base encoder and ConvNeXt-tiny.

    python benchmarks/gpu_training.py

All sides train the same model in one process, in turns:

    keras        float32 and Keras' other defaults, with which it turns XLA on where it thinks that it can. As the plan
                 that is made first, and unlike Keras alone, XLA leaves convolutions unfused: see docs/gpu.md
    keras_half   the same after the one line that a user would add: keras.config.set_dtype_policy("mixed_bfloat16")
    tfopt        the auto plan
    tfopt_plain  the auto plan without XLA. ConvNeXt-tiny is that of keras.applications, whose grouped convolutions are
                 plain operations in our step: whether this is a gain on a GPU, the side answers

The batch is always the same, so the benchmark measures the training step and not the reading of data. Images are copied
to the GPU as uint8. A turn is timed from the end of its first epoch to the end of its second. The memory is the peak
that TensorFlow counts in a side's first turn, above what it held before: the model is not in it, the variables of the
optimizer and the batch are.

MFU (model FLOPs utilization) is the share of the GPU's peak that the model's own arithmetic used:

    MFU = 3 * forward FLOPs * examples_per_second / peak of the dtype that its matrix products run in

A multiplication with its addition counts as 2. Only matrix products and convolutions count: once forward and twice
backward (for the inputs and for the weights). Recomputation does not count. GPU utilization is a different figure: the
share of time in which any kernel ran.

Results go to benchmarks/results/gpu-training-DEVICE.json, those with --no-xla to gpu-training-no-xla-DEVICE.json.
Without a GPU the script ends with exit code 2. --smoke runs two steps of tiny models on any device, and writes results
only with --out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
import tyro
from keras import layers
from page_tables import in_a_name
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
    models: tuple[str, ...] = ("resnet50", "bert_base", "convnext_tiny")
    """Models to train."""
    sides: tuple[Literal["keras", "keras_half", "tfopt", "tfopt_plain"], ...] = (
        *("keras", "keras_half", "tfopt", "tfopt_plain"),
    )
    """How they are trained. The speed of each is compared with that of the auto plan."""
    batch_size: int = 128
    """Examples per step."""
    steps: int = 20
    """Steps per epoch."""
    rounds: int = 5
    """Number of timed turns of each side."""
    xla: bool = True
    """Whether sides may use XLA. Without it, results are those of plain TensorFlow."""
    smoke: bool = False
    """Run two steps of tiny models on any device, and write no results unless --out is given."""
    out: Path = RESULTS
    """Directory for the results."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    if "tfopt" not in options.sides:
        raise SystemExit(f"sides must hold tfopt, with which the others are compared. Received: {options.sides}.")
    if options.smoke:
        options = replace(options, batch_size=4, steps=2, rounds=1)
    elif not hardware.gpus:
        print(f"This benchmark needs a GPU: {hardware.unavailable['gpus']}. Try --smoke.", file=sys.stderr)
        raise SystemExit(NO_GPU)
    plan = tfopt.plan(config(options), hardware)
    results = {
        "what": f"training step, batch {options.batch_size}{'' if options.xla else ', without XLA'}; medians over "
        f"{options.rounds} alternating rounds of {options.steps} steps",
        "device": hardware.gpus[0].name if hardware.gpus else hardware.processor,
        "compute_capability": hardware.gpus[0].compute_capability if hardware.gpus else None,
        "cpu": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "plan": {decision.setting: f"{decision.value} ({decision.reason})" for decision in plan.decisions},
        "models": {},
    }
    for name in options.models:
        results["models"][name] = measure(name, hardware, options)
        print(json.dumps(results["models"][name]), file=sys.stderr, flush=True)
        if not options.smoke or options.out != RESULTS:
            options.out.mkdir(exist_ok=True)
            without = "" if options.xla else "-no-xla"
            file = options.out / f"gpu-training{without}-{in_a_name(str(results['device']))}.json"
            write_text(file, json.dumps(results, indent=2) + "\n")
    return results


def config(options: Options, **settings: Any) -> tfopt.TrainingConfig:
    settings |= {} if options.xla else {"jit_compile": False}
    return tfopt.TrainingConfig(global_batch_size=options.batch_size, strategy="none", **settings)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A compiled model, and what it computes with."""

    model: keras.Model
    precision: str
    monitor: tfopt.GpuMonitor
    """The monitor of its timed turns."""

    def turn(self, data: tf.data.Dataset, monitored: bool = True) -> Timer:
        timer = Timer()
        callbacks = [timer, self.monitor] if monitored else [timer]
        self.model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return timer


def side(name: str, build: Callable[[], keras.Model], hardware: Hardware, options: Options) -> Side:
    if name == "keras":
        settings = {"precision": "float32"}
    elif name == "keras_half":
        settings = {"precision": "mixed_bfloat16"}
    else:
        settings = {"jit_compile": False} if name == "tfopt_plain" else {}
    plan = tfopt.plan(config(options, **settings), hardware)
    with plan.scope():
        model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if name.startswith("keras"):
        model.compile(optimizer="adam", loss=loss, jit_compile="auto" if options.xla else False)
    else:
        tfopt.compile(model, plan, loss=loss)
    return Side(model=model, precision=plan.precision, monitor=tfopt.GpuMonitor(interval_s=0.1))


def measure(name: str, hardware: Hardware, options: Options) -> dict[str, Any]:
    build, tiny, examples = MODELS[name]
    build = partial(build, **(tiny if options.smoke else {}))
    sides = {each: side(each, build, hardware, options) for each in options.sides}
    batch = examples(sides["tfopt"].model, options.batch_size)
    data = tf.data.Dataset.from_tensors(batch).repeat(options.steps).prefetch(2)
    first, memory = {}, {}
    for each, of_side in sides.items():
        before = memory_now(hardware)
        first[each] = of_side.turn(data, monitored=False)
        memory[each] = memory_now(hardware, above=before)
        print(f"{name}, {each}: first epoch {first[each].first_epoch_seconds:.1f} s", file=sys.stderr, flush=True)
    rounds = in_turns([partial(each.turn, data) for each in sides.values()], options.rounds)
    seconds = {
        each: [timer.seconds / options.steps for timer in timers] for each, timers in zip(sides, rounds, strict=True)
    }
    flops = tfopt.count_flops(sides["tfopt"].model).flops
    result: dict[str, Any] = {"forward_gflop_per_example": round(flops / 1e9, 3)}
    tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    for each, of_side in sides.items():
        step = float(np.median(seconds[each]))
        rate = options.batch_size / step
        dtype, peak = matrix_peak(hardware, precision=of_side.precision, tensor_float_32=tensor_float_32)
        lower, ratio, upper = np.percentile(np.divide(seconds[each], seconds["tfopt"]), [25, 50, 75])
        result[each] = {
            "precision": of_side.precision,
            "tensor_float_32": tensor_float_32,
            "jit_compile": of_side.model.jit_compile,
            "steps_per_execution": of_side.model.steps_per_execution,
            "examples_per_second": round(rate, 1),
            "step_time_ms": round(step * 1e3, 3),
            "time_over_tfopt": round(float(ratio), 3),
            "quartiles": [round(float(lower), 3), round(float(upper), 3)],
            # The time of the very first epoch minus its steps: tracing, compilation, set-up.
            "startup_s": round(first[each].first_epoch_seconds - step * options.steps, 1),
            "mfu": None if peak is None else round(3 * flops * rate / (peak * 1e12), 4),
            "mfu_peak": "unavailable (no peak is known for this device)"
            if peak is None
            else f"{peak} TFLOP/s, {dtype}",
            "step_memory_bytes": memory[each],
            **utilization(of_side.monitor),
        }
    ledger = tfopt.ledger(sides["tfopt"].model)
    result["tfopt"] |= {
        "trace_s": round(ledger.trace_seconds, 2),
        "compile_s": round(ledger.compile_seconds, 2),
        "xla_fallback": ledger.fallback,
    }
    keras.backend.clear_session()
    return result


def memory_now(hardware: Hardware, above: int | None = None) -> int | None:
    """Returns the bytes that TensorFlow holds on the GPU, and counts its peak anew; or that peak above some bytes."""
    if not hardware.gpus:
        return None
    info = tf.config.experimental.get_memory_info("GPU:0")
    if above is not None:
        return int(info["peak"]) - above
    tf.config.experimental.reset_memory_stats("GPU:0")
    return int(info["current"])


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


def convnext_tiny(size: int = 224) -> keras.Model:
    """ConvNeXt-tiny as keras.applications builds it, on images of uint8."""
    images = keras.Input((size, size, 3), dtype="uint8", name="image")
    network = keras.applications.ConvNeXtTiny(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None
    )
    return keras.Model(images, network(images), name="convnext_tiny")


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
    "convnext_tiny": (convnext_tiny, {"size": 32}, images),
    "bert_base": (bert, {"length": 8, "depth": 2, "width": 32, "heads": 4, "units": 128, "vocabulary": 50}, sentences),
}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
