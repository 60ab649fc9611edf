"""The batch size that tfopt.find_batch_size finds against what an exhaustive search finds, and the memory of a search.

    python benchmarks/tuning.py memory [--only mlp ...]   the largest batch under a hard limit of memory
    python benchmarks/tuning.py knee [--only mlp ...] [--repetitions 10]   the knee of the speeds, again and again
    python benchmarks/tuning.py trials   what 30 trials of tfopt.tune leave in the process that called it

memory: each model is searched with RLIMIT_DATA, without a margin, three of them with a replica on each of two logical
CPU devices. Then batches of a ladder around the found one, 2% apart, are trained under the same limit, each in a
process of its own; the largest that trains is the true one.

knee: the curve of each model is measured once in MANY_TURNS turns, whose medians give its knee. Then repetitions
measure it as find_batch_size does, each in a fresh process. docs/images/knee.svg shows the curves.

trials: the recipe digits_cnn is searched with short turns, so that the time suffices for TRIALS trials.

Results go to benchmarks/results/tuning.json. On two cores, memory takes half an hour, knee two hours, and trials
half an hour.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from write_pages import write_pages

RESULTS = Path(__file__).parent / "results" / "tuning.json"
PLOT = Path(__file__).parents[1] / "docs" / "images" / "knee.svg"
LADDER, BELOW, ABOVE = 1.02, 5, 13  # the ratio of two batches, and how many of them below and above the found one
MANY_TURNS, WINDOW_S = 30, 0.2
LIMIT_S = 240.0
EXAMPLES = 10**6
TRIALS, MINUTES = 30, 60
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
SMALL_VIT = {"patch_size": 4, "width": 64, "depth": 4, "heads": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model that is searched.

    Attributes:
        builder: Name of the builder.
        input_shape: Shape of one example.
        outputs: Number of classes.
        arguments: Arguments of the builder.
        limit_bytes: The hard limit of memory.
        mirrored: Whether it trains on two replicas.
        largest: The largest batch whose speed is measured.
    """

    builder: str
    input_shape: tuple[int, ...]
    outputs: int = 10
    arguments: dict[str, Any]
    limit_bytes: int = 3 * 10**9
    mirrored: bool = False
    largest: int = 256


CASES: dict[str, Case] = {
    "mlp": Case(builder="mlp", input_shape=(784,), arguments={"units": (1024, 1024)}, largest=1024),
    "lstm": Case(builder="lstm", input_shape=(100, 32), arguments={"units": (64,)}),
    "unet": Case(builder="unet", input_shape=(96, 96, 3), arguments={"width": 16, "depth": 3}, outputs=4, largest=32),
    "simple_cnn_mirrored": Case(
        builder="simple_cnn", input_shape=(64, 64, 3), arguments={"filters": (32, 64)}, mirrored=True
    ),
    "resnet_cifar_mirrored": Case(
        builder="resnet_cifar", input_shape=(32, 32, 3), arguments={"depth": 20}, mirrored=True
    ),
    "vit_mirrored": Case(builder="vit", input_shape=(64, 64, 3), arguments={"patch_size": 8}, mirrored=True),
    "simple_cnn": Case(builder="simple_cnn", input_shape=(32, 32, 3), arguments={"filters": (16, 32)}),
    "resnet_cifar": Case(builder="resnet_cifar", input_shape=(32, 32, 3), arguments={"depth": 8}),
    "vit": Case(builder="vit", input_shape=(32, 32, 3), arguments=SMALL_VIT, largest=128),
}
MEMORY = tuple(CASES)[:6]
KNEE = ("mlp", "lstm", "unet", "simple_cnn", "resnet_cifar", "vit")


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Annotated[str, tyro.conf.Positional]
    """memory, knee or trials."""
    only: tuple[str, ...] = ()
    """Cases to run, all by default. The results of the others stay."""
    repetitions: int = 10
    """Repetitions of the knee."""


def main(options: Options) -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    cases = {"memory": MEMORY, "knee": KNEE, "trials": ("digits_cnn",)}[options.what]
    for name in options.only or cases:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            if options.what == "trials":
                found = trials(name, folder)
            elif options.what == "memory":
                found = memory(CASES[name], folder)
            else:
                found = knee(CASES[name], folder, options.repetitions)
        print(name, json.dumps(found), flush=True)
        write(options.what, name, found)


def write(part: str, name: str, found: dict[str, Any]) -> None:
    import tensorflow as tf

    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = detect()
    results["tensorflow"] = tf.__version__
    results["device"] = f"{machine.processor}, {machine.logical_cores} logical cores, {platform.system()}"
    cases = {**results.get(part, {}).get("cases", {}), name: found}
    summary: dict[str, Any] = {"cases": cases}
    if part == "memory":
        summary |= {
            "models": len(cases),
            "smallest_share": min(each["share"] for each in cases.values()),
            "most_trials": max(each["trials"] for each in cases.values()),
        }
    elif part == "knee":
        summary |= {
            "models": len(cases),
            "least_within_one_step": min(each["within_one_step"] / each["repetitions"] for each in cases.values()),
        }
    results[part] = summary
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")
    if part == "knee":
        draw(cases, PLOT)
    write_pages()


def search_of(case: Case) -> tuple[Any, Any, Any]:
    """Returns the compiled model, its data and the settings of its training."""
    import keras
    import tensorflow as tf

    import tfopt
    from tfopt.models import BUILDERS

    training = tfopt.TrainingConfig(
        precision="float32", jit_compile=False, strategy="mirrored" if case.mirrored else "none"
    )
    model = BUILDERS[case.builder](case.input_shape, case.outputs, **case.arguments)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random(case.input_shape, np.float32)
    example = tf.data.Dataset.from_tensors((x, np.zeros(model.output_shape[1:-1], np.int32)))
    return model, example.repeat(EXAMPLES), training


def memory(case: Case, folder: Path) -> dict[str, Any]:
    """Searches the largest batch, and trains those of the ladder around it."""
    import tfopt
    from tfopt.trials.process import call_apart
    from tfopt.tuning.limit import find_limit
    from tfopt.tuning.memory import on_grid
    from tfopt.tuning.trial import Trial
    from tfopt.tuning.workload import workload_of

    model, data, training = search_of(case)
    config = tfopt.BatchSizeConfig(
        memory_limit_bytes=case.limit_bytes, hard=True, margin=0.0, throughput=False, trial_limit_s=LIMIT_S
    )
    report = tfopt.find_batch_size(model, data, config, training=training)
    found = report.memory.per_replica_batch_size
    workload = workload_of(model, data, folder, training)
    limit = find_limit(case.limit_bytes, 0.0, hard=True)
    ladder = {on_grid(found * LADDER**place) for place in range(-BELOW, ABOVE + 1)} - {found}
    trained = {found: True}
    for size in sorted(ladder):
        own = (folder / str(size)).resolve()
        arguments = {
            "workload": workload.to_dict(),
            "trial": Trial(sizes=(size,), whole=True).to_dict(),
            "limit": limit.to_dict(),
            "directory": str(own),
        }
        trained[size] = not call_apart("tfopt.tuning.trial:train", arguments, own, LIMIT_S).failure
    true = max(size for size, fits in trained.items() if fits)
    return {
        "limit_bytes": case.limit_bytes,
        "replicas": report.memory.replicas,
        "estimated": report.memory.estimated,
        "found": found,
        "true": true,
        "share": round(found / true, 4),
        "trials": len(report.memory.trials),
        "was_run": any(each.fits and each.per_replica_batch_size == found for each in report.memory.trials),
        "trained": {str(size): fits for size, fits in sorted(trained.items())},
        "seconds": round(report.seconds, 1),
    }


def knee(case: Case, folder: Path, repetitions: int) -> dict[str, Any]:
    """Measures the curve in many turns, and its knee again and again."""
    from tfopt.report.knee import SHARE
    from tfopt.report.knee import knee as knee_of
    from tfopt.timing import estimate
    from tfopt.trials.process import call_apart
    from tfopt.tuning.throughput import sizes_to_time
    from tfopt.tuning.trial import Trial
    from tfopt.tuning.workload import workload_of

    model, data, training = search_of(case)
    workload = workload_of(model, data, folder, training)
    sizes = sizes_to_time(case.largest)

    def rates(turns: int, decides: bool) -> dict[int, list[float]]:
        trial = Trial(sizes=sizes, window_s=WINDOW_S, turns=turns, decides=decides)
        own = (folder / "trial").resolve()
        arguments = {"workload": workload.to_dict(), "trial": trial.to_dict(), "limit": None, "directory": str(own)}
        outcome = call_apart("tfopt.tuning.trial:train", arguments, own, 1800.0)
        if outcome.failure:
            raise SystemExit(outcome.failure)
        return {each["size"]: each["examples_per_s"] for each in outcome.result["seen"]}

    curve = rates(MANY_TURNS, False)
    best = max(statistics.median(found) for found in curve.values())
    true = min(size for size, found in curve.items() if statistics.median(found) >= SHARE * best)
    found = [rates(12, True) for _ in range(repetitions)]
    knees = [knee_of(each) for each in found]
    steps = [abs(sizes.index(each) - sizes.index(true)) for each in knees]
    return {
        "curve": {
            str(size): [round(value, 1) for value in vars(estimate(each)).values()] for size, each in curve.items()
        },
        "true": true,
        "knees": knees,
        "turns": [max(map(len, each.values())) for each in found],
        "repetitions": repetitions,
        "within_one_step": sum(step <= 1 for step in steps),
    }


def draw(cases: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws the speed of each batch as a share of the best, with its interval, and the knee."""
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "knee"}):
        figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        for (name, case), color in zip(cases.items(), COLORS, strict=False):  # not all cases need have run
            sizes, curve = [int(size) for size in case["curve"]], np.array(list(case["curve"].values()))
            median, least, most = (curve / curve[:, 0].max()).T
            axes.plot(sizes, median, "-", color=color, label=name)
            axes.fill_between(sizes, least, most, color=color, alpha=0.2, linewidth=0)
            axes.plot(case["true"], median[sizes.index(case["true"])], "o", color=color)
        axes.axhline(0.95, color="#b5b8bc", linestyle="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="batch size", ylabel="share of the best examples/s", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def trials(recipe: str, folder: Path) -> dict[str, Any]:
    """Searches TRIALS trials of a recipe, and returns by how much the memory of this process has grown."""
    import tfopt

    config = tfopt.TuneConfig(max_trials=TRIALS, minutes=MINUTES, window_s=0.05, turns=6)
    what = tfopt.recipes.find_recipe(recipe)
    what.data.load()
    gc.collect()
    before = resident_bytes()
    report = tfopt.tune(what, config=config, directory=folder / "search")
    gc.collect()
    return {
        "trials": len(report.trials),
        "ended_by": report.ended_by,
        "seconds": round(report.seconds, 1),
        "grown_mb": round((resident_bytes() - before) / 1e6, 1),
        "peak_grown_mb": round(max(peak_bytes() - before, 0) / 1e6, 1),
    }


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
