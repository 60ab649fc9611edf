"""Private names of `fit` and `evaluate`: what they call, read and keep on a compiled model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.checks import check_reads, imported, private, private_module, set_private
from tfopt.compat.replace import replaced

BUILD = "_maybe_symbolic_build"  # what `fit` and `evaluate` call once they have made their iterator
ITERATOR = ("steps_per_epoch", "steps_per_execution", "num_batches", "data_adapter", "catch_stop_iteration")


def check_fit() -> None:
    """Checks that `fit`, `evaluate` and `predict` call and read what tfopt sets on a model, or it would do nothing.

    `_maybe_symbolic_build` and the functions of the steps are methods of keras.Model that no public hook replaces.
    """
    private(keras.Model, BUILD, takes=("iterator", "data_batch"))
    check_reads(keras.Model.fit, BUILD, "make_train_function", "train_function", "_initial_epoch")
    check_reads(keras.Model.evaluate, BUILD, "make_test_function", "test_function")
    check_reads(keras.Model.predict, "make_predict_function", "predict_function")
    for name in ("make_train_function", "make_test_function"):
        private(keras.Model, name, takes=("force",))


def symbolic_build(model: keras.Model, data_batch: Any) -> None:
    """Builds layers, metrics, losses and optimizer without computing: `_symbolic_build`; there is no public way."""
    private(model, "_symbolic_build", takes=("iterator", "data_batch"))(data_batch=data_batch)


def symbolic_call(function: Callable[..., Any], *specs: Any) -> Any:
    """Calls a function on symbolic tensors, without computing: `compute_output_spec` of keras.src.backend."""
    return imported("keras.src.backend", "compute_output_spec", takes=("fn", "args", "kwargs"))(function, *specs)


def compile_config(model: keras.Model) -> Any:
    """Returns an object that `compile` makes anew: `_compile_config`, since `get_compile_config()` copies it."""
    return private(model, "_compile_config")


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Lets the `fit` that has begun start at an epoch: `_initial_epoch`, since its argument is given before."""
    check_reads(keras.Model.fit, "_initial_epoch")
    set_private(model, "_initial_epoch", epoch)


def running_callbacks() -> keras.callbacks.CallbackList | None:
    """Returns the list that is calling a callback, or None: the `self` of a caller's frame; a callback is not told."""
    for calls in (keras.callbacks.CallbackList.on_train_begin, keras.callbacks.CallbackList.on_train_end):
        check_reads(calls, "callbacks")
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back
    return None


def profiles_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Returns whether a TensorBoard profiles some batches: `_should_trace`; it does not keep its `profile_batch`."""
    return bool(private(callback, "_should_trace"))


def built_under(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy of a model or None: `_distribute_strategy`, since `distribute_strategy` has a default."""
    return private(model, "_distribute_strategy")


def loss_of(model: keras.Model, *, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """Returns the loss of a batch: `_compute_loss`, which leaves out `training` where an override lacks it."""
    compute = private(model, "_compute_loss", takes=("x", "y", "y_pred", "sample_weight", "training"))
    return compute(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def added_loss(model: keras.Model, loss: Any) -> Any:
    """Returns a loss of `losses` as Keras adds it: `_aggregate_additional_loss`, which divides it by the replicas."""
    return private(model, "_aggregate_additional_loss", takes=("loss",))(loss)


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the mean that `fit` shows as the loss: `_loss_tracker`; `metrics` tells it by its name only."""
    return private(model, "_loss_tracker")


def output_loss_means(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the means of single outputs' losses: `_compile_loss.metrics`; `metrics` mixes them with all others."""
    compile_loss = private(model, "_compile_loss")
    if compile_loss is None:
        return []
    check_reads(private(type(compile_loss), "call"), "update_state")
    return [*private(compile_loss, "metrics")]


def element_spec(iterator: Any) -> Any:
    """Returns the spec of the batches of the iterator that `fit` made: `_distributed_dataset`, which it hides.

    Checks also what tfopt reads and sets on that iterator, whose class is private.
    """
    for name in ITERATOR:
        private(iterator, name)
    check_reads(private(type(iterator), "_enumerate_iterator"), "steps_per_execution", "steps_per_epoch")
    return private(iterator, "_distributed_dataset").element_spec


@contextlib.contextmanager
def losses_not_scaled() -> Iterator[None]:
    """While a step is traced, keeps Keras from dividing losses by the number of replicas, and from multiplying back.

    It replaces `scale_loss_for_distribution` and its inverse in keras.src.losses.loss; there is no public switch.
    """
    module = private_module("keras.src.losses.loss")
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    for name in names:
        private(module, name, takes=("value",))
    check_reads(private(module, "reduce_values"), names[0])
    check_reads(private(keras.Model, "_aggregate_additional_loss", takes=("loss",)), names[0])
    check_reads(imported("keras.src.trainers.compile_utils", "CompileLoss").call, names[1])
    with replaced(module, **dict.fromkeys(names, lambda value: value)):
        yield


@contextlib.contextmanager
def reductions_visited(visit: Callable[..., Any]) -> Iterator[None]:
    """Hands each loss that Keras reduces to a number to `visit(loss, values, sample_weight, mask, reduction)`.

    What that returns is the loss. It replaces `reduce_weighted_values` in keras.src.losses.loss, where Keras has merged
    all masks; there is no public hook. Inside another such scope, the outer one goes on.
    """
    module = private_module("keras.src.losses.loss")
    name = "reduce_weighted_values"
    original = private(module, name, takes=("values", "sample_weight", "mask", "reduction", "dtype"))
    if isinstance(original, functools.partial):
        yield
        return
    check_reads(keras.losses.Loss.__call__, name)
    with replaced(module, **{name: functools.partial(_visited, original, visit)}):  # which takes the same arguments
        yield


def _visited(
    original: Callable[..., Any],
    visit: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    return visit(loss, values, sample_weight, mask, reduction)


def masked_weights(sample_weight: Any, mask: Any) -> Any:
    """Returns the weights of the items that count: `apply_mask`, by which a loss merges weights and mask."""
    merge = imported("keras.src.losses.loss", "apply_mask", takes=("sample_weight", "mask", "dtype", "reduction"))
    return merge(sample_weight, mask, dtype="float32", reduction="mean_with_sample_weight")


@contextlib.contextmanager
def loss_calls() -> Iterator[list[tuple[keras.losses.Loss, tuple[Any, ...]]]]:
    """Notes the losses that are called, with y_true, y_pred and sample_weight; not those that a loss calls itself.

    It replaces `Loss.__call__`, as a model keeps its losses with their outputs in private lists.
    """
    found: list[tuple[keras.losses.Loss, tuple[Any, ...]]] = []
    original = keras.losses.Loss.__call__
    inside = False

    def call(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nonlocal inside
        if inside:
            return original(loss, y_true, y_pred, sample_weight)
        found.append((loss, (y_true, y_pred, sample_weight)))
        inside = True
        try:
            return original(loss, y_true, y_pred, sample_weight)
        finally:
            inside = False

    with replaced(keras.losses.Loss, __call__=call):
        yield found
