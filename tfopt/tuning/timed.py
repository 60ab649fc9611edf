"""A fit whose speed is measured, one window of steps after the other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.training.step.runtime import is_trained_by_tfopt
from tfopt.tuning.facts import Facts

MOST_STEPS, MOST_EPOCHS = 1000, 100  # of a window
LOOKS = 3  # at an epoch that seems long enough: what else the machine does, or a trace, lengthens some


@dataclass(frozen=True, kw_only=True)
class Training:
    """A compiled model, and the arguments of its fit for any batch size.

    Attributes:
        model: The model.
        fit: Its fit.
        data: Returns the arguments for so many examples in a step, and so many steps in an epoch.
        validation: Returns those of a validation pass with so many examples in a batch.
        replicas: Number of replicas.
        inputs: The inputs of one example with the largest shapes; None if they are unknown.
        batch: Number of examples of a step, as the training is set.
        callbacks: Callbacks that each fit has.
        epoch_steps: Most steps of an epoch, if each begins the data anew; None if the data repeats.
        facts: What `tfopt.tune` wants to know of it; None if nobody asks.
    """

    model: keras.Model
    fit: Callable[..., keras.callbacks.History]
    data: Callable[[int, int], dict[str, Any]]
    validation: Callable[[int], dict[str, Any]]
    replicas: int
    inputs: Any = None
    batch: int = 0
    callbacks: Sequence[keras.callbacks.Callback] = ()
    epoch_steps: int | None = None
    facts: Facts | None = None


class TimedFit:
    """The fit of a training with one batch size.

    Args:
        training: The training.
        examples: Number of examples of a step, on all replicas.
    """

    def __init__(self, training: Training, examples: int) -> None:
        self._training, self._examples = training, examples
        self._steps, self._epochs = 1, 2  # of a window
        self.losses: list[float] = []

    def steps_s(self, steps: int, epochs: int) -> list[float]:
        """Trains, and returns the seconds of a step in each epoch."""
        timer = _Epochs(steps)
        given, callbacks = self._training.data(self._examples, steps), [*self._training.callbacks, timer]
        history = self._training.fit(**given, epochs=epochs, verbose=0, callbacks=callbacks)
        self.losses += history.history.get("loss", [])
        return [seconds / timer.steps for seconds in timer.seconds]

    def prepare(self, window_s: float) -> None:
        """Finds the steps of half a window: whole calls into TensorFlow where several fit."""
        model = self._training.model
        at_once = int(model.steps_per_execution or 1)
        fewest = 1 if is_trained_by_tfopt(model) else at_once  # Keras' own function always runs as many
        self.steps_s(fewest, 1)  # traces
        step_s = min(self.steps_s(fewest, 3)[1:])
        if fewest < at_once and at_once * step_s < window_s:
            step_s = min(self.steps_s(at_once, 3)[1:])
        if self._training.epoch_steps is None:
            steps = min(max(math.ceil(window_s / 2 / step_s), fewest), MOST_STEPS)
        else:
            steps = self._whole_epoch(window_s, fewest, self._training.epoch_steps, fewest * step_s)
        self._steps = steps if steps < at_once else math.ceil(steps / at_once) * at_once

    def _whole_epoch(self, window_s: float, fewest: int, longest: int, least_s: float) -> int:
        """Returns the steps of an epoch that is no shorter than a window and is mostly steps: each has a beginning.

        An epoch of the fewest steps, which takes `least_s`, is mostly that.
        """
        steps, epoch_s = fewest, least_s
        while steps < min(longest, MOST_STEPS):
            steps, epoch_s = min(2 * steps, longest), math.inf
            for _ in range(LOOKS if steps < longest else 1):
                epoch_s = min(epoch_s, steps * min(self.steps_s(steps, 2)))
                beginning_s = max(least_s - fewest * epoch_s / steps, 0.0)
                if epoch_s < window_s + 4 * beginning_s:
                    break
            else:
                break
        self._epochs = min(max(math.ceil(window_s / max(epoch_s, least_s)), 1), MOST_EPOCHS)
        return steps

    def rate(self) -> float:
        """Returns the examples of a second in one window."""
        starts = int(self._training.epoch_steps is None)  # the pipeline, in the first epoch only
        seconds = self.steps_s(self._steps, starts + self._epochs)[starts:]
        return self._examples / statistics.fmean(seconds)


class EachBatch(keras.callbacks.Callback):
    """Stands for a callback that acts on each batch: Keras then waits for the results of each."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing."""


class _Epochs(keras.callbacks.Callback):
    """Times the epochs. It has no method for batches, for which Keras would wait for the results of each."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.steps = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps = self.params.get("steps") or self.steps  # arrays may have fewer than are asked for
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._start)
