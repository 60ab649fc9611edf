"""The scaling model against this machine and against published runs.

    python benchmarks/scaling.py

There are two measurements:

    here       two and four logical devices, and two processes, on the cores of this machine: the model gets the step of
               one device, and the times in which two replicas sum a small and a large vector. It predicts the step of
               two and of four replicas. On shared cores, n replicas take n times as long to compute.
    published  NVIDIA's runs of several GPUs, and Facebook's of 256: the model gets the published rate of the smaller
               run and the links, and predicts the rate of the larger run

Horovod, which NVIDIA's runs use, collects gradients in cycles of 5 ms by default. The model counts two cycles for each
step of these runs; this number was chosen by the runs of ResNet-50 on eight GPUs, so only the others check it. Results
go to benchmarks/results/scaling.json. The run takes some minutes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from tfopt.advisor import LINKS, Hosts, Link, link_inside, scale
from tfopt.atomic.files import write_text
from tfopt.hardware import GPU_CARDS, detect

HERE = Path(__file__).parent
MODELS = ("mlp", "resnet_cifar")
RESNET_BYTES, BERT_LARGE_BYTES = 4 * 25_557_032, 4 * 335_000_000
HOROVOD_S = 0.010
EXAMPLES = "NVIDIA/DeepLearningExamples, "
RESNET = EXAMPLES + "TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, with XLA and Horovod"
BERT = EXAMPLES + "TensorFlow2/LanguageModeling/BERT/README.md, fine-tuning for SQuAD v1.1, with Horovod"
GOYAL = (
    "Goyal et al. 2017, arXiv:1706.02677: 90 epochs of 1,281,167 images in 29 hours on 8 P100, and in 1 hour on 256, "
    "50 Gbit/s Ethernet between hosts of 8"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published pair of runs: the smaller is given, the larger is predicted."""

    name: str
    card: str
    batch: int
    gradient_bytes: int
    gpus: tuple[int, int]
    examples_per_s: tuple[float, float]
    source: str
    fitted: bool = False


def _resnet(card: str, batch: int, precision: str, one: float, gpus: int, many: float, *, fitted: bool) -> Run:
    return Run(
        name=f"ResNet-50, {precision}",
        card=card,
        batch=batch,
        gradient_bytes=RESNET_BYTES,
        gpus=(1, gpus),
        examples_per_s=(one, many),
        source=RESNET,
        fitted=fitted,
    )


def _bert(card: str, batch: int, precision: str, one: float, gpus: int, many: float) -> Run:
    return Run(
        name=f"BERT-large, {precision}",
        card=card,
        batch=batch,
        gradient_bytes=BERT_LARGE_BYTES,
        gpus=(1, gpus),
        examples_per_s=(one, many),
        source=BERT,
    )


PUBLISHED = (
    _resnet("A100", 256, "TF32", 909, 8, 7000, fitted=True),
    _resnet("A100", 256, "mixed_float16", 2375, 8, 17400, fitted=True),
    _resnet("V100 SXM2", 128, "float32", 412, 8, 3170, fitted=True),
    _resnet("V100 SXM2", 256, "mixed_float16", 1270, 8, 9510, fitted=True),
    _resnet("V100 SXM3", 128, "float32", 432, 16, 6500, fitted=False),
    _resnet("V100 SXM3", 256, "mixed_float16", 1300, 16, 17250, fitted=False),
    _bert("V100 SXM2", 6, "mixed_float16", 39.10, 4, 128.48),
    _bert("V100 SXM2", 6, "mixed_float16", 39.10, 8, 255.36),
    _bert("V100 SXM2", 3, "float32", 9.85, 8, 73.03),
    _bert("V100 SXM2", 12, "mixed_float16", 47.06, 8, 330.29),
    _bert("A100 SXM4 80GB", 76, "mixed_float16", 134.22, 8, 1048.23),
    _bert("A100 SXM4 80GB", 38, "TF32", 43.9, 8, 341.31),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 3
    """Number of times that each cell is measured; the fastest counts, since other programs only slow it down."""
    published_only: bool = False
    """Compute the published runs only, and keep the measured ones of the results file."""
    out: Path = HERE / "results" / "scaling.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    published = [predict(run) for run in PUBLISHED]
    facebook = ethernet()
    if options.published_only:
        here = json.loads(options.out.read_text())["here"]
    else:
        here = [cell for name in MODELS for cell in measure(name, options.rounds)]
    results = {
        "what": "step time on several replicas: predicted by tfopt.advisor.scale, and measured or published",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "rounds": options.rounds,
        "here": here,
        "here_error": _errors([cell["error"] for cell in here]),
        "coordination_ms": 1e3 * HOROVOD_S,
        "published": published,
        "fitted_error": _errors([each["error"] for each in published if each["fitted"]]),
        "other_error": _errors([each["error"] for each in published if not each["fitted"]]),
        "ethernet": facebook,
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def predict(run: Run) -> dict[str, Any]:
    """Predicts the rate of a published run of several GPUs of one host."""
    few, many = run.gpus
    card = GPU_CARDS[run.card]
    cluster = Hosts(
        inside=link_inside(card), between=LINKS["infiniband_8x200"], gpus_per_host=many, coordination_s=HOROVOD_S
    )
    compute = run.batch / run.examples_per_s[0]
    step = scale(compute, run.batch, run.gradient_bytes, cluster, (many,)).steps[0]
    rate = run.examples_per_s[1]
    return {
        "model": run.name,
        "card": run.card,
        "gpus": many,
        "batch_per_gpu": run.batch,
        "examples_per_s_of_one": run.examples_per_s[0],
        "published_examples_per_s": rate,
        "published_efficiency": round(rate / many / run.examples_per_s[0] * few, 3),
        "predicted_examples_per_s": round(step.examples_per_s, 1),
        "predicted_efficiency": round(step.efficiency, 3),
        "error": round(step.examples_per_s / rate - 1, 3),
        "fitted": run.fitted,
        "source": run.source,
    }


def ethernet() -> dict[str, Any]:
    """Predicts Facebook's run on 256 GPUs from theirs on 8, without and with a full overlap."""
    images = 90 * 1_281_167
    eight, many = images / (29 * 3600), images / 3600
    step = 256 / eight  # of a host: 8 GPUs with 32 images each
    predicted = {}
    for overlap in (0.0, 1.0):
        # A host is a member, since its rate already has the sum within it.
        inside = Link(name="NVLink", bytes_per_s=80e9, latency_s=3e-6)
        cluster = Hosts(inside=inside, between=LINKS["ethernet_50"], gpus_per_host=1, overlap=overlap)
        predicted[f"overlap_{overlap:.0%}"] = round(
            scale(step, 256, RESNET_BYTES, cluster, (32,)).steps[0].efficiency, 3
        )
    published = many / 32 / eight
    return {
        "published_efficiency": round(published, 3),
        **{name: {"efficiency": value, "error": round(value / published - 1, 3)} for name, value in predicted.items()},
        "source": GOYAL,
    }


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Measures a model on logical devices and in two processes, in turns, and predicts the steps."""
    found: dict[str, list[dict[str, Any]]] = {"1": [], "2": [], "4": [], "processes": []}
    for _ in range(rounds):
        for cell, results in found.items():
            results.append(_cell(name, cell))
            print(name, cell, results[-1], file=sys.stderr, flush=True)
    best = {cell: {key: min(each[key] for each in results) for key in results[0]} for cell, results in found.items()}
    compute = best["1"]["step_ms"] / 1e3
    cells = []
    for cell, replicas, how in (
        ("2", 2, "logical devices"),
        ("4", 4, "logical devices"),
        ("processes", 2, "processes"),
    ):
        link = _link(best["2" if how == "logical devices" else cell])
        cluster = Hosts(inside=link, between=link, gpus_per_host=replicas, shared_cores=True)
        step = scale(compute, int(best["1"]["examples"]), int(best["1"]["gradient_bytes"]), cluster, (replicas,)).steps[
            0
        ]
        measured = best[cell]["step_ms"]
        cells.append(
            {
                "model": name,
                "replicas": replicas,
                "how": how,
                "one_device_ms": round(1e3 * compute, 2),
                "gradient_bytes": best["1"]["gradient_bytes"],
                "link_gb_per_s": round(link.bytes_per_s / 1e9, 2),
                "predicted_ms": round(step.step_ms, 2),
                "measured_ms": round(measured, 2),
                "of_which_sum_ms": round(step.all_reduce_ms, 2),
                "error": round(step.step_ms / measured - 1, 3),
            }
        )
    return cells


def _cell(name: str, cell: str) -> dict[str, Any]:
    script = str(HERE / "scaling_cell.py")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cell.json"
        words = [sys.executable, script, name, cell, str(file)]
        if cell == "processes":
            launch = [sys.executable, "-m", "tfopt", "launch", "--workers", "2", script]
            words = [*launch, name, "1", str(file)]
        subprocess.run(words, check=True, capture_output=True, timeout=600)
        return dict(json.loads(file.read_text()))


def _link(cell: dict[str, Any]) -> Link:
    """Returns the link of two replicas, from the times in which they sum a small and a large vector."""
    size, seconds = cell["large_bytes"], cell["large_s"] - cell["small_s"]
    return Link(name="measured", bytes_per_s=size / seconds, latency_s=cell["small_s"] / 2, reached=1.0)


def _errors(found: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in found]
    return {"median": round(statistics.median(sizes), 3), "largest": round(max(sizes), 3)}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
