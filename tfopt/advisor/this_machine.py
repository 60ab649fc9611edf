"""The step of a recipe on this machine: estimated as for the GPUs of the table, and measured in `fit`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.advisor.device import of_card, of_processor, step_seconds
from tfopt.advisor.recipe_step import RecipeStep, compiled_model
from tfopt.data import Examples
from tfopt.hardware import cpu_peak, find_card
from tfopt.recipe import Recipe
from tfopt.report import Record
from tfopt.training import Plan
from tfopt.training import compile as compile_model

MEASURED_SECONDS = 3.0
# Steps of a timed epoch: one call into TensorFlow.
STEPS = 10
LEAST_EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Record):
    """The same estimate for this machine, against a measured step.

    Attributes:
        device: The device.
        precision: Name of the dtype policy.
        estimated_ms: Estimated time of a step; None if a peak rate is unknown.
        measured_ms: Measured time of a step: the median of several.
        error: estimated / measured - 1; None without an estimate.
    """

    device: str
    precision: str
    estimated_ms: float | None
    measured_ms: float
    error: float | None

    def __str__(self) -> str:
        head = f"this machine ({self.device}, {self.precision}): measured {self.measured_ms:.3g} ms per step"
        if self.estimated_ms is None or self.error is None:
            return f"{head}, estimate unavailable (a peak rate is unknown)"
        return f"{head}, estimated {self.estimated_ms:.3g} ms, error {self.error:+.0%}"


def this_machine(recipe: Recipe, examples: Examples, batch: Any, decided: Plan, step: RecipeStep) -> ThisMachine:
    """Estimates and measures a step of a recipe on the device of a plan."""
    hardware = decided.hardware
    card = find_card(hardware.gpus[0].name) if hardware.gpus else None
    device = None
    if card is not None:
        device = of_card(hardware.gpus[0].name, card)
    elif not hardware.gpus:
        device = of_processor(hardware, cpu_peak())
    seconds = None if device is None else step_seconds(step.kernels, device)
    estimated = None if seconds is None else 1e3 * seconds * step.accumulate
    measured = measured_step_ms(recipe, examples, batch, decided)
    return ThisMachine(
        device=device.name if device is not None else hardware.gpus[0].name,
        precision=decided.precision,
        estimated_ms=estimated,
        measured_ms=measured,
        error=None if estimated is None else estimated / measured - 1,
    )


def measured_step_ms(recipe: Recipe, examples: Examples, batch: Any, decided: Plan) -> float:
    """Returns the time of a training step of a new model of the recipe in `fit`, always on the same batch."""
    model = compiled_model(recipe, examples, decided)
    compile_model(model, decided, optimizer=model.optimizer, loss=model.loss)
    whole = keras.tree.map_structure(lambda value: _repeated(value, recipe.training.global_batch_size), batch)
    data = tf.data.Dataset.from_tensors(whole).repeat()
    timer = _Timer()
    model.fit(data, steps_per_epoch=STEPS, epochs=LEAST_EPOCHS + 1000, verbose=0, shuffle=False, callbacks=[timer])
    return 1e3 * statistics.median(timer.seconds) / STEPS


class _Timer(keras.callbacks.Callback):
    """Times the epochs but the first, and ends the training after MEASURED_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._end = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if epoch == 0:  # it traces and compiles
            self._end = now + MEASURED_SECONDS
            return
        self.seconds.append(now - self._start)
        if now > self._end and len(self.seconds) >= LEAST_EPOCHS:
            self.model.stop_training = True


def _repeated(value: Any, size: int) -> Any:
    """Returns a batch of a number of examples: those of another, repeated or cut."""
    times = -(-size // int(value.shape[0]))
    return tf.concat([value] * times, 0)[:size]
