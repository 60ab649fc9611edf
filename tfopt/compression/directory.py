"""The directory of a search: what the processes of its trials read, and the mark that says of which search it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, json_in, json_with
from tfopt.compat.layers import layers_inside
from tfopt.compression.config import CompressionConfig
from tfopt.compression.trial import BASELINE, DATA, MODEL
from tfopt.data import Examples, convert
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import export
from tfopt.runner.model_check import with_float_inputs

MARK = "compression.json"
# What a later call may change: it goes on with other limits, or judges the same trials by another budget.
FREE: dict[str, Any] = {
    "time_limit_s": 1.0,
    "trial_limit_s": None,
    "max_trials": None,
    "max_score_drop": None,
    "max_latency_ms": (),
    "max_bytes": None,
    "max_memory_bytes": None,
}


def prepare(
    folder: Path,
    model: keras.Model,
    data: Examples,
    config: CompressionConfig,
    source: str,
    on_step: Callable[[str], object],
) -> None:
    """Writes the examples, the float32 artifact and the model, and at last the mark; of an earlier call it checks them.

    Raises:
        ConfigError: The directory is of another search, or holds something else.
        UnsupportedModelError: The model has a Lambda with a lambda.
    """
    _check_readable(model)
    mark, digest = folder / MARK, _digest(model, config)
    check_replaceable(mark, json_with("compression"))
    earlier = json_in(mark.read_bytes()) if mark.is_file() else None
    if earlier is not None and earlier["compression"] != digest:
        raise ConfigError(
            f"directory must be new, or of the same model and settings. Received: {str(folder)!r}, which has "
            "a compression of another model or with other settings. Choose another directory, or remove it."
        )
    if earlier is None and any(folder.iterdir()) and not (folder / DATA).is_dir():
        raise ConfigError(
            f"directory must be new, or of an earlier compression. Received: {str(folder)!r}, which holds "
            "something else. Choose another directory."
        )
    on_step("writing the examples")
    convert(data, folder / DATA)  # of an earlier call it compares them
    if earlier is None:
        on_step("exporting the model in float32")
        examples = with_float_inputs(data.batches("train"), model)
        export(model, folder / BASELINE, calibration_data=examples)
        unfinished = folder / f".{MODEL}"
        model.save(unfinished)
        unfinished.replace(folder / MODEL)
        write_text(mark, json.dumps({"compression": digest, "source": source}))


def _check_readable(model: keras.Model) -> None:
    """Refuses code in the model's file, which no process of a trial would read."""
    for layer in layers_inside(model):
        if isinstance(layer, keras.layers.Lambda) and getattr(layer.function, "__name__", "") == "<lambda>":
            raise UnsupportedModelError(
                "The layers of a model must be readable in the processes of the trials. Received: the Lambda "
                f"{layer.name!r}, whose function is a lambda. Write it as a class of a module, with "
                "keras.saving.register_keras_serializable."
            )


def source_of(folder: Path) -> str | None:
    """Returns from which recipe or file the model of a directory is; None if it has no whole model."""
    found = json_in((folder / MARK).read_bytes()) if (folder / MARK).is_file() else None
    return str(found.get("source", "")) if isinstance(found, dict) and (folder / MODEL).is_file() else None


def _digest(model: keras.Model, config: CompressionConfig) -> str:
    """Returns what tells searches apart: the settings, the layers, the loss and the weights."""
    digest = hashlib.sha256(repr(replace(config, **FREE)).encode())
    # Not how the layers were built, nor the optimizer: a model that was saved and loaded is the same.
    layers = json.loads(model.to_json(), object_hook=_without_state)
    digest.update(json.dumps([layers, model.get_compile_config().get("loss")]).encode())
    for weight in model.weights:
        digest.update(weight.name.encode() + weight.numpy().tobytes())  # the path of a Sequential changes
    return digest.hexdigest()


def _without_state(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("build_config", "compile_config")}
