"""Computes the loss of a batch, or of a part of one, so that the parts add up to what Keras computes for the batch.

A step divides a batch of B examples into parts. It weights the loss of a part by its share m / B, where m is the number
of its examples. That is exact for a mean over examples. Three corrections make up for what is not one:

Keras divides the loss by the number c of items that count, if some do not: those under a mask, of `ignore_class` or of
a layer such as Embedding(mask_zero=True). With reduction="mean_with_sample_weight", c is the sum of the weights. With C
as the sum of c over all parts,

    loss of the batch  =  sum over parts of (c / C) * loss of the part

So the loss of a part is multiplied by (c / C) / (m / B). C must be known before, so a step first counts the whole
batch. No weights are needed for that: TensorFlow computes nothing but the masks.

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
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.compat.layers import added_losses, layers_inside
from tfopt.compat.replace import replaced
from tfopt.compat.trainer import loss_of, masked_weights, output_loss_means, reductions_visited


class Part(NamedTuple):
    """A part of a batch."""

    share: Any  # its examples divided by those of the batch
    # For each loss that does not count all items, in the order in which they are computed, the number that counts in
    # the batch. None if all losses count all items.
    totals: Any = None


def parts_in_words(replicas: int, micro_batches: int) -> str:
    """Returns how a batch is divided, in words; an empty string if it is not.

    Example:
        >>> parts_in_words(2, 4), parts_in_words(1, 1)
        ('2 replicas and 4 micro-batches', '')
    """
    parts = {"replicas": replicas, "micro-batches": micro_batches}
    return " and ".join(f"{count} {name}" for name, count in parts.items() if count > 1)


class _Visitor(threading.local):
    """What is done with the losses that are computed in this thread. A strategy traces each replica in its own."""

    visit: Callable[[Any, Any], Any] | None = None


_visitor = _Visitor()


def compute_loss(
    model: keras.Model,
    *,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    training: bool,
    examples: Any,
    part: Part | None = None,
) -> Any:
    """Returns a model's loss, and updates the metrics of the losses of its outputs. It has just been called on `x`.

    The arguments are those of `keras.Model.compute_loss`, and the number of examples (None counts batches in the means
    of the outputs, as Keras does) and the part of a batch that this is (None is a whole batch).
    """
    _cast_added_losses(model)
    compute = functools.partial(loss_of, model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
    with _output_losses_count(model, examples):
        return compute() if part is None else loss_of_part(compute, part)


def loss_of_part(compute: Callable[[], Any], part: Part) -> Any:
    """Returns a loss such that the losses of all parts of a batch, weighted by their shares, are that of the batch."""
    if part.totals is None:
        return compute()
    totals = iter(tf.unstack(part.totals))

    def weigh(loss: Any, count: Any) -> Any:
        weight = tf.math.divide_no_nan(count, next(totals) * tf.cast(part.share, "float32"))
        return loss * tf.cast(weight, loss.dtype)

    with visible_reductions(), _visiting(weigh):
        return compute()


def counts_of(compute: Callable[[], Any], model: keras.Model | None = None) -> list[Any]:
    """Returns the number of items that count, for each loss in a computation that does not count all of them.

    No variable of the model or of its metrics changes.
    """
    counts = []

    def note(loss: Any, count: Any) -> Any:
        counts.append(count)
        return loss

    # In this scope, Keras hands None to a regularizer unless the weight has a value of its own.
    weights = [] if model is None else model.trainable_weights
    regularized = [(weight, weight.value) for weight in weights if weight.regularizer is not None]
    with visible_reductions(), _visiting(note), keras.StatelessScope(regularized):
        compute()
    return counts


@contextlib.contextmanager
def visible_reductions() -> Iterator[None]:
    """Lets the losses be visited that Keras computes within it.

    What is traced for several replicas must be within one such scope, since their threads take turns.
    """
    with reductions_visited(_visit):
        yield


@contextlib.contextmanager
def _visiting(visit: Callable[[Any, Any], Any]) -> Iterator[None]:
    before, _visitor.visit = _visitor.visit, visit
    try:
        yield
    finally:
        _visitor.visit = before


def _visit(loss: Any, values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    if _visitor.visit is None or len(keras.ops.shape(values)) == 0:  # a number: there is nothing to count
        return loss
    if reduction == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
        counted = masked_weights(sample_weight, mask)
    elif reduction in ("sum_over_batch_size", "mean") and mask is not None:
        counted = mask
    else:
        return loss
    return _visitor.visit(loss, keras.ops.sum(keras.ops.cast(counted, "float32")))


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

    def count(mean: keras.metrics.Metric, value: Any, sample_weight: Any = None) -> None:
        type(mean).update_state(mean, value, sample_weight=examples)

    with contextlib.ExitStack() as scopes:
        for mean in means:
            scopes.enter_context(replaced(mean, update_state=functools.partial(count, mean)))
        yield
