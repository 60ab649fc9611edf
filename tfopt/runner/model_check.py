"""Checks that a model fits the examples: its input their shape, and its output the targets of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfopt.data import Examples
from tfopt.errors import ConfigError
from tfopt.tasks import TASKS, Task

# The other tasks have class numbers as targets: one for each position of the outputs [batch, positions, classes].
OF_VALUES = ("multi_label_classification", "regression")


def check_input(model: keras.Model, examples: Examples) -> None:
    """Raises ConfigError unless the input of a model has the shape of the examples. Several inputs are not checked."""
    given = tf.nest.flatten(examples.element_spec[0])
    if len(model.inputs) != 1 or len(given) != 1 or given[0].shape.rank is None:
        return
    taken, shape = tuple(model.inputs[0].shape)[1:], tuple(given[0].shape)
    if not any(_alike(*pair) for pair in ((taken, shape), (taken, (*shape, 1)), ((*taken, 1), shape))):
        raise ConfigError(
            f"The input of a model must have the shape of the examples, {shape}. Received: {model.name!r}, which takes "
            f"{taken}. Make the input of the builder from input_shape."
        )


def check_outputs(model: keras.Model, examples: Examples, task: Task) -> None:
    """Raises ConfigError unless the output of a model fits the target of a task of tfopt.

    Tasks of the user's own are not checked: only they know what belongs together.
    """
    targets = tf.nest.flatten(examples.element_spec[1]) if len(examples.element_spec) > 1 else []
    if task is not TASKS.get(task.name):
        return
    if len(model.outputs) != 1 or len(targets) != 1:
        raise ConfigError(
            f"task={task.name!r} is for one output and one target. Received: {len(model.outputs)} outputs of "
            f"{model.name!r} and {len(targets)} targets. Pass a tfopt.tasks.Task with a dict of losses."
        )
    found, target = tuple(model.outputs[0].shape)[1:], tuple(targets[0].shape)
    if task.name in OF_VALUES or are_shares(examples, task):
        fits = _alike(found, target) or _alike(found, (*target, 1)) or _alike((*found, 1), target)
        wanted = "one value for each target"
    else:
        _check_classes(examples, task, targets[0].dtype)
        positions = target[:-1] if target and target[-1] == 1 and len(target) == len(found) else target
        fits = _alike(found[:-1], positions) and found[-1] in (examples.outputs, None)
        wanted = f"{examples.outputs} logits for each target"
    if not fits:
        raise ConfigError(
            f"The outputs of a model for {task.name} must be {wanted}. Received: outputs of shape {found} from "
            f"{model.name!r}, and targets of shape {target}. Use a builder for this task, give the source "
            "outputs=NUMBER, or set another task."
        )


def _check_classes(examples: Examples, task: Task, dtype: tf.DType) -> None:
    if not dtype.is_integer:
        raise ConfigError(
            f"Targets for {task.name} must be class numbers, or one-hot. Received: targets of dtype {dtype.name} from "
            f"{examples.name!r}. Store them as integers, or set task='regression'."
        )
    if examples.outputs < 2:
        raise ConfigError(
            f"{task.name} needs at least two classes. Received: {examples.outputs} from {examples.name!r}. "
            "Add examples of another class, or set another task."
        )


def are_shares(examples: Examples, task: Task) -> bool:
    """Returns whether the targets of a classification are shares of the classes, such as one-hot labels."""
    shape = tuple(getattr(examples.element_spec[1], "shape", ()))
    return task.name == "classification" and examples.outputs > 1 and shape == (examples.outputs,)


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def with_float_inputs(batches: Any, model: keras.Model) -> Any:
    """Returns batches of examples with whole numbers cast to the floats that the model takes, as its fit casts them.

    The model was trained on these values. So a pass that warns of unscaled values has nothing to warn of.
    """
    takes = [(each.name, each.dtype) for each in getattr(model, "inputs", None) or ()]
    given = _inputs_of(batches)
    if not takes or len(given) != len(takes) or not all(hasattr(each, "dtype") for each in given):
        return batches  # a model or examples of another form, which a later check names

    def cast(values: Any, dtype: str) -> Any:
        whole = values.dtype.is_integer or values.dtype.is_bool
        return tf.cast(values, dtype) if whole and tf.as_dtype(dtype).is_floating else values

    def cast_inputs(inputs: Any, *others: Any) -> Any:
        if isinstance(inputs, Mapping):
            names = dict(takes)
            return {name: cast(each, names.get(name, "int32")) for name, each in inputs.items()}, *others
        if isinstance(inputs, tuple):
            return tuple(cast(each, dtype) for each, (_, dtype) in zip(inputs, takes, strict=True)), *others
        return cast(inputs, takes[0][1]), *others

    return batches.map(cast_inputs)


def _inputs_of(batches: Any) -> list[Any]:
    inputs = batches.element_spec[0]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,))
