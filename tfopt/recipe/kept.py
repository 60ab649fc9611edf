"""Speed settings that `tfopt tune` has measured for a recipe, kept on this machine for its later runs.

A kept result is of one training on one machine: the model, its examples, the settings that were asked for, the
processor, the GPUs and the versions. A run whose training differs in any of them decides as it would without. Only
settings that the recipe leaves to tfopt ("auto") are kept. A training with checkpoints takes none: it may have begun
without them, and must go on as it began. Neither does one of several workers, whose machines may have measured others.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import keras

from tfopt.atomic.files import read_stored, writing_to
from tfopt.atomic.own_files import json_with, write_own
from tfopt.distillation.config import PARENT
from tfopt.errors import ConfigError, warn
from tfopt.hardware import detect
from tfopt.recipe.changes import with_changes
from tfopt.recipe.recipe import Recipe
from tfopt.recipe.tables import flat, plain_settings
from tfopt.report import Record
from tfopt.report.record import record_of
from tfopt.timing import Estimate, shown_ratio
from tfopt.training.distributed.cluster import find_cluster

VARIABLE = "TFOPT_CACHE_DIR"
# The settings that may be kept, where a recipe says "auto". The cache is not: what fits into the memory changes.
MAY_BE_KEPT = (
    *("training.precision", "training.jit_compile", "training.strategy", "training.steps_per_execution"),
    *("training.prefetch", "data.augment.where"),
)
# Settings of a training that change neither a step nor what was asked of it.
UNRELATED = (
    *("epochs", "learning_rate", "decay", "warmup_epochs", "base_batch_size", "weight_decay", "label_smoothing"),
    *("checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume", "seed"),
)
IS_OWN = json_with("of", "settings", "speedup")


@dataclass(frozen=True, kw_only=True)
class Kept(Record):
    """Settings that were measured to be faster than those that tfopt decides.

    Attributes:
        recipe: Name of the recipe.
        made: The day.
        of: What was measured: the training, the machine and the versions.
        settings: The settings, as the nested tables of a recipe.
        speedup: The speed with all of them, as a share of that without.
    """

    recipe: str
    made: str
    of: Mapping[str, Any]
    settings: Mapping[str, Any]
    speedup: Estimate


class Reason(NamedTuple):
    """Why a setting has a value that was measured."""

    value: str
    words: str


def keep(recipe: Recipe, settings: Mapping[str, Any], speedup: Estimate) -> Path | None:
    """Keeps measured settings for later runs of a recipe, in place of earlier ones.

    Returns: The file; None if nothing is kept: no run would take it, the settings change what the recipe asks for, the
        recipe holds Python objects, or TFOPT_CACHE_DIR is empty.
    Raises:
        ConfigError: The file's place belongs to another file.
        ExportError, OSError: The file cannot be written.
    """
    of = _training(recipe)
    file = _file(of)
    if file is None or not _may_have(recipe, settings):
        return None
    made = datetime.date.today().isoformat()
    found = Kept(recipe=recipe.name, made=made, of=of or {}, settings=settings, speedup=speedup)
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_own(file, found.to_json(), IS_OWN)
    return file


def with_kept(recipe: Recipe) -> tuple[Recipe, dict[str, Reason]]:
    """Returns the recipe with the settings that were measured for it here, and their reasons by setting.

    Warns:
        TfoptWarning: There are such settings, and they cannot be read.
    Example:
        >>> recipe = Recipe(name="never tuned")
        >>> with_kept(recipe) == (recipe, {})
        True
    """
    of = _training(recipe)
    file = _file(of)
    if file is None or not os.path.lexists(file):
        return recipe, {}
    try:
        found = record_of(Kept, read_stored(file))
        own = record_of(Kept, replace(found, of=of or {}).to_json())  # as JSON has its values
        if found != own or not _may_have(recipe, found.settings):
            raise ConfigError("It must be as tfopt tune wrote it.")
        changed = with_changes(recipe, found.settings)
    except (ConfigError, OSError) as error:
        warn(f"{file}: the settings that were measured for this recipe cannot be read, so it runs without. {error}")
        return recipe, {}
    words = (
        f"tfopt tune measured {shown_ratio(found.speedup)} here on {found.made}, all such settings together ({file})"
    )
    return changed, {
        path.removeprefix("training.").removeprefix("data."): Reason(str(value), words)
        for path, value in flat(found.settings)
    }


def _training(recipe: Recipe) -> dict[str, Any] | None:
    """Returns what a measurement is of, as plain values; None if no run takes what was measured for the recipe."""
    taught = recipe.distillation
    if taught is not None:  # a parent teaches later stages, and outputs on disk are not in the trials of a search
        recipe = replace(recipe, distillation=None if taught.teacher == PARENT else replace(taught, teacher_cache=None))
    asked = recipe.training
    if asked.checkpoint_dir is not None or (asked.strategy in ("auto", "multi_worker") and find_cluster() is not None):
        return None
    try:
        settings = plain_settings(recipe)
    except ConfigError:
        return None
    training = {name: value for name, value in settings["training"].items() if name not in UNRELATED}
    machine = detect()
    return {
        **{name: settings.get(name) for name in ("task", "model", "data", "distillation")},
        "training": training,
        "files": {name: str(Path(value).absolute()) for name, value in flat(settings["data"]) if _is_path(value)},
        "processor": machine.processor,
        "cores": machine.logical_cores,
        "gpus": [gpu.name for gpu in machine.gpus],
        "versions": {"tfopt": version("tfopt"), "tensorflow": machine.tensorflow_version, "keras": keras.__version__},
    }


def _is_path(value: Any) -> bool:
    """Returns whether a setting is a path, which may name other files from another working directory."""
    return isinstance(value, str) and "\0" not in value and os.path.lexists(value)


def _plain(of: Mapping[str, Any] | None) -> bytes:
    return json.dumps(of, sort_keys=True, default=str).encode()


def _file(of: Mapping[str, Any] | None) -> Path | None:
    chosen = os.environ.get(VARIABLE, "~/.cache/tfopt")
    if of is None or not chosen:
        return None
    try:
        folder = Path(chosen).expanduser()
    except RuntimeError:  # a user without a home
        return None
    return folder / "measured" / f"{hashlib.sha256(_plain(of)).hexdigest()[:24]}.json"


def _may_have(recipe: Recipe, settings: Mapping[str, Any]) -> bool:
    """Returns whether the recipe leaves all of these settings to tfopt."""
    return all(path in MAY_BE_KEPT and _value(recipe, path) == "auto" for path, _ in flat(settings))


def _value(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value
