"""The measured tables of training: the step against Keras' step, the plan, scripts under `accelerate`, the input."""

from __future__ import annotations

from collections.abc import Sequence

from page_tables import Table, read

MODELS = {"mlp": "MLP", "cnn": "CNN", "transformer": "transformer"}
SCRIPTS = {
    "sequential": "Sequential MLP",
    "functional": "functional model with dropout",
    "with_arguments": "convolutional network",
    "own_train_step": "own `train_step` (left to Keras)",
    "custom_loop": "own loop (left to Keras)",
}


def overhead() -> Table:
    """tfopt's step against Keras' own, both with the same settings."""
    rows = [["model", "XLA", "steps per execution", "Keras", "tfopt", "tfopt / Keras"]]
    for case in read("training_overhead")["overhead"]:
        xla, steps, times = case["jit_compile"], case["steps_per_execution"], case["median_step_ms"]
        cells = [MODELS[case["model"]], "on" if xla else "off", str(steps)]
        cells += [f"{times[side]:.1f} ms" for side in ("keras", "tfopt")]
        rows.append([*cells, f"{case['tfopt_over_keras']:.2f}x"])
    return rows


def gain() -> Table:
    """The training as a whole: Keras' defaults against the plan."""
    rows = [["model", "Keras on arrays, its defaults", "tfopt, auto plan and pipeline", "gain"]]
    for name, found in read("training_overhead")["gain"].items():
        times = [f"{found['median_step_ms'][side]:.1f} ms" for side in ("keras", "tfopt")]
        rows.append([MODELS[name], *times, f"{found['keras_over_tfopt']:.2f}x"])
    return rows


def choices() -> Table:
    """One setting changed: the speed of a step."""
    settings = {
        "mixed_bfloat16": "bfloat16",
        "jit_compile": "XLA",
        "steps_per_execution_10": "10 steps per execution",
        "prefetch_autotune": "tf.data's autotuner",
    }
    rows = [["model", *settings.values()]]
    for name, found in read("plan_choices")["models"].items():
        rows.append([name, *(f"{found['speed_against_plain'][setting]}x" for setting in settings)])
    return rows


def scripts() -> Table:
    """Scripts under `tfopt accelerate` against the plain runs."""
    rows = [["script", "step, plain", "step, accelerated", "step time", "processor time"]]
    for found in read("accelerate")["scripts"]:
        times = [f"{found[f'step_ms_{side}']:.2f} ms" for side in ("plain", "accelerated")]
        ratios = [within(found[f"{what}_ratio"], found[f"{what}_ratio_interval"]) for what in ("step", "processor")]
        rows.append([SCRIPTS[found["script"]], *times, *ratios])
    return rows


def within(ratio: float, interval: Sequence[float]) -> str:
    return f"{ratio:.2f}x ({interval[0]:.2f} to {interval[1]:.2f})"


def inputs() -> Table:
    """The input pipeline against what Keras offers for the same work."""
    rows = [["case", "tfopt", "Keras", "speed", "processor"]]
    for name, found in read("input_pipeline")["cases"].items():
        rates = [f"{found[side]['examples_per_second']['median']:,}" for side in ("tfopt", "keras")]
        low, high = found["speed"]["quartiles"]
        faster = f"{found['speed']['median']}x ({low} to {high})"
        rows.append([name, *rates, faster, f"{found['processor_time']['median']}x"])
    return rows


TABLES = {
    "the step": overhead,
    "the plan": gain,
    "single settings": choices,
    "scripts": scripts,
    "input pipelines": inputs,
}
