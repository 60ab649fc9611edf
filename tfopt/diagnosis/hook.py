"""Watches every `fit` of a program, without a change to the program."""

from __future__ import annotations

from typing import Any

import keras

from tfopt.diagnosis.diagnose import observe_fit
from tfopt.diagnosis.watching.observation import Observation


class DoctorHook:
    """Watches what a program does with `compile` and `fit`: a `tfopt.scripts.hook.FitHook`.

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
        return original(*args, **kwargs)

    def fit(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watches a fit."""
        if self.observation.is_enough:
            return original(*args, **kwargs)
        return observe_fit(self.observation, model, original, args, kwargs)
