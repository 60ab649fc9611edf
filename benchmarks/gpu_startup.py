"""How long a training needs until its first step on a GPU: with and without XLA, and under XLA's flags for autotuning.

    python benchmarks/gpu_startup.py

Run this first on a new kind of GPU. XLA times the kernels of cuDNN and its own while it compiles; where that takes
minutes, every other benchmark waits for it. Each cell trains a network by Keras in a process of its own, which is ended
at the limit. The cells run side by side, because the question is whether it takes seconds or minutes:

    dense, conv, resnet50   three and two layers, and ResNet-50 with images of 224x224
    plain, xla              in float32
    bfloat16, bfloat16_xla  in mixed_bfloat16
    level_1, level_0        XLA with --xla_gpu_autotune_level: 1 checks no results, 0 takes cuDNN's own choice
    few                     XLA with --xla_gpu_autotune_max_solutions=4
    cached                  XLA with --xla_gpu_per_fusion_autotune_cache_dir, in the second of two processes
    kept                    XLA with --tf_xla_persistent_cache_directory of TensorFlow, in the second of two processes
    unfused                 XLA without convolutions that are fused with their bias and activation; unfused_float32 and
                            unfused_level_0 likewise

"first_s" is the time of the first step, "step_ms" the median of the steps after it. A cell that was ended or failed has
the reason. Results go to benchmarks/results/gpu-startup-DEVICE.json. Without a GPU the script ends with exit code 2;
--smoke runs the two small networks on any device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import tyro
from page_tables import in_a_name

RESULTS = Path(__file__).parent / "results"
NO_GPU = 2
NETWORKS = {"dense": 64, "conv": 64, "resnet50": 128}  # with their batch sizes
UNFUSED = "--xla_disable_hlo_passes=cudnn-fused-convolution-rewriter"
# Each setting: the dtype policy, whether XLA compiles the step, and the flags of XLA or, from "tf_", of TensorFlow.
SETTINGS: dict[str, tuple[str, bool, str]] = {
    "plain": ("float32", False, ""),
    "xla": ("float32", True, ""),
    "bfloat16": ("mixed_bfloat16", False, ""),
    "bfloat16_xla": ("mixed_bfloat16", True, ""),
    "level_1": ("mixed_bfloat16", True, "--xla_gpu_autotune_level=1"),
    "level_0": ("mixed_bfloat16", True, "--xla_gpu_autotune_level=0"),
    "few": ("mixed_bfloat16", True, "--xla_gpu_autotune_max_solutions=4"),
    "cached": ("mixed_bfloat16", True, "--xla_gpu_per_fusion_autotune_cache_dir={folder}"),
    "kept": ("mixed_bfloat16", True, "--tf_xla_persistent_cache_directory={folder}"),
    "unfused": ("mixed_bfloat16", True, UNFUSED),
    "unfused_float32": ("float32", True, UNFUSED),
    "unfused_level_0": ("mixed_bfloat16", True, f"{UNFUSED} --xla_gpu_autotune_level=0"),
}
STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Options:
    networks: tuple[str, ...] = tuple(NETWORKS)
    """Networks to train."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """How they are trained."""
    limit_s: float = 180.0
    """Seconds after which a process is ended."""
    jobs: int = 6
    """Number of processes at the same time."""
    smoke: bool = False
    """Run the two small networks on any device, and write no results unless --out is given."""
    out: Path = RESULTS
    """Directory for the results."""
    cell: str | None = None
    """Used by the benchmark itself: train one network here, and print its times."""


def main(options: Options) -> dict[str, Any]:
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    hardware = detect()
    if not hardware.gpus and not options.smoke:
        print(f"This benchmark needs a GPU: {hardware.unavailable['gpus']}. Try --smoke.", file=sys.stderr)
        raise SystemExit(NO_GPU)
    networks = [name for name in options.networks if not (options.smoke and name == "resnet50")]
    results: dict[str, Any] = {
        "what": f"seconds until the first step is done, and milliseconds of a later one; {options.jobs} processes side "
        f"by side, ended after {options.limit_s:g} s",
        "limit_s": options.limit_s,
        "device": hardware.gpus[0].name if hardware.gpus else hardware.processor,
        "cpu": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": hardware.tensorflow_version,
        "networks": {name: {} for name in networks},
    }
    file = options.out / f"gpu-startup-{in_a_name(results['device'])}.json"

    writing = Lock()

    def run(network: str, setting: str) -> None:
        cell = in_fresh_processes(network, setting, options.limit_s)
        print(network, setting, cell, file=sys.stderr, flush=True)
        with writing:
            results["networks"][network][setting] = cell
            if not options.smoke or options.out != RESULTS:  # as far as it got, should this process be ended
                options.out.mkdir(exist_ok=True)
                write_text(file, json.dumps(results, indent=1) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(run, network, setting) for network in networks for setting in options.settings]:
            done.result()
    return results


def in_fresh_processes(network: str, setting: str, limit_s: float) -> dict[str, Any]:
    """Returns the times of a process; where it fills a cache, those of a second one that reads it."""
    flags = SETTINGS[setting][2]
    if "{folder}" not in flags:
        return fresh_process(network, setting, flags, limit_s)
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (fresh_process(network, setting, flags.format(folder=folder), limit_s) for _ in range(2))
    return {"first_s_of_the_process_before": cold.get("first_s"), **warm}


def fresh_process(network: str, setting: str, flags: str, limit_s: float) -> dict[str, Any]:
    variable = "TF_XLA_FLAGS" if flags.startswith("--tf_") else "XLA_FLAGS"
    environment = {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment[variable] = f"{os.environ.get(variable, '')} {flags}".strip()
    words = [sys.executable, __file__, "--cell", f"{network} {setting}"]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"ended": f"after {limit_s:g} s"}
    if done.returncode != 0:
        return {"failed": " ".join(done.stderr.split()[-60:])}
    return json.loads(done.stdout.splitlines()[-1])


def timed(network: str, setting: str) -> dict[str, Any]:
    """Trains a network here, and returns its times."""
    from statistics import median

    import keras
    import numpy as np

    policy, xla, _ = SETTINGS[setting]
    keras.config.set_dtype_policy(policy)
    model = build(network)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=xla)
    draw = np.random.default_rng(0)
    x = draw.random((NETWORKS[network], *model.input_shape[1:]), dtype=np.float32)
    ends = [time.perf_counter()]
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ends.append(time.perf_counter()))
    model.fit(x, draw.integers(0, 10, len(x)), len(x), epochs=STEPS, verbose=0, callbacks=[clock])
    first, *rest = np.diff(ends)
    return {"first_s": round(float(first), 1), "step_ms": round(1e3 * median(rest), 2)}


def build(network: str) -> Any:
    import keras
    from keras import layers

    if network == "resnet50":
        return keras.applications.ResNet50(weights=None, classes=10, classifier_activation=None)
    if network == "dense":
        return keras.Sequential(
            [keras.Input((64,)), *(layers.Dense(256, "relu") for _ in range(2)), layers.Dense(10, dtype="float32")]
        )
    hidden = [layers.Conv2D(32, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(64, 3)]
    return keras.Sequential([keras.Input((32, 32, 3)), *hidden, layers.Flatten(), layers.Dense(10, dtype="float32")])


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    print(json.dumps(timed(*chosen.cell.split()) if chosen.cell else main(chosen)))
