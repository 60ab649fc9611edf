"""Speed settings that `tfopt tune` has measured for a recipe, kept on this machine for its later runs.

A kept result is of one training on one machine: the model, its examples, the settings that were asked for, the
processor, the GPUs and the versions. A run whose training differs in any of them decides as it would without. Only
settings that the recipe leaves to tfopt ("auto") are kept.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tfopt.atomic.files import writing_to
from tfopt.atomic.own_files import json_with, write_own
from tfopt.errors import ConfigError, warn
from tfopt.hardware import detect
from tfopt.recipe.changes import with_changes
from tfopt.recipe.recipe import Recipe
from tfopt.recipe.tables import flat, plain_settings
from tfopt.report import Record
from tfopt.report.record import record_of
from tfopt.timing import Estimate, shown_ratio

VARIABLE = "TFOPT_CACHE_DIR"
# Settings of a training that change neither a step nor what was asked of it.
UNRELATED = (
    *("epochs", "learning_rate", "decay", "warmup_epochs", "base_batch_size", "weight_decay", "label_smoothing"),
    *("checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume", "seed"),
)
IS_OWN = json_with("of", "settings", "speedup")


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
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


def keep(recipe: Recipe, settings: Mapping[str, Any], speedup: Estimate) -> Path | None:
    """Keeps measured settings for later runs of a recipe, in place of earlier ones.

    Returns: The file; None if nothing is kept: the settings change what the recipe asks for, the recipe holds Python
        objects, or the variable TFOPT_CACHE_DIR is empty.
    Raises:
        ConfigError: The file's place belongs to another file.
        ExportError: The file cannot be written.
    """
    of = _training(recipe)
    file = _file(of)
    if file is None or not all(_is_auto(recipe, path) for path, _ in flat(settings)):
        return None
    made = datetime.date.today().isoformat()
    found = Measured(recipe=recipe.name, made=made, of=of or {}, settings=settings, speedup=speedup)
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_own(file, found.to_json(), IS_OWN)
    return file


def forget(recipe: Recipe) -> None:
    """Removes what is kept for a recipe, if anything is.

    Raises:
        ExportError: It cannot be removed.
    """
    file = _file(_training(recipe))
    if file is None or not file.is_file():
        return
    with writing_to(file):
        if IS_OWN(file.read_bytes()):
            file.unlink()


def with_measured(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Returns the recipe with the settings that were measured for it here, and their reasons by setting.

    Example:
        >>> recipe = Recipe(name="never tuned")
        >>> with_measured(recipe) == (recipe, {})
        True
    """
    of = _training(recipe)
    file = _file(of)
    if file is None or not file.is_file():
        return recipe, {}
    try:
        found = record_of(Measured, file.read_bytes())
        changed = with_changes(recipe, found.settings)
    except (ConfigError, OSError) as error:
        warn(f"Settings that were measured for this recipe cannot be read, so it runs without them: {error}")
        return recipe, {}
    reason = (
        f"tfopt tune measured {shown_ratio(found.speedup)} here on {found.made}, all such settings together ({file})"
    )
    return changed, {path.removeprefix("training.").removeprefix("data."): reason for path, _ in flat(found.settings)}


def _training(recipe: Recipe) -> dict[str, Any] | None:
    """Returns what a measurement is of, as plain values; None if the recipe holds objects that have none."""
    try:
        settings = plain_settings(recipe)
    except ConfigError:
        return None
    training = {name: value for name, value in settings["training"].items() if name not in UNRELATED}
    machine = detect()
    return {
        **{name: settings.get(name) for name in ("task", "model", "data", "distillation")},
        "training": training,
        "processor": machine.cpu_model,
        "cores": machine.logical_cores,
        "gpus": [gpu.name for gpu in machine.gpus],
        "tensorflow": machine.tensorflow_version,
        "keras": keras.__version__,
    }


def _file(of: Mapping[str, Any] | None) -> Path | None:
    chosen = os.environ.get(VARIABLE, "~/.cache/tfopt")
    if of is None or not chosen:
        return None
    name = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(chosen).expanduser() / "measured" / f"{name}.json"


def _is_auto(recipe: Recipe, path: str) -> bool:
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value == "auto"
