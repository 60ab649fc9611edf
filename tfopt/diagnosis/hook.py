"""Watches every `fit` of a program, without a change to the program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from tfopt.diagnosis.diagnose import observe_fit
from tfopt.diagnosis.observation import Observation


class DoctorHook:
    """What stands between a program and `compile` and `fit` of its models.

    Args:
        steps: Number of steps to watch.
        stops: Whether training ends after these steps.
    """

    def __init__(self, steps: int = 100, *, stops: bool = False) -> None:
        self.observation = Observation(limit=steps, stops=stops)

    def compile(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts the compilations after the first fit."""
        if self.observation.fits:
            self.observation.compilations += 1
        return original(model, *args, **kwargs)

    def fit(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watches a fit."""
        if self.observation.is_enough:
            return original(model, *args, **kwargs)
        return observe_fit(self.observation, model, functools.partial(original, model), args, kwargs)


@contextlib.contextmanager
def watched_fits(steps: int = 100) -> Iterator[Observation]:
    """Watches every `fit` inside, of any Keras model.

    Args:
        steps: Number of steps to watch.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with watched_fits(steps=4) as seen:
        ...     history = model.fit(np.zeros((64, 2)), np.zeros((64, 1)), batch_size=8, verbose=0)
        >>> seen.steps
        4
    """
    hook = DoctorHook(steps)
    originals = {name: getattr(keras.Model, name) for name in ("compile", "fit")}

    def patched(name: str) -> Any:
        @functools.wraps(originals[name])
        def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            return getattr(hook, name)(model, originals[name], args, kwargs)

        return method

    for name in originals:
        setattr(keras.Model, name, patched(name))
    try:
        yield hook.observation
    finally:
        for name, method in originals.items():
            setattr(keras.Model, name, method)
