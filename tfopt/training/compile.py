"""Compiles a Keras model under a plan; training is Keras' own `fit` after that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

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

    Under float16 Keras adds the dynamic loss scaling itself.

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
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            jit_compile=plan.jit_compile,
            steps_per_execution=plan.steps_per_execution,
            **options,
        )
