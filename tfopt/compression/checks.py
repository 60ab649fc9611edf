"""What a compression checks before its work: that the model, the examples and the settings fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import layers_inside
from tfopt.compression.candidates import most_ratios
from tfopt.compression.config import CompressionConfig
from tfopt.compression.trial import score_of
from tfopt.data import Examples
from tfopt.distillation import distill
from tfopt.distillation.config import PARENT, SoftLoss
from tfopt.distillation.teacher import check_inputs, inputs_by_name
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.graph.keras_file import first_line
from tfopt.graph.output_ops import output_ops
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.models.copying import copy_model
from tfopt.pruning.structured.shrink import find_groups
from tfopt.runner.model_check import with_float_inputs
from tfopt.settings.validation import check_type
from tfopt.tasks.scorer import Scorer

FEW, MOST_NAMED = 32, 3
OF_VALUES = ("mean_absolute_error",)  # metrics whose outputs are no classes
LOSSES_OF_VALUES = ("mean_", "huber", "log_cosh")


def check_model(model: Any, data: Any, config: CompressionConfig) -> Mapping[str, float]:
    """Checks what is known without running the model. Returns the largest share that each group of channels may lose.

    Raises:
        ConfigError: The examples are none.
        UnsupportedModelError: The model is not compiled, has no channels that can be removed, or a Lambda of a lambda.
    """
    check_type("data", data, Examples, "Pass for example tfopt.data.arrays(x, y).")
    check_keras_3(model)
    if not getattr(model, "compiled", False) or not model.get_compile_config():
        raise UnsupportedModelError(
            f"model must be compiled, because smaller ones are trained with its loss. Received: "
            f"{getattr(model, 'name', model)!r} without a loss. Call model.compile."
        )
    most = most_ratios(model, config.shrink)
    if not most:
        _, _, kept = find_groups(model, config.shrink.with_ratios({}))
        reasons = dict.fromkeys(f"{each.name} ({each.reason})" for each in kept)
        words = f": {'; '.join(list(reasons)[:MOST_NAMED])}" if reasons else ""
        raise UnsupportedModelError(
            f"model must have channels that can be removed. Received: {model.name!r} without any, with "
            f"round_to={config.shrink.round_to}{words}. Change what keeps them, set a smaller round_to, or export it "
            "in int8."
        )
    for layer in layers_inside(model):  # code in the model's file, which no process of a trial would read
        if isinstance(layer, keras.layers.Lambda) and getattr(layer.function, "__name__", "") == "<lambda>":
            raise UnsupportedModelError(
                "The layers of a model must be readable in the processes of the trials. Received: the Lambda "
                f"{layer.name!r}, whose function is a lambda. Write it as a class of a module, with "
                "keras.saving.register_keras_serializable."
            )
    return most


def check_examples(model: keras.Model, data: Examples, config: CompressionConfig) -> None:
    """Runs and scores the model on a few examples.

    Raises:
        ConfigError: They have other inputs; or the metric or the loss does not fit the labels.
    """
    graph = freeze_unfolded(model, trusted=True)
    check_inputs(data, graph, "model")
    batch = next(iter(with_float_inputs(data.batches("validation", FEW), model)))
    inputs, labels = batch[0], tf.nest.map_structure(np.asarray, batch[1])
    given = {name: tf.cast(each, graph.inputs[name].dtype) for name, each in inputs_by_name(inputs, graph).items()}
    outputs = graph.as_function()(**given)
    arrays = {name: outputs[name].numpy() for name in graph.outputs}
    Scorer(score_of(config.metric, data), labels, arrays, output_ops(graph)).check(arrays)
    try:
        model.evaluate(*batch[:2], verbose=0)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        shapes = keras.tree.map_structure(lambda each: tuple(each.shape), labels)
        raise ConfigError(
            f"data must have labels that the model's loss takes. Received: labels of shape {shapes} ("
            f"{first_line(error).removesuffix('.')}). Compile the model with a loss for them."
        ) from error


def with_fitting_teacher(config: CompressionConfig, model: keras.Model) -> CompressionConfig:
    """Returns the settings with a loss of the teacher that is like the model's own, where the default is not.

    Raises:
        ConfigError: The outputs cannot learn from the teacher.
    """
    taught = config.distillation
    if taught is None:
        return config
    kind = "mse" if config.metric in OF_VALUES else _kind_of(model)
    if taught.loss == "kl" and kind != "kl":
        taught = replace(taught, loss=kind)
    teacher = model if taught.teacher == PARENT else taught.teacher
    distill(copy_model(model), teacher, taught.distillation())
    return replace(config, distillation=taught)


def _kind_of(model: keras.Model) -> SoftLoss:
    """Returns how a teacher teaches all outputs: "kl" unless all losses are for other outputs than classes."""
    losses = [keras.losses.get(each) for each in keras.tree.flatten(model.loss) if each is not None]
    names = [str(getattr(each, "name", None) or getattr(each, "__name__", "")) for each in losses]
    if names and all(name.startswith("binary") for name in names):
        return "binary"
    return "mse" if names and all(name.startswith(LOSSES_OF_VALUES) for name in names) else "kl"
