"""What tfopt's profiler says on a real GPU: the monitor's cost and figures, the diagnosis, the share of tensor cores.

    python benchmarks/gpu_profile.py

    cost    the time of a step with GpuMonitor at ten samples per second, over that without; see profiler_overhead.py
    load    the monitor's figures while large matrix products keep the GPU busy, and while it is idle. The utilization
            must be near 100%. The energy that NVML counts stands beside the sum of power over time
    models  the breakdown and the diagnoses of `tfopt.diagnose`, in float32 and in half precision, with the MFU, and the
            share of kernels in tensor cores from a trace of TensorFlow's profiler

Results go to benchmarks/results/gpu-profile.json. Without a GPU the script says so, writes nothing and ends with exit
code 0. --smoke runs all parts for a moment on any device and writes no results.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_training
import keras
import profiler_overhead
import pynvml
import six_models
import tensorflow as tf
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import Hardware, detect

RESULTS = Path(__file__).parent / "results"
PRODUCTS = 50
SHOWN_OPERATORS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 20
    """Number of timed turns with the monitor, and as many without."""
    steps: int = 1000
    """Steps of a turn."""
    load_seconds: float = 10.0
    """Seconds in which matrix products keep the GPU busy."""
    size: int = 8192
    """Rows and columns of the matrices."""
    models: tuple[str, ...] = ("transformer", "unet", "resnet50", "bert_base")
    """Models to diagnose."""
    watched_steps: int = 200
    """Steps that the diagnosis watches."""
    smoke: bool = False
    """Run all parts for a moment on any device, and write no results unless --out is given."""
    out: Path = RESULTS / "gpu-profile.json"
    """Path of the results file."""


SMOKE = Options(rounds=1, steps=4, load_seconds=0.3, size=64, models=("unet",), watched_steps=8, smoke=True)


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    if options.smoke:
        options = replace(SMOKE, out=options.out)
    elif not hardware.gpus:
        print(f"skipped, because it needs a GPU: {hardware.unavailable['gpus']}")
        return {}
    half = half_precision(hardware)
    overhead = profiler_overhead.Options(rounds=options.rounds, steps=options.steps)
    build = tf.sysconfig.get_build_info()
    results = {
        "what": f"GpuMonitor, tfopt.diagnose and traces on a GPU; the cost over {options.rounds} alternating rounds of "
        f"{options.steps} steps",
        "device": hardware.gpus[0].name if hardware.gpus else hardware.processor,
        "driver": driver(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "cost": {name: attempt(lambda name=name: profiler_overhead.compare(name, overhead)) for name in ("mlp", "cnn")},
        "load": attempt(lambda: load(options, hardware, half)),
        "models": {
            name: {
                precision: attempt(lambda name=name, precision=precision: diagnosis(name, precision, options))
                for precision in ("float32", half)
            }
            for name in options.models
        },
    }
    if not options.smoke or options.out != Options.out:
        write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the results of a part. A part that fails says why, and the others stay."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - the failure of a part is its result
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    finally:
        keras.backend.clear_session()


def half_precision(hardware: Hardware) -> str:
    """Returns the policy of half precision that the tensor cores have; a processor computes both slowly."""
    capability = (hardware.gpus[0].compute_capability if hardware.gpus else None) or (0, 0)
    return "mixed_float16" if capability < (8, 0) else "mixed_bfloat16"


def driver() -> str | None:
    """Returns the version of the driver; None without one."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return None


def load(options: Options, hardware: Hardware, half: str) -> dict[str, Any]:
    """Returns the monitor's figures of an idle and of a busy GPU, and the rate of the matrix products."""
    dtype = tf.as_dtype(half.removeprefix("mixed_"))
    x = tf.random.stateless_normal((options.size, options.size), (0, 0), dtype=dtype)
    weights = x / tf.cast(options.size**0.5, dtype)  # keeps the size of the values, however often it multiplies

    @tf.function
    def products(x: tf.Tensor) -> tf.Tensor:
        for _ in range(PRODUCTS):
            x = x @ weights
        return tf.reduce_mean(tf.abs(x))

    products(x).numpy()
    with tfopt.GpuMonitor(interval_s=0.1) as idle:
        time.sleep(options.load_seconds / 4)
    calls, began = 0, time.perf_counter()
    with tfopt.GpuMonitor(interval_s=0.1) as busy:
        while time.perf_counter() - began < options.load_seconds:
            products(x).numpy()
            calls += 1
        seconds = time.perf_counter() - began
    rate = 2 * options.size**3 * PRODUCTS * calls / seconds
    peak = ((hardware.gpus[0].peak_tflops if hardware.gpus else None) or {}).get(dtype.name)
    series = busy.utilization.series
    power = joules(busy.utilization.seconds, series["gpu0_power_watts"]) if "gpu0_power_watts" in series else None
    counted = [value for value in series.get("gpu0_energy_joules", []) if value is not None]
    return {
        "products": f"{options.size} x {options.size} in {dtype.name}, {seconds:.1f} s",
        "tflops": round(rate / 1e12, 2),
        "share_of_peak": None if peak is None else round(rate / (peak * 1e12), 3),
        "energy_joules": {
            "counted": round(counted[-1] - counted[0], 1) if counted else None,
            "power_over_time": power,
        },
        "idle": idle.summary(),
        "busy": busy.summary(),
        "unavailable": dict(busy.utilization.unavailable),
        "notes": list(busy.utilization.notes),
    }


def joules(seconds: Sequence[float], watts: Sequence[float | None]) -> float | None:
    """Returns the sum of power over time, by trapezoids between the samples that are known."""
    known = [(second, watt) for second, watt in zip(seconds, watts, strict=True) if watt is not None]
    if len(known) < 2:
        return None
    parts = ((after - before) * (low + high) / 2 for (before, low), (after, high) in itertools.pairwise(known))
    return round(sum(parts), 1)


def diagnosis(name: str, precision: str, options: Options) -> dict[str, Any]:
    """Returns what the diagnosis and a trace say of one model, trained as Keras trains it."""
    build, examples, settings, batch_size = MODELS[name]
    plan = tfopt.plan(tfopt.TrainingConfig(precision=precision, strategy="none", global_batch_size=batch_size))
    with plan.scope():
        model = build()
    model.compile(**settings())
    data = dict(zip(("x", "y", "sample_weight"), examples(model, 4 * batch_size), strict=False))
    with tempfile.TemporaryDirectory() as directory:
        report = tfopt.diagnose(
            model, **data, batch_size=batch_size, epochs=2, steps=options.watched_steps, trace_dir=directory
        )
    parts, reached, trace = report.breakdown, report.efficiency, report.trace
    return {
        "batch_size": batch_size,
        "step_ms": round(parts.step_ms, 3),
        "parts_ms": {part: round(value, 3) for part, value in parts.parts.items()},
        "unexplained_ms": round(parts.unexplained_ms, 3),
        "diagnoses": [{"cause": each.cause, "gain": each.gain, "evidence": each.evidence} for each in report.diagnoses],
        "unchecked": dict(report.unchecked),
        "efficiency": None if reached is None else reached.rows(),
        "mfu": None if reached is None else reached.mfu,
        "trace": trace.rows(),
        "tensor_core_share": trace.tensor_core_share,
        "idle_share": trace.idle_share,
        "longest": {each.name[:120]: round(each.ms_per_step, 3) for each in trace.operators[:SHOWN_OPERATORS]},
    }


def classes() -> dict[str, Any]:
    return {"optimizer": "adam", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


Examples = Callable[[keras.Model, int], tuple[Any, ...]]
# Each model with its examples, its settings of `compile`, and its batch size.
MODELS: dict[str, tuple[Callable[[], keras.Model], Examples, Callable[[], dict[str, Any]], int]] = {
    **{
        name: (kind.build, lambda model, count, kind=kind: kind.examples(count, 0), kind.settings, 64)
        for name, kind in six_models.KINDS.items()
    },
    **{name: (build, examples, classes, 128) for name, (build, _, examples) in gpu_training.MODELS.items()},
}


if __name__ == "__main__":
    found = main(tyro.cli(Options, description=__doc__))
    if found:
        json.dump(found, sys.stdout, indent=2)
        print()
