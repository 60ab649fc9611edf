"""What a compression checks before its work: that the model, the examples and the settings fit each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import layers_inside
from tfopt.compression.candidates import most_ratios
from tfopt.compression.config import DROP, CompressionConfig
from tfopt.compression.front import excess, show_figure
from tfopt.compression.trial import score_of
from tfopt.data import Examples
from tfopt.distillation import distill
from tfopt.distillation.config import PARENT
from tfopt.distillation.losses import fitting_loss
from tfopt.distillation.teacher import check_inputs, inputs_by_name
from tfopt.errors import ConfigError, TfoptError, UnsupportedModelError
from tfopt.graph.frozen import FrozenGraph, reason_of
from tfopt.graph.output_ops import output_ops
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.models.copying import copy_model
from tfopt.pruning.structured.shrink import find_groups
from tfopt.runner.model_check import with_float_inputs
from tfopt.settings.validation import check_type
from tfopt.tasks.scorer import Scorer
from tfopt.terminal import without_colors

FEW, MANY, MOST_NAMED = 32, 32, 3
NOISE = 1.05  # of a measured latency
OF_VALUES = ("mean_absolute_error",)  # metrics whose outputs are no classes


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
    """Runs and scores the model on a few examples, on more where these do not tell what the labels are.

    Raises:
        ConfigError: There are no examples or labels, or they have other inputs; or the metric or the loss does not fit
            the labels.
    """
    graph = freeze_unfolded(model, trusted=True)
    check_inputs(data, graph, "model", "data")
    size = next(iter(graph.inputs.values())).shape[0] or FEW
    batches = with_float_inputs(data.batches("validation", size), model)
    first: tuple[Any, ...] = next(iter(batches.take(1)), ())
    if len(first) < 2:
        raise ConfigError(
            f"data must have examples with labels to score. Received: {data.name!r}, "
            f"{'whose examples have no labels' if first else 'whose validation part is empty'}. Add some."
        )
    try:
        _score(graph, [first], data, config.metric)
    except ConfigError:
        alike = [each for each in batches.take(MANY) if _shapes(each[1]) == _shapes(first[1])]
        _score(graph, alike, data, config.metric)
    try:
        model.evaluate(*first[:2], verbose=0)
    except (TfoptError, tf.errors.ResourceExhaustedError):
        raise
    except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
        raise ConfigError(
            f"data must have labels that the model's loss takes. Received: labels of shape {_shapes(first[1])} ("
            f"{reason_of(without_colors(str(error))).removesuffix('.')}). Compile the model with a loss for them."
        ) from error


def _shapes(values: Any) -> Any:
    return keras.tree.map_structure(lambda each: tuple(each.shape), values)


def _score(graph: FrozenGraph, batches: Sequence[Any], data: Examples, metric: str) -> None:
    function = graph.as_function()
    found = []
    for inputs, *_ in batches:
        given = inputs_by_name(inputs, graph)
        found.append(function(**{name: tf.cast(each, graph.inputs[name].dtype) for name, each in given.items()}))
    outputs = {name: np.concatenate([each[name].numpy() for each in found]) for name in graph.outputs}
    labels = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *(batch[1] for batch in batches))
    Scorer(score_of(metric, data), labels, outputs, output_ops(graph)).check(outputs)


def check_reachable(smallest: Mapping[str, float], config: CompressionConfig) -> None:
    """Raises ConfigError if the figures of the smallest model exceed a bound of size or speed."""
    own = {name: value for name, value in smallest.items() if name != DROP}
    budget = {name: bound * (NOISE if name.startswith("ms") else 1) for name, bound in config.budget.items()}
    over = excess(own, budget)
    if over:
        words = "; ".join(
            f"{name} {show_figure(name, config.budget[name])}, and the smallest model takes "
            f"{show_figure(name, own[name])}, {show_figure(name, own[name] - config.budget[name])} above it"
            for name in over
        )
        raise ConfigError(
            f"The budget must be reachable on this machine. Received: {words} (max_ratio="
            f"{config.shrink.max_ratio:g}, round_to={config.shrink.round_to}). Set a larger budget, a "
            "larger max_ratio or a smaller round_to, or choose another format."
        )


def with_fitting_teacher(config: CompressionConfig, model: keras.Model) -> CompressionConfig:
    """Returns the settings with a loss of the teacher that is like the model's own, where the default is not.

    Raises:
        ConfigError: The outputs cannot learn from the teacher.
    """
    taught = config.distillation
    if taught is None:
        return config
    if taught.loss == "kl":
        ops = output_ops(freeze_unfolded(model, trusted=True)).values()
        losses = [each for each in keras.tree.flatten(model.loss) if each is not None] or [None]
        fitting = {fitting_loss(op, loss) for op, loss in itertools.product(ops, losses)}
        kind = "mse" if config.metric in OF_VALUES else fitting.pop() if len(fitting) == 1 else "kl"
        taught = replace(taught, loss=kind)
    teacher = model if taught.teacher == PARENT else taught.teacher
    distill(copy_model(model), teacher, taught.distillation())
    return replace(config, distillation=taught)
