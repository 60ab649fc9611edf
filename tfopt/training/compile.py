"""Compiles a Keras model under a plan; training is Keras' own `fit` after that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.training.plan import Plan


def compile(
    model: keras.Model,
    plan: Plan,
    *,
    optimizer: str | keras.optimizers.Optimizer = "adam",
    loss: Any = None,
    metrics: Sequence[Any] | None = None,
    **options: Any,
) -> None:
    """Compiles a model with the plan's XLA and steps-per-execution settings, inside its strategy.

    Under float16 Keras adds the dynamic loss scaling itself. An optimizer or metric that was made outside the
    strategy's scope is replaced by a new one with the same settings, since its variables are not on every replica.

    Args:
        model: Any Keras model, built under `plan.scope()`.
        plan: What `tfopt.plan` decided.
        optimizer, loss, metrics, options: As in `keras.Model.compile`.
    Example:
        >>> import keras, numpy as np
        >>> from tfopt.training.plan import plan
        >>> decided = plan()
        >>> with decided.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> compile(model, decided, optimizer="sgd", loss="mse")
        >>> history = model.fit(decided.pipeline((np.zeros((8, 4)), np.zeros((8, 1)))), verbose=0)
    """
    with plan.strategy.scope() if plan.strategy else contextlib.nullcontext():
        model.compile(
            optimizer=_on_replicas(optimizer, plan.strategy),
            loss=loss,
            metrics=keras.tree.map_structure(lambda metric: _on_replicas(metric, plan.strategy), metrics),
            jit_compile=plan.jit_compile,
            steps_per_execution=plan.steps_per_execution,
            **options,
        )


def _on_replicas(given: Any, strategy: tf.distribute.Strategy | None) -> Any:
    """Returns an optimizer or metric whose variables the strategy knows; names and functions as they are."""
    if strategy is None or not isinstance(given, keras.optimizers.Optimizer | keras.metrics.Metric):
        return given
    if all(strategy.extended.variable_created_in_scope(variable.value) for variable in given.variables):
        return given
    return type(given).from_config(given.get_config())
