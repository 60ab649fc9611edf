"""What the process of a training knows of the settings that `tfopt.tune` may change: their values, what is fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from tfopt.data import Examples
from tfopt.data.config import DataConfig, cuts_boxes
from tfopt.data.pipeline import decide
from tfopt.report import Decision, Record
from tfopt.training import Plan
from tfopt.training.xla import xla_blockers


@dataclass(frozen=True, kw_only=True)
class Facts(Record):
    """What is known of a training before its settings are searched.

    Attributes:
        values: The value of each setting at the start, by its name.
        fixed: The settings that have no choice, with the reasons.
        replicas: Number of replicas.
        examples: Number of training examples; None if it is unknown.
        steps: Number of steps of an epoch; None if it is unknown.
        at_once: Number of steps that Keras' own function always makes, one after the other; 1 with tfopt's.
        compiled_at: The line of a script that compiles the model; empty if tfopt's step cannot be put there.
        compiled_with: The names of what the script gives to compile.
    """

    values: Mapping[str, Any]
    fixed: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    examples: int | None = None
    steps: int | None = None
    at_once: int = 1
    compiled_at: str = ""
    compiled_with: Sequence[str] = ()


def facts_of(plan: Plan, model: keras.Model, examples: Examples, *, keras_step: bool = False) -> Facts:
    """Returns the facts of a model's training. `keras_step` is whether it trains by Keras' own step."""
    config, fixed = plan.config, {}
    values = {
        "jit_compile": bool(model.jit_compile) if keras_step else plan.jit_compile,
        # under Keras' step it is that of the model, and under tfopt's that of the plan
        "steps_per_execution": "auto" if keras_step else plan.steps_per_execution,
        "prefetch": plan.prefetch,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "remat": config.remat,
        "strategy": "pipeline" if plan.stage_devices else "none" if plan.strategy is None else "mirrored",
        "communication": config.communication,
        "precision": plan.precision,
    }
    if keras_step:
        values["step"] = "keras"
    if blockers := xla_blockers(model):
        fixed["jit_compile"] = f"XLA cannot compile {blockers[0].name}: {blockers[0].reason}"
    if plan.stage_devices:
        fixed |= dict.fromkeys(("jit_compile", "accumulate", "strategy"), "the model is a pipeline of stages")
    elif not isinstance(config.strategy, str):
        fixed["strategy"] = "a strategy object is given"
    count = examples.size("train")
    size = config.global_batch_size
    steps = config.steps_per_epoch if config.steps_per_epoch and not keras_step else count and -(-count // size)
    at_once = int(model.steps_per_execution or 1) if keras_step else 1
    return Facts(values=values, fixed=fixed, replicas=plan.replicas, examples=count, steps=steps, at_once=at_once)


def facts_of_data(
    config: DataConfig, examples: Examples, places: Sequence[Decision]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values and the fixed settings of a recipe's data."""
    cache = next(each for each in decide(examples, config) if each.setting == "cache")
    values: dict[str, Any] = {"cache": cache.value}
    fixed: dict[str, str] = {}
    if cache.value == "off" and config.cache in ("auto", True):
        fixed["cache"] = cache.reason
    elif config.service is not None:
        fixed["cache"] = "a service prepares the batches"
    for each in places:
        values["augment"] = each.value
    if not places:
        fixed["augment"] = "the recipe augments nothing"
    elif cuts_boxes(config, examples):
        fixed["augment"] = "the boxes of crop_scale are cut while images are decoded"
    return values, fixed
