"""Stops a training that cannot succeed. The error says what happened, the likely cause and the remedy."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import TrainingError
from tfopt.training.checkpointing.checkpoints import Checkpoints
from tfopt.training.distributed.cluster import lost_worker, words_about_worker
from tfopt.training.memory import out_of_memory_message
from tfopt.training.plan import Plan
from tfopt.training.step.data_errors import explained, find_label_out_of_range, of_arguments
from tfopt.training.step.ledger import Ledger

# To read a loss, Python waits for the device. So it reads the losses of this many calls together.
CALLS_BETWEEN_CHECKS = 10
SECONDS_TO_SEARCH_DATA = 10.0
BATCHES_TO_SEARCH = 100_000  # a dataset may repeat without end


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The settings by which every `fit` of a model is watched."""

    plan: Plan
    checkpoints: Checkpoints | None
    explains: bool  # whether errors of Keras and TensorFlow become errors that say what to do

    def newest_checkpoint(self) -> str | None:
        """Returns the newest checkpoint in words, or None."""
        return None if self.checkpoints is None else self.checkpoints.newest()

    @contextlib.contextmanager
    def explaining(self, class_weight: Any = None) -> Iterator[None]:
        """Raises errors of TensorFlow as errors that say what to do.

        Raises:
            TrainingError: The device is out of memory, another worker is lost, or the examples cannot be made.
            ConfigError: The examples of a batch have different shapes, a class has no weight, a label or an id is out
                of range, or an array holds text.
        """
        try:
            yield
        except tf.errors.OpError as error:
            if not self.explains:
                raise
            plan = self.plan
            if isinstance(error, tf.errors.ResourceExhaustedError):
                words = out_of_memory_message(error, plan.config, plan.precision, plan.replicas, plan.hardware)
                raise TrainingError(words) from error
            if lost_worker(error):
                raise TrainingError(
                    f"Another worker ended or cannot be reached: {words_about_worker(error)} "
                    "Read that worker's log, then start all workers again. They go on from "
                    f"{self.newest_checkpoint() or 'the beginning, because there is no checkpoint'}."
                ) from error
            newest = self.newest_checkpoint()
            resuming = f"Training goes on from {newest}." if newest else "There is no checkpoint to go on from."
            if (found := explained(error, class_weight, resuming)) is not None:
                raise found from error
            raise
        except ValueError as error:
            if self.explains and (misfit := of_arguments(error)) is not None:
                raise misfit from error
            raise


class Watch:
    """Checks the losses and the weights of one `fit`, whose `x` and `y` are its data.

    The ledger receives each change of the loss scale.
    """

    def __init__(self, guard: Guard, model: keras.Model, data: tuple[Any, ...], ledger: Ledger) -> None:
        self._guard = guard
        self._model = model
        self._data = data
        self._ledger = ledger
        self._unchecked: list[tuple[int, int, Any]] = []  # of each call: its last step, its number of steps, its loss
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._scale = loss_scale(model.optimizer)

    def after(self, step: int, steps: int, logs: dict[str, Any]) -> None:
        """Notes the loss of a call that ran `steps` steps and ended with step number `step`."""
        self._unchecked.append((step, steps, logs.get("loss")))
        if len(self._unchecked) >= CALLS_BETWEEN_CHECKS:
            self.check()

    def check(self) -> None:
        """Checks the losses noted since the last check. Raises TrainingError if one is not finite."""
        unchecked, self._unchecked = self._unchecked, []
        scale = loss_scale(self._model.optimizer)
        if unchecked and scale is not None and self._scale is not None and scale != self._scale:
            self._ledger.scaled(unchecked[-1][0], self._scale, scale)
        self._scale = scale
        for step, steps, value in unchecked:
            loss = 0.0 if value is None else float(value)
            if math.isfinite(loss):
                self._first_loss = loss if self._first_loss is None else self._first_loss
                self._last_loss = loss
            elif self._guard.plan.config.stop_on_nan:
                where = f"step {step}" if steps == 1 else f"one of the steps {step - steps + 1} to {step}"
                raise TrainingError(f"The loss must be finite. Received: loss={loss} in {where}. {self._advice()}")

    def check_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Checks the losses, and the weights that are to be saved: a relu can hide a NaN from the loss."""
        self.check()
        found = sum(_count_not_finite(values) for name, values in arrays.items() if name.startswith("model/"))
        if found and self._guard.plan.config.stop_on_nan:
            raise TrainingError(
                f"Weights must be finite to be saved. Received: {_not_finite(found)}, while the loss is finite. "
                f"{self._advice()}"
            )

    def _advice(self) -> str:
        """Returns the likely cause with its remedy, and the newest checkpoint."""
        newest = self._guard.newest_checkpoint()
        last = f"The last good checkpoint is {newest}." if newest else None
        return f"{self._cause()} {last or 'There is no checkpoint. Set checkpoint_dir to save some.'}"

    def _cause(self) -> str:
        found = _not_finite_in(self._data)
        if found:
            return f"Likely cause: {found}. Clean the data."
        wrong = find_label_out_of_range(self._model, _labels(self._data))
        if wrong:
            return f"Likely cause: {wrong}. Give the last layer more units, or correct the labels."
        rate = float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))
        first, last = self._first_loss, self._last_loss
        if first is not None and last is not None and last > 4 * max(first, 1e-3):
            return (
                f"Likely cause: training diverged, the loss grew from {first:.4g} to {last:.4g} before. "
                f"Lower the learning rate ({rate:.3g}), or clip gradients (clipnorm=1.0 of the optimizer)."
            )
        if self._model.dtype_policy.compute_dtype == "float16":
            return (
                "Likely cause: a value of the forward pass above 65,504, the largest number of float16. The loss scale "
                "cannot prevent that. Set precision='mixed_bfloat16' or 'float32'."
            )
        return (
            f"Likely cause: the learning rate ({rate:.3g}) is too high, or the loss or a layer takes a logarithm or a "
            "root of zero, or divides by zero. Lower the learning rate, or add a small constant there."
        )


def loss_scale(optimizer: Any) -> float | None:
    """Returns the present loss scale, or None if the optimizer has none.

    Example:
        >>> loss_scale(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1024.0))
        1024.0
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return float(keras.ops.convert_to_numpy(scale))


def check_weights(model: keras.Model, fit: str, data: tf.data.Dataset) -> None:
    """Checks the weights at the end of a fit, by its name: a relu can hide a NaN from the loss.

    Raises:
        TrainingError: A weight is not finite. The cause is looked for in the data, batches that it was trained on.
    """
    floats = [weight for weight in model.weights if keras.backend.is_float_dtype(weight.dtype)]
    wrong = [each for each in floats if not np.isfinite(np.asarray(keras.ops.cast(each, "float32"))).all()]
    if wrong:
        found = _not_finite_in((data,))
        cause = f"Likely cause: {found}. Clean the data." if found else "Lower the learning rate, or clip gradients."
        raise TrainingError(
            f"Weights must be finite at the end of a fit. Received: {wrong[0].path!r}, the first of {len(wrong)} "
            f"that are not, after the fit {fit!r}. {cause}"
        )


def _not_finite_in(data: tuple[Any, ...]) -> str | None:
    """Returns the part of the data with values that are not finite, if the search finds it in time."""
    first, *others = data
    if isinstance(first, tf.data.Dataset):
        for number, batch in enumerate(_read_in_time(first)):
            if found := _count_not_finite(batch):
                return f"batch {number} of the data holds {_not_finite(found)}"
        return None
    arrays = [item for item in keras.tree.flatten((first, others)) if isinstance(item, np.ndarray | tf.Tensor)]
    found = _count_not_finite(arrays)
    return f"the data holds {_not_finite(found)}" if found else None


def _labels(data: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the labels of a fit as far as they are found in time."""
    first, *others = data
    if not isinstance(first, tf.data.Dataset):
        yield from (each for each in others if isinstance(each, np.ndarray | tf.Tensor))
        return
    for batch in _read_in_time(first):
        if isinstance(batch, tuple) and len(batch) > 1 and isinstance(batch[1], tf.Tensor):
            yield batch[1]


def _read_in_time(data: tf.data.Dataset) -> Iterator[Any]:
    """Yields the batches of a data set, as many as can be read in the time for a search."""
    begin = time.monotonic()
    for batch in data.take(BATCHES_TO_SEARCH):
        if time.monotonic() - begin > SECONDS_TO_SEARCH_DATA:
            return
        yield batch


def _count_not_finite(batch: Any) -> int:
    found = 0
    for item in keras.tree.flatten(batch):
        values = np.asarray(item) if not isinstance(item, tf.RaggedTensor | tf.SparseTensor) else np.zeros(0)
        if np.issubdtype(values.dtype, np.floating):
            found += int(np.count_nonzero(~np.isfinite(values)))
    return found


def _not_finite(count: int) -> str:
    return f"{count} value{' that is' if count == 1 else 's that are'} not finite"
