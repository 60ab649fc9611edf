"""Computes the loss of a batch as Keras does, with two corrections.

Keras keeps a mean for the loss of each output, and adds one value to it for each batch. If Keras knows the batch size
while it traces the step, it weights the value by the batch size, otherwise by one. So the last, smaller batch of an
epoch counts as much as a whole batch, and so does the smaller of two micro-batches. Here, each value is weighted by its
number of examples, as Keras weights the loss of the whole model.

A layer under a half precision policy adds its own losses (`add_loss`, an activity regularizer) in half precision. Keras
cannot add these to the loss of the outputs, which is float32, and raises TypeError. Here, they are cast first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from tfopt.compat.layers import added_losses, layers_inside
from tfopt.compat.trainer import loss_of, output_loss_means


def compute_loss(
    model: keras.Model, *, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool, examples: Any
) -> Any:
    """Returns a model's loss, and updates the metrics of the losses of its outputs.

    Args:
        model: A compiled model, which has just been called on `x`.
        x, y, y_pred, sample_weight, training: As in `keras.Model.compute_loss`.
        examples: The number of examples; None counts batches in the means of the outputs, as Keras does.
    """
    _cast_added_losses(model)
    with _output_losses_count(model, examples):
        return loss_of(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def _cast_added_losses(model: keras.Model) -> None:
    for layer in layers_inside(model):
        losses = added_losses(layer)
        for place, loss in enumerate(losses):
            dtype = keras.backend.standardize_dtype(loss.dtype)
            if dtype in ("float16", "bfloat16") and dtype != keras.config.floatx():
                losses[place] = keras.ops.cast(loss, keras.config.floatx())


@contextlib.contextmanager
def _output_losses_count(model: keras.Model, examples: Any) -> Iterator[None]:
    """While a loss is computed, weights the values of each output's loss metric by the number of examples."""
    means = [] if examples is None else output_loss_means(model)  # the first call adds to it
    for mean in means:
        mean.update_state = functools.partial(_count, mean, examples)
    try:
        yield
    finally:
        for mean in means:
            del mean.update_state


def _count(mean: keras.metrics.Metric, examples: Any, value: Any, sample_weight: Any = None) -> None:
    type(mean).update_state(mean, value, sample_weight=examples)
