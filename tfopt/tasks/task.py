"""What a model is trained for. Nothing else knows a loss or a metric by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfopt.data.examples import Examples
from tfopt.tasks.scores import BitsPerByte, MeanAbsoluteError, MeanIoU, Score


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: functions of the examples that make what training and verification need.

    The outputs of the models are logits, or the values themselves for a regression.

    Attributes:
        name: Name of the task.
        loss: Makes the loss, anything that Keras' `compile` accepts.
        metrics: Makes the metrics of Keras' `compile`: a list, or a dict by output name.
        score: Makes the score of an artifact: a Score, or a metric name of `tfopt.verify`, such as "accuracy".
        soft_loss: Makes the loss for targets that mix several classes (mixup, cutmix): one float for each class. None
            if the task has no such targets.

    Example:
        >>> from tfopt.data import synthetic
        >>> TASKS["regression"].loss(synthetic(examples=100, input_shape=(2,))).name
        'mean_squared_error'
    """

    name: str
    loss: Callable[[Examples], Any]
    metrics: Callable[[Examples], Any]
    score: Callable[[Examples], Score | str]
    soft_loss: Callable[[Examples], Any] | None = None


def _keras() -> Any:
    """Returns Keras, imported when a task makes something: a recipe names its task without it."""
    import keras

    return keras


def _cross_entropy(examples: Examples) -> Any:
    return _keras().losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=examples.ignored_target)


def _binary_cross_entropy(examples: Examples) -> Any:
    return _keras().losses.BinaryCrossentropy(from_logits=True)


def _mean_iou(examples: Examples) -> list[Any]:
    classes, ignored = examples.outputs, examples.ignored_target
    return [_keras().metrics.MeanIoU(classes, ignore_class=ignored, sparse_y_pred=False, name="mean_iou")]


def _bits(examples: Examples) -> list[Any]:
    from tfopt.tasks.keras_metrics import BitsPerByteMetric  # it imports Keras

    return [BitsPerByteMetric(examples.bytes_per_target, examples.ignored_target, name="bits_per_byte")]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="classification",
            loss=_cross_entropy,
            soft_loss=lambda examples: _keras().losses.CategoricalCrossentropy(from_logits=True),
            metrics=lambda examples: ["accuracy"],
            score=lambda examples: "accuracy",
        ),
        Task(
            name="multi_label_classification",
            loss=_binary_cross_entropy,
            soft_loss=_binary_cross_entropy,
            metrics=lambda examples: [_keras().metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
            score=lambda examples: "binary_accuracy_from_logits",
        ),
        Task(
            name="segmentation",
            loss=_cross_entropy,
            metrics=_mean_iou,
            score=lambda examples: MeanIoU(examples.ignored_target),
        ),
        Task(
            name="language_model",
            loss=_cross_entropy,
            metrics=_bits,
            score=lambda examples: BitsPerByte(examples.bytes_per_target, examples.ignored_target),
        ),
        Task(
            name="regression",
            loss=lambda examples: _keras().losses.MeanSquaredError(),
            metrics=lambda examples: [_keras().metrics.MeanAbsoluteError(name="mean_absolute_error")],
            score=lambda examples: MeanAbsoluteError(),
        ),
    )
}
