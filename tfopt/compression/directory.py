"""The directory of a search: what the processes of its trials read, and the mark that says of which search it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, json_in, json_with
from tfopt.compat.layers import layers_inside
from tfopt.compression.config import CompressionConfig
from tfopt.compression.trial import BASELINE, DATA, MODEL, score_of
from tfopt.data import Examples, convert
from tfopt.distillation.teacher import inputs_by_name
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import export
from tfopt.graph.output_ops import output_ops
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.recipe.tables import flat, plain_settings
from tfopt.runner.model_check import with_float_inputs
from tfopt.tasks.scorer import Scorer

MARK = "compression.json"
# What a later call may change: it goes on with other limits, or judges the same trials by another budget.
FREE = (
    *("time_limit_s", "trial_limit_s", "max_trials"),
    *("max_score_drop", "max_latency_ms", "max_bytes", "max_memory_bytes"),
)
MOST_NAMED, FEW = 3, 32


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
        ConfigError: The directory is of another search, or holds something else; or the metric does not fit the
            outputs and the labels.
        UnsupportedModelError: The model has a Lambda with a lambda.
    """
    _check_readable(model)
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
    if earlier is None:
        check_score(config.metric, model, data)
    on_step("writing the examples")
    convert(data, folder / DATA)  # of an earlier call it compares them
    if earlier is None:
        on_step("exporting the model in float32")
        examples = with_float_inputs(data.batches("train"), model)
        export(model, folder / BASELINE, calibration_data=examples)
        unfinished = folder / f".{MODEL}"
        model.save(unfinished)
        unfinished.replace(folder / MODEL)
        write_text(mark, json.dumps(own))


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


def _settings(config: CompressionConfig) -> dict[str, Any]:
    """Returns the settings that tell searches apart, by their paths."""
    return {name: value for name, value in flat(plain_settings(config)) if name not in FREE}


def _difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns in words what an earlier compression has of its own; nothing if it is the same."""
    if earlier["compression"] != now["compression"]:
        return "of another model"
    one, two = dict(earlier.get("settings", {})), json.loads(json.dumps(now["settings"]))
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    words = ", ".join(f"{name}={one.get(name)!r} in place of {two.get(name)!r}" for name in names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"with {words}{more}" if names else ""


def check_score(metric: str, model: keras.Model, examples: Examples) -> None:
    """Scores a model on a few examples.

    Raises:
        ConfigError: The metric does not fit its outputs or the labels.
    """
    graph = freeze_unfolded(model, trusted=True)
    batch = next(iter(with_float_inputs(examples.batches("validation", FEW), model)))
    inputs, labels = batch[0], tf.nest.map_structure(np.asarray, batch[1])
    given = {name: tf.cast(each, graph.inputs[name].dtype) for name, each in inputs_by_name(inputs, graph).items()}
    outputs = graph.as_function()(**given)
    arrays = {name: outputs[name].numpy() for name in graph.outputs}
    Scorer(score_of(metric, examples), labels, arrays, output_ops(graph)).check(arrays)


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
