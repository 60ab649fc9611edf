"""The step times that the advisor estimates, against published runs of one GPU and against this machine.

    python benchmarks/advisor.py

There are two measurements:

    published  the training step of the model that NVIDIA has timed on one GPU, traced here: estimated and published
               examples per second
    here       recipes of tfopt on this machine: the estimate by measured peaks of the processor, and the step in `fit`

The shares of the peaks in tfopt/advisor/device.py were chosen by the published runs with `fitted`, and `--fit` prints
how the error depends on them. These runs are thus no independent check of the shares, but of how one pair of shares
does for ten runs of two kinds of GPU, two models and two precisions. The others, the pre-training of BERT-large, are
independent. Beside each error stand the share of the estimated time in which kernels wait for the memory, and the rate
of operations that the published one amounts to: where an error is large, they help to find its reason.

Results go to benchmarks/results/advisor.json. The run takes some minutes. --published-only keeps the recorded figures
of this machine.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tyro

import tfopt
from tfopt.advisor import advise, device
from tfopt.atomic.files import write_text
from tfopt.hardware import GPU_CARDS, KERNEL_START_US, cpu_peak, detect
from tfopt.profiling.cost import Kernel, kernels
from tfopt.profiling.cost.training import train_graph
from tfopt.recipes import RECIPES

RESULTS = Path(__file__).parent / "results"
HERE = ("digits_cnn", "mlp", "resnet_cifar", "mobilenet_v2", "vit", "unet", "text_encoder", "lstm", "tcn")
RESNET = "NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, one GPU, with XLA"
BERT = "NVIDIA/DeepLearningExamples, TensorFlow2/LanguageModeling/BERT/README.md, fine-tuning for SQuAD v1.1, one GPU"
PRETRAINING = "NVIDIA/DeepLearningExamples, TensorFlow2/LanguageModeling/BERT/README.md, pre-training, one GPU"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run of one GPU."""

    model: str
    card: str
    precision: str
    batch: int
    examples_per_s: float
    source: str
    tokens: int = 384
    fitted: bool = True  # whether the shares of the peaks were chosen by it


def _pretraining(card: str, precision: str, batch: int, tokens: int, examples_per_s: float) -> Run:
    return Run(
        model="bert_large",
        card=card,
        precision=precision,
        batch=batch,
        examples_per_s=examples_per_s,
        source=PRETRAINING,
        tokens=tokens,
        fitted=False,
    )


PUBLISHED = (
    Run(model="resnet50", card="A100", precision="float32", batch=256, examples_per_s=909, source=RESNET),
    Run(model="resnet50", card="A100", precision="mixed_float16", batch=256, examples_per_s=2375, source=RESNET),
    Run(model="resnet50", card="V100 SXM2", precision="float32", batch=128, examples_per_s=412, source=RESNET),
    Run(model="resnet50", card="V100 SXM2", precision="mixed_float16", batch=256, examples_per_s=1270, source=RESNET),
    Run(model="bert_large", card="V100 SXM2", precision="float32", batch=3, examples_per_s=9.85, source=BERT),
    Run(model="bert_large", card="V100 SXM2", precision="mixed_float16", batch=6, examples_per_s=39.10, source=BERT),
    Run(model="bert_large", card="V100 SXM2", precision="float32", batch=8, examples_per_s=11.11, source=BERT),
    Run(model="bert_large", card="V100 SXM2", precision="mixed_float16", batch=12, examples_per_s=47.06, source=BERT),
    Run(model="bert_large", card="A100 SXM4 80GB", precision="float32", batch=38, examples_per_s=43.9, source=BERT),
    Run(
        model="bert_large",
        card="A100 SXM4 80GB",
        precision="mixed_float16",
        batch=76,
        examples_per_s=134.22,
        source=BERT,
    ),
    _pretraining("A100 SXM4 80GB", "mixed_float16", 312, 128, 485.59),
    _pretraining("A100 SXM4 80GB", "float32", 176, 128, 282.98),
    _pretraining("A100 SXM4 80GB", "mixed_float16", 40, 512, 96.52),
    _pretraining("V100 SXM3", "mixed_float16", 60, 128, 206.5),
    _pretraining("V100 SXM3", "float32", 32, 128, 49.97),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = HERE
    """Recipes to measure on this machine."""
    published_only: bool = False
    """Estimate the published runs only, and keep the recorded figures of this machine."""
    fit: bool = False
    """Print the error of the published runs for several shares of the peaks, and measure nothing."""
    out: Path = RESULTS / "advisor.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any] | None:
    traced = {run: trace(run) for run in PUBLISHED}
    if options.fit:
        fit(traced)
        return None
    published = [estimate(run, found) for run, found in traced.items()]
    results = {
        "shares": {
            "tensor_cores": device.TENSOR_CORE_SHARE,
            "cuda_cores": device.CUDA_CORE_SHARE,
            "memory": device.MEMORY_SHARE,
            "kernel_us": KERNEL_START_US,
            "cpu_compute": device.CPU_COMPUTE_SHARE,
        },
        "published": published,
        "published_error": errors([each["error"] for each in published if each["fitted"]]),
        "independent_error": errors([each["error"] for each in published if not each["fitted"]]),
    }
    if options.published_only:
        results = {**json.loads(options.out.read_text()), **results}
    else:
        results = {**machine(options.only), **results}
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def machine(names: Sequence[str]) -> dict[str, Any]:
    """Measures steps of recipes on this machine, and compares them with their estimates."""
    found = detect()
    here = {}
    for name in names:
        keras.backend.clear_session()
        measured = advise(RECIPES[name], cards=["A100"], hardware=found).here
        assert measured is not None
        here[name] = rounded(measured.to_dict())
        print(name, here[name], file=sys.stderr, flush=True)
    return {
        "what": "examples per second and step times that the advisor estimates, against published and measured ones",
        "device": f"{found.processor}, {found.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cpu_peak": rounded(cpu_peak().to_dict()),
        "here": here,
        "here_error": errors([each["error"] for each in here.values()]),
    }


def trace(run: Run) -> list[Kernel]:
    """Returns the kernels of a training step of a published run, as XLA fuses them."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(run.precision)
    try:
        if run.model == "resnet50":
            model = tfopt.models.resnet50((224, 224, 3), 1000)
            specs = tf.TensorSpec((run.batch, 224, 224, 3)), tf.TensorSpec((run.batch,), tf.int32)
        else:  # BERT-large, with one vector of two logits for each example instead of two logits for each token
            model = tfopt.models.text_encoder(
                (run.tokens,), 2, vocabulary=30_522, width=1024, depth=24, heads=16, units=4096
            )
            specs = tf.TensorSpec((run.batch, run.tokens), tf.int32), tf.TensorSpec((run.batch,), tf.int32)
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if run.model == "resnet50" else "adam"
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    graph, _ = train_graph(model, specs)
    found = kernels(graph, fused=True)
    keras.backend.clear_session()
    del model
    gc.collect()  # 4 GB of BERT-large and its optimizer, in cycles
    return found


def estimate(run: Run, found: Sequence[Kernel]) -> dict[str, Any]:
    """Compares a published run with its estimate."""
    card = device.of_card(run.card, GPU_CARDS[run.card])
    seconds = device.step_seconds(found, card)
    assert seconds is not None
    rate = run.batch / seconds
    products = [each for each in found if each.multiply_adds]
    flops = sum(2 * each.multiply_adds * each.executions for each in products)
    at_peak = device.step_seconds([replace(each, moved_bytes=0) for each in products], card)
    assert at_peak is not None
    names = ("model", "card", "precision", "batch", "tokens", "source", "fitted")
    return {
        **{name: getattr(run, name) for name in names if name != "tokens" or run.model == "bert_large"},
        "published_examples_per_s": run.examples_per_s,
        "estimated_examples_per_s": round(rate, 1),
        "error": round(rate / run.examples_per_s - 1, 3),
        # Of the estimated time, what is not in products, or in products that wait for the memory.
        "memory_bound_share": round(1 - at_peak / seconds, 3),
        "published_tflops": round(flops / run.batch * run.examples_per_s / 1e12, 1),
    }


def fit(traced: dict[Run, list[Kernel]]) -> None:
    """Prints the errors for several shares of the peaks."""
    for tensor in (0.5, 0.6, 0.7):
        for cuda in (0.7, 0.8, 0.85, 0.9):
            for memory in (0.7, 0.8, 0.9):
                device.TENSOR_CORE_SHARE, device.CUDA_CORE_SHARE, device.MEMORY_SHARE = tensor, cuda, memory
                found = [estimate(run, each)["error"] for run, each in traced.items() if run.fitted]
                print(tensor, cuda, memory, errors(found), found)


def errors(found: Sequence[float | None]) -> dict[str, float]:
    """Returns the median and the largest error, without their signs."""
    sizes = [abs(error) for error in found if error is not None]
    return {"median": round(statistics.median(sizes), 3), "largest": round(max(sizes), 3)}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
