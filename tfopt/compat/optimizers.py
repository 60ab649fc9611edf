"""Private names of Keras optimizers and variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.checks import check_reads, private, set_private
from tfopt.compat.replace import replaced


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that a LossScaleOptimizer wraps, any other as it is, also None."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return private(optimizer, "inner_optimizer")
    return optimizer


def updating_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update weights: what a LossScaleOptimizer wraps, the parts of a MultiOptimizer."""
    inner = inner_optimizer(optimizer)
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        return list(inner.optimizers)
    return [] if inner is None else [inner]


@contextlib.contextmanager
def gradients_already_summed(optimizer: Any) -> Iterator[None]:
    """While a step is traced, keeps the optimizer from summing over the replicas what is summed already.

    It replaces `_all_reduce_sum_gradients`: Keras 3 has no public switch for it. The averages of weights are then
    written by each replica to its own copy, in place of `_overwrite_model_variables_with_average_value`, which fails
    inside a condition.
    """
    base = keras.optimizers.Optimizer
    private(base, "_all_reduce_sum_gradients", takes=("grads_and_vars",))
    private(base, "_overwrite_model_variables_with_average_value", takes=("trainable_variables",))
    check_reads(private(base, "_backend_update_step"), "_all_reduce_sum_gradients")
    update = private(base, "_backend_apply_gradients")
    check_reads(update, "_backend_update_step", "_overwrite_model_variables_with_average_value")
    with contextlib.ExitStack() as scopes:
        for each in updating_optimizers(optimizer):
            hooks = {
                "_all_reduce_sum_gradients": list,
                "_overwrite_model_variables_with_average_value": functools.partial(_overwrite, each),
            }
            scopes.enter_context(replaced(each, **hooks))
        yield


def _overwrite(optimizer: Any, variables: Sequence[Any]) -> None:
    for variable, average in zip(variables, averages(optimizer), strict=True):
        variable.assign(average)


@contextlib.contextmanager
def update_hooks(
    optimizer: Any, update_step: Callable[[Any], Any], apply_weight_decay: Callable[[Any], Any]
) -> Iterator[None]:
    """While it lasts, each variable's update and decay go through hooks, which are given Keras' own to call.

    It replaces `update_step` and `_apply_weight_decay`; `update_step` alone is public.
    """
    base = keras.optimizers.Optimizer
    names = {"update_step": update_step, "_apply_weight_decay": apply_weight_decay}
    private(base, "update_step", takes=("gradient", "variable", "learning_rate"))
    private(base, "_apply_weight_decay", takes=("variables",))
    check_reads(private(base, "_distributed_tf_update_step"), "update_step")
    check_reads(private(base, "_backend_apply_gradients"), "_apply_weight_decay")
    with replaced(optimizer, **{name: hook(getattr(optimizer, name)) for name, hook in names.items()}):
        yield


def decay_only(optimizer: Any, is_decayed: Callable[[Any], bool]) -> None:
    """Lets weight decay change only some variables: `_use_weight_decay`.

    The public `exclude_from_weight_decay` finds a variable by its identity, and a replica updates its own copy of it.
    """
    base = keras.optimizers.Optimizer
    private(base, "_use_weight_decay", takes=("variable",))
    check_reads(private(base, "_apply_weight_decay"), "_use_weight_decay")
    set_private(optimizer, "_use_weight_decay", is_decayed)


def averages(optimizer: Any) -> list[Any]:
    """Returns the moving averages of the weights: `_model_variables_moving_average`; `variables` mixes them."""
    return list(private(optimizer, "_model_variables_moving_average"))


def trained_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns what the optimizer was built for: `_trainable_variables`; there is no public list.

    It is the optimizer's own list, told from its lists of slots by identity.
    """
    return private(optimizer, "_trainable_variables")


def own_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns the optimizer's own: `_variables`, since `variables` has those of an inner optimizer as well."""
    return list(private(optimizer, "_variables"))


def find_slots_anew(optimizer: Any) -> None:
    """Lets the optimizer find the slots of variables whose tf.Variable was replaced: `_trainable_variables_indices`.

    It is made of `_var_key`, the identity of the tf.Variable, when the optimizer is built, which is done once.
    """
    key = private(optimizer, "_var_key", takes=("variable",))
    places = {key(variable): place for place, variable in enumerate(trained_variables(optimizer))}
    set_private(optimizer, "_trainable_variables_indices", places)


def learning_rate_as_given(optimizer: Any) -> Any:
    """Returns the variable or the schedule: `_learning_rate`, since `learning_rate` computes the schedule's value."""
    return private(optimizer, "_learning_rate")


def value_of(variable: keras.Variable) -> tf.Variable:
    """Returns the tf.Variable of a Keras variable: `_value`, since `value` may be a copy of another dtype."""
    return private(variable, "_value")


def set_strategy(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Lets an optimizer and those inside it update under a strategy: `_distribution_strategy`.

    An optimizer keeps the strategy in whose scope it was made; there is no public way to tell it another.
    """
    for each in (optimizer, inner_optimizer(optimizer), *updating_optimizers(optimizer)):
        set_private(each, "_distribution_strategy", strategy)


def make_anew(variable: keras.Variable) -> None:
    """Puts a new tf.Variable with the same value into a Keras variable: on the current device, of the current strategy.

    A tf.Variable itself can change neither. It sets `_value`, since `value` has no setter and `assign` copies.
    """
    old = value_of(variable)
    new = tf.Variable(
        old.read_value(),
        dtype=old.dtype,
        trainable=old.trainable,
        name=variable.name,
        aggregation=old.aggregation,
        synchronization=old.synchronization,
    )
    set_private(variable, "_value", new)
