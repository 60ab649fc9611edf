"""Checks that the outputs of a model fit the targets of its task, before the training."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfopt.data import Examples
from tfopt.errors import ConfigError
from tfopt.tasks import TASKS, Task

# The other tasks have class numbers as targets: one for each position of the outputs [batch, positions, classes].
OF_VALUES = ("multi_label_classification", "regression")


def check_outputs(model: keras.Model, examples: Examples, task: Task) -> None:
    """Raises ConfigError unless the one output of a model fits the one target of a task of tfopt.

    Tasks of the user's own, and models of several outputs, are not checked: only they know what belongs together.
    """
    targets = tf.nest.flatten(examples.element_spec[1]) if len(examples.element_spec) > 1 else []
    if len(model.outputs) != 1 or len(targets) != 1 or task is not TASKS.get(task.name):
        return
    found, target = tuple(model.outputs[0].shape)[1:], tuple(targets[0].shape)
    if task.name in OF_VALUES or are_shares(examples, task):
        fits = _alike(found, target) or _alike(found, (*target, 1)) or _alike((*found, 1), target)
        wanted = "one value for each target"
    else:
        positions = target[:-1] if target and target[-1] == 1 and len(target) == len(found) else target
        fits = _alike(found[:-1], positions) and found[-1] in (examples.outputs, None)
        wanted = f"{examples.outputs} logits for each target"
    if not fits:
        raise ConfigError(
            f"The outputs of a model for {task.name} must be {wanted}. Received: outputs of shape {found} from "
            f"{model.name!r}, and targets of shape {target}. Use a builder for this task, or set another task."
        )


def are_shares(examples: Examples, task: Task) -> bool:
    """Returns whether the targets of a classification are shares of the classes, such as one-hot labels."""
    shape = tuple(getattr(examples.element_spec[1], "shape", ()))
    return task.name == "classification" and examples.outputs > 1 and shape == (examples.outputs,)


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))
