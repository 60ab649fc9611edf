"""Ends a training that cannot succeed, with what happened, the likely cause and the remedy."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError, TrainingError
from tfopt.training.distributed.cluster import lost_worker
from tfopt.training.step.ledger import Ledger

# Calls between looks at the loss. Each look waits for the device; figures of the calls between are looked at as well.
CALLS_BETWEEN_LOOKS = 10
SECONDS_TO_SEARCH_DATA = 10.0
_DIFFERENT_SHAPES = re.compile(
    r"Cannot batch tensors with different shapes in component \d+\. "
    r"First element had shape (\[[\d,]*\]) and element \d+ had shape (\[[\d,]*\])"
)


class Guard:
    """Watches one model's training.

    Args:
        stop_on_nan: Whether a loss that is not finite ends the training.
        explain_memory: Returns what to lower when memory ran out.
        last_checkpoint: Returns the newest checkpoint in words, or None.
    """

    def __init__(
        self,
        *,
        stop_on_nan: bool,
        explain_memory: Callable[[BaseException], str],
        last_checkpoint: Callable[[], str | None],
    ) -> None:
        self._stop_on_nan = stop_on_nan
        self._explain_memory = explain_memory
        self._last_checkpoint = last_checkpoint
        self._unseen: list[tuple[int, int, Any]] = []
        self._first: float | None = None
        self._last: float | None = None

    @contextlib.contextmanager
    def watching(self, model: keras.Model, data: tuple[Any, ...], ledger: Ledger) -> Iterator[None]:
        """Watches a `fit` of a model on data, and turns failures of TensorFlow into errors that say what to do."""
        self._model, self._data, self._ledger = model, data, ledger
        self._unseen, self._first, self._last = [], None, None
        self._scale = self._loss_scale()
        try:
            yield
        except tf.errors.ResourceExhaustedError as error:
            raise TrainingError(self._explain_memory(error)) from error
        except tf.errors.OpError as error:
            if lost_worker(error):
                raise TrainingError(
                    f"Another worker ended or cannot be reached: {_what_was_lost(error)} "
                    "Look at that worker's log; start all workers again to go on from "
                    f"{self._last_checkpoint() or 'the beginning, for there is no checkpoint'}."
                ) from error
            if (lengths := _DIFFERENT_SHAPES.search(str(error))) is not None:
                raise ConfigError(
                    "The examples of a batch must have one shape. Received: examples of the shapes "
                    f"{lengths[1]} and {lengths[2]}. Pad them to one length before plan.pipeline, or give fit batches "
                    "that dataset.padded_batch made."
                ) from error
            raise
        finally:
            del self._data  # it may be large

    def after(self, step: int, steps: int, logs: dict[str, Any]) -> None:
        """Takes note of a call's figures: `steps` steps, the last of which was number `step`."""
        self._unseen.append((step, steps, logs.get("loss")))
        if len(self._unseen) >= CALLS_BETWEEN_LOOKS:
            self.check()

    def check(self) -> None:
        """Looks at the figures noted since the last look.

        Raises:
            TrainingError: A loss is not finite.
        """
        unseen, self._unseen = self._unseen, []
        scale = self._loss_scale()
        if unseen and scale is not None and self._scale is not None and scale != self._scale:
            self._ledger.scaled(unseen[-1][0], self._scale, scale)
        self._scale = scale
        for step, steps, value in unseen:
            loss = 0.0 if value is None else float(value)
            if math.isfinite(loss):
                self._first = loss if self._first is None else self._first
                self._last = loss
            elif self._stop_on_nan:
                where = f"step {step}" if steps == 1 else f"one of the steps {step - steps + 1} to {step}"
                raise TrainingError(
                    f"The loss must be finite. Received: loss={loss} in {where}. {self._cause()} "
                    f"{self._good_checkpoint()}"
                )

    def check_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Looks at the figures noted, and at weights that are to be saved: a relu turns NaN into zeros on its way.

        Raises:
            TrainingError: A loss or a weight is not finite.
        """
        self.check()
        found = sum(_count_not_finite(values) for name, values in arrays.items() if name.startswith("model/"))
        if found and self._stop_on_nan:
            raise TrainingError(
                f"Weights must be finite to be saved. Received: {_count(found, 'value')} that {_is(found)} not, while "
                f"the loss is finite. {self._cause()} "
                f"{self._good_checkpoint()}"
            )

    def _loss_scale(self) -> float | None:
        optimizer = self._model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return None
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return float(keras.ops.convert_to_numpy(scale))

    def _good_checkpoint(self) -> str:
        newest = self._last_checkpoint()
        return (
            f"The last good checkpoint is {newest}." if newest else "There is no checkpoint; checkpoint_dir keeps some."
        )

    def _cause(self) -> str:
        found = _not_finite_in(self._data)
        if found:
            return f"Likely cause: {found}. Clean the data."
        rate = _learning_rate(self._model.optimizer)
        if self._first is not None and self._last is not None and self._last > 4 * max(self._first, 1e-3):
            return (
                f"Likely cause: training diverged, the loss grew from {self._first:.4g} to {self._last:.4g} before. "
                f"Lower the learning rate ({rate:.3g}), or clip gradients (clipnorm=1.0 of the optimizer)."
            )
        if self._model.dtype_policy.compute_dtype == "float16":
            return (
                "Likely cause: a value beyond 65,504, the largest of float16, in the forward pass, which the loss "
                "scale cannot mend. Set precision='mixed_bfloat16' or 'float32'."
            )
        return (
            f"Likely cause: a learning rate too high ({rate:.3g}), or a logarithm, root or division of zero in the "
            "loss or a layer. Lower the learning rate, or add a small constant there."
        )


def _learning_rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _not_finite_in(data: tuple[Any, ...]) -> str | None:
    """Returns what part of the data holds values that are not finite, if that is found soon."""
    first, *others = data
    if isinstance(first, tf.data.Dataset):
        begin = time.monotonic()
        for number, batch in enumerate(first):
            if time.monotonic() - begin > SECONDS_TO_SEARCH_DATA:
                return None
            if found := _count_not_finite(batch):
                return f"batch {number} of the data holds {_count(found, 'value')} that {_is(found)} not finite"
            if number >= 100_000:  # it may repeat without end
                return None
        return None
    arrays = [item for item in keras.tree.flatten((first, others)) if isinstance(item, np.ndarray | tf.Tensor)]
    found = _count_not_finite(arrays)
    return f"the data holds {_count(found, 'value')} that {_is(found)} not finite" if found else None


def _count_not_finite(batch: Any) -> int:
    found = 0
    for item in keras.tree.flatten(batch):
        values = np.asarray(item) if not isinstance(item, tf.RaggedTensor | tf.SparseTensor) else np.zeros(0)
        if np.issubdtype(values.dtype, np.floating):
            found += int(np.count_nonzero(~np.isfinite(values)))
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _what_was_lost(error: tf.errors.OpError) -> str:
    """Returns the line of TensorFlow's message that says something."""
    lines = [line.strip() for line in str(error.message).splitlines() if line.strip()]
    telling = [line for line in lines if "Collective" in line or "/job:worker" in line or "heartbeat" in line.lower()]
    return (telling or lines or ["no message"])[0].rstrip(".") + "."
