"""Gives an optimizer or metric that was made outside a strategy variables on every replica."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.optimizers import make_anew, set_strategy
from tfopt.models.unbuilt_copy import unbuilt_copy


def on_replicas(given: Any, strategy: tf.distribute.Strategy | None) -> Any:
    """Returns an optimizer or metric whose variables are on every replica. Names and functions stay as they are.

    It is the same object with new variables where that is possible. An optimizer that is built for another model, and
    an object that holds a `tf.Variable`, are made again from their configuration.

    Args:
        given: What was passed to compile.
        strategy: The strategy, in whose scope this is called; None changes nothing.
    Raises:
        ConfigError: It must be made again, and would lose a setting.
    """
    if strategy is None or not isinstance(given, keras.optimizers.Optimizer | keras.metrics.Metric):
        return given
    created_here = strategy.extended.variable_created_in_scope
    outside = [variable for variable in given.variables if not created_here(variable.value)]
    raw = [each for each in keras.tree.flatten([*vars(given).values()]) if isinstance(each, tf.Variable)]
    if all(map(created_here, raw)) and not outside:
        return given
    if raw or (isinstance(given, keras.optimizers.Optimizer) and given.built):
        return unbuilt_copy(given, from_config=True)
    for variable in outside:
        make_anew(variable)
    if isinstance(given, keras.optimizers.Optimizer):
        set_strategy(given, strategy)
    return given
