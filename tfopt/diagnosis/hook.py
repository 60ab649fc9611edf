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
        self._steps, self._stops = steps, stops
        self._current = self._longest = self._new()

    @property
    def observation(self) -> Observation:
        """What was watched of the model that was watched for the most steps."""
        return max(self._current, self._longest, key=lambda each: each.steps)

    def follow(self, model: keras.Model) -> Observation:
        """Returns what is watched of a model. Only the steps of one model can be compared with each other."""
        if self._current.model not in (None, model):
            self._longest, self._current = self.observation, self._new()
        return self._current

    def compile(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts the compilations after the first fit."""
        if self._current.model is model:
            self._current.compilations += 1
        return original(*args, **kwargs)

    def fit(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watches a fit."""
        seen = self.observation
        if seen.is_enough:
            if seen.model is model and seen.data is (args[0] if args else kwargs.get("x")):
                seen.epochs += int(kwargs.get("epochs", 1))  # the training is longer than what is watched
            return original(*args, **kwargs)
        return observe_fit(self.follow(model), model, original, args, kwargs)

    def _new(self) -> Observation:
        return Observation(limit=self._steps, stops=self._stops)
