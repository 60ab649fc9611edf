"""The directory of a search: what the processes of its trials read, and the mark that says of which search it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, json_in, json_with
from tfopt.compression.config import CompressionConfig
from tfopt.compression.trial import BASELINE, DATA, MODEL
from tfopt.data import Examples, convert
from tfopt.data.records.earlier import OtherSourceError
from tfopt.errors import ConfigError
from tfopt.exporting import export
from tfopt.recipe.tables import flat, plain_settings
from tfopt.runner.model_check import with_float_inputs

MARK = "compression.json"
# What a later call may change: it goes on with other limits, or judges the same trials by another budget.
FREE = (
    *("time_limit_s", "trial_limit_s", "max_trials"),
    *("max_score_drop", "max_latency_ms", "max_bytes", "max_memory_bytes"),
)
MOST_NAMED = 3


def prepare(
    folder: Path,
    model: keras.Model,
    data: Examples,
    config: CompressionConfig,
    source: str,
    is_begun: bool,
    on_step: Callable[[str], object],
) -> None:
    """Writes the examples, the float32 artifact and the model, and at last the mark; of an earlier call it checks them.

    Args:
        is_begun: Whether an earlier call has measured something in the directory. Otherwise it may get other settings.
    Raises:
        ConfigError: The directory is of another search, or holds something else.
    """
    mark = folder / MARK
    check_replaceable(mark, json_with("compression"))
    earlier = json_in(mark.read_bytes()) if mark.is_file() and is_begun else None
    own = {"compression": _digest(model), "settings": _settings(config), "source": source}
    if earlier is not None and (differs := _difference(earlier, own)):
        raise ConfigError(
            f"directory must be new, or of the same model and settings. Received: {str(folder)!r}, which has "
            f"a compression {differs}. Choose another directory, or remove it."
        )
    if earlier is None and any(folder.iterdir()) and not (folder / DATA).is_dir():
        raise ConfigError(
            f"directory must be new, or of an earlier compression. Received: {str(folder)!r}, which holds "
            "something else. Choose another directory."
        )
    on_step("writing the examples")
    try:
        convert(data, folder / DATA)  # of an earlier call it compares them
    except OtherSourceError as error:
        raise ConfigError(
            f"data must be the examples of the earlier call. Received: {data.name!r}, and {str(folder)!r} with a "
            "compression of other examples. Choose another directory, or remove it."
        ) from error
    if earlier is None:
        on_step("exporting the model in float32")
        examples = with_float_inputs(data.batches("train"), model)
        export(model, folder / BASELINE, calibration_data=examples)
        unfinished = folder / f".{MODEL}"
        model.save(unfinished)
        unfinished.replace(folder / MODEL)
        write_text(mark, json.dumps(own))


def source_of(folder: Path) -> str | None:
    """Returns from which recipe or file the model of a directory is; None if it has no whole model."""
    found = json_in((folder / MARK).read_bytes()) if (folder / MARK).is_file() else None
    return str(found.get("source", "")) if isinstance(found, dict) and (folder / MODEL).is_file() else None


def _settings(config: CompressionConfig) -> dict[str, Any]:
    """Returns the settings that tell searches apart, by their paths."""
    return {name: value for name, value in flat(plain_settings(config)) if name not in FREE}


def _difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns in words what an earlier compression has of its own; nothing if it is the same."""
    if "settings" not in earlier:
        return "of an earlier version of tfopt"
    if earlier["compression"] != now["compression"]:
        return "of another model"
    one, two = _by_stage(earlier["settings"], now["settings"])
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    words = ", ".join(f"{name}={one.get(name)!r} in place of {two.get(name)!r}" for name in names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"with {words}{more}" if names else ""


def _by_stage(*settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns settings as JSON has them; a stage that is on in one of them only is a single one, "on"."""
    plain = [json.loads(json.dumps(dict(each))) for each in settings]
    stages = [{name.partition(".")[0] for name in each if "." in name} for each in plain]
    alone = set.symmetric_difference(*stages)
    return [
        {name: value for name, value in each.items() if name.partition(".")[0] not in alone}
        | dict.fromkeys(alone & own, "on")
        for each, own in zip(plain, stages, strict=True)
    ]


def _digest(model: keras.Model) -> str:
    """Returns what tells models apart: the layers, the loss and the weights."""
    # Not how the layers were built, nor the optimizer: a model that was saved and loaded is the same.
    layers = json.loads(model.to_json(), object_hook=_without_state)
    digest = hashlib.sha256(json.dumps([layers, model.get_compile_config().get("loss")]).encode())
    for weight in model.weights:
        digest.update(weight.name.encode() + weight.numpy().tobytes())  # the path of a Sequential changes
    return digest.hexdigest()


def _without_state(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("build_config", "compile_config")}
