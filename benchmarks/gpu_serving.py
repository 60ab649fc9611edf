"""Serving on a GPU: Keras' own export against tfopt's artifacts, in float32, half precision, int8, and under XLA.

    python benchmarks/gpu_serving.py

    keras          `model.export`
    float32        `tfopt.export`: frozen, folded and fused
    float32_xla    its signature "serving_xla"
    bfloat16, ...  compute="bfloat16" and compute="float16", and their signatures "serving_xla"
    int8           precision="int8", all nodes. Its kernels are those of the processor: TensorFlow has none for GPUs

Each artifact is loaded with nothing but TensorFlow in a process of its own, and all share the GPU. They are timed in
turns: a call takes a batch that lies on the GPU, and ends when its outputs are in the memory of the processor.
"on_host" counts the operations of the graph without a kernel for GPUs, as `tfopt devices --audit` does.

Results go to benchmarks/results/gpu-serving-DEVICE.json, one entry for each model. Without a GPU the script ends with
exit code 2. --smoke runs a small network for a moment on any device, and writes results only with --out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from gpu_training import NO_GPU, RESULTS
from int8_models import MODELS, Case, make
from int8_savedmodel import check, compare, first
from page_tables import in_a_name

import tfopt
from tfopt.advisor import audit
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.hardware import Hardware, detect
from tfopt.training.memory import set_memory_growth

# Each artifact: its settings, and whether its signature for XLA is timed too.
ARTIFACTS: dict[str, tuple[dict[str, Any], bool]] = {
    "float32": ({}, True),
    "bfloat16": ({"compute": "bfloat16"}, True),
    "float16": ({"compute": "float16"}, True),
    "int8": ({"precision": "int8", "int8_nodes": "all"}, False),
}
TINY = Case(
    what="a small CNN",
    build=lambda: tfopt.models.simple_cnn((32, 32, 3), 10),
    inputs=lambda count, seed: np.random.default_rng(seed).random((count, 32, 32, 3), dtype=np.float32),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("resnet50", "vit_small", "bert_base")
    """Models of int8_models.py."""
    artifacts: tuple[str, ...] = tuple(ARTIFACTS)
    """Artifacts of tfopt, besides Keras' own export."""
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    """Examples per call."""
    rounds: int = 4
    """Number of timed turns of each artifact."""
    seconds: float = 0.5
    """Seconds of a turn."""
    smoke: bool = False
    """Run a small network for a moment on any device, and write no results unless --out is given."""
    out: Path = RESULTS
    """Directory for the results."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    if options.smoke:
        options = replace(options, models=("tiny",), batch_sizes=(1, 2), rounds=1, seconds=0.05)
    elif not hardware.gpus:
        print(f"This benchmark needs a GPU: {hardware.unavailable['gpus']}. Try --smoke.", file=sys.stderr)
        raise SystemExit(NO_GPU)
    set_memory_growth()  # the processes of the artifacts share the GPU with this one
    cases = {"tiny": TINY, **MODELS}
    check("model", options.models, cases)
    check("artifact", options.artifacts, ARTIFACTS)
    results: dict[str, Any] = {
        "what": f"milliseconds of a call, medians of {options.rounds} alternating turns of {options.seconds:g} s; "
        "times is Keras' over that of the artifact",
        "device": hardware.gpus[0].name if hardware.gpus else hardware.processor,
        "cpu": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "models": {},
    }
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            results["models"][name] = measure(cases[name], Path(folder), hardware, options)
        print(json.dumps(results["models"][name]), file=sys.stderr, flush=True)
        if not options.smoke or options.out != RESULTS:
            options.out.mkdir(exist_ok=True)
            file = options.out / f"gpu-serving-{in_a_name(results['device'])}.json"
            write_text(file, json.dumps(results, indent=2) + "\n")
    return results


def measure(case: Case, folder: Path, hardware: Hardware, options: Options) -> dict[str, Any]:
    model = make(case)
    examples = case.inputs(max(options.batch_sizes), 1)
    model.export(folder / "keras", verbose=False)
    served, failed = {"keras": ("keras", "serving_default")}, {}
    for name in options.artifacts:
        settings, xla = ARTIFACTS[name]
        try:
            config = tfopt.ExportConfig(**settings, xla_signature=xla)
            calibration = {"calibration_data": case.inputs(32, 0)} if "precision" in settings else {}
            tfopt.export(model, folder / name, config, **calibration)
        except tfopt.TfoptError as error:  # what cannot be written here says why, and the others stay
            failed[name] = " ".join(str(error).split())[:500]
            continue
        served[name] = (name, "serving_default")
        if xla:
            served[f"{name}_xla"] = (name, "serving_xla")
    rows: dict[str, Any] = {}
    outputs, times = {}, {}
    with ExitStack() as stack:
        processes = {}
        for name, (directory, signature) in served.items():
            process = SavedModelProcess(folder / directory, signature)
            try:
                process = stack.enter_context(process)
                batch = {next(iter(process.loaded["inputs"])): examples}
                (outputs[name],) = process.predict(batch, len(examples)).values()
            except tfopt.TfoptError as error:
                failed[name] = " ".join(str(error).split())[:500]
                continue
            processes[name] = process
        if "keras" not in processes:  # with which the others are compared
            return {"what": case.what, "artifacts": {}, "failed": failed}
        for batch_size in options.batch_sizes:
            batch = first(batch_size, {next(iter(processes["keras"].loaded["inputs"])): examples})
            for process in processes.values():
                process.renamed = dict(zip(batch, process.loaded["inputs"], strict=True))
            rounds = alternate(list(processes.values()), batch, options.seconds, options.rounds)
            times[batch_size] = {
                name: [float(np.median(calls)) for calls in each] for name, each in zip(processes, rounds, strict=True)
            }
    for name in processes:
        rows[name] = {
            "ms": {size: round(float(np.median(each[name])), 3) for size, each in times.items()},
            "times": {
                size: round(float(np.median(np.divide(each["keras"], each[name]))), 3) for size, each in times.items()
            },
            "against_keras": compare(outputs["keras"], outputs[name]),
        }
    for name in {directory for directory, _ in served.values()} & rows.keys():
        found = audit(str(folder / name), card=None if hardware.gpus else "H100")
        rows[name]["on_host"] = {each.kind: each.count for each in found.on_host}
    keras.backend.clear_session()
    return {"what": case.what, "artifacts": rows, "failed": failed}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
