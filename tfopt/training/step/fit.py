"""One `fit` of a model: made when `fit` is called, and dropped when it ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfopt.compat.replace import callbacks_of, replaced
from tfopt.data.epoch_order import EpochCounter
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.step.execution import Executions
from tfopt.training.step.guards import Watch
from tfopt.training.step.ledger import Ledger

BATCH_END = "on_train_batch_end"


class FitCallback(keras.callbacks.Callback):
    """The state of one `fit`, and the callback by which Keras' training loop tells it where it is.

    It has no method for batches: if it had one, Keras would wait for the results of each batch.

    Args:
        callbacks: The argument `callbacks` of `fit`.
        watch: Checks the losses and the weights.
        ledger: Receives the step that a resumed fit starts from.
        counter: Receives the number of each epoch before its data is read.
        synchronize: Averages over the replicas what each updates by itself.
        checkpoints: Saves this fit, and resumes an earlier one; None without a checkpoint directory.

    Attributes:
        executions: The steps of each call into TensorFlow; None until Keras has made its iterator.
        has_begun: Whether Keras has called this callback.
        ending: The callbacks that end the training after the step whose loss is not finite.
        scopes: What lasts until the end of the fit.
    """

    def __init__(
        self,
        callbacks: Any,
        *,
        watch: Watch,
        ledger: Ledger,
        counter: EpochCounter,
        synchronize: Callable[[], None],
        checkpoints: FitCheckpoints | None,
    ) -> None:
        super().__init__()
        self._watch = watch
        self._ledger = ledger
        self._counter = counter
        self._synchronize = synchronize
        self._checkpoints = checkpoints
        self._steps_done = 0  # those of an earlier fit that this one resumes included
        self.executions: Executions | None = None
        self.has_begun = False
        self.ending = list({id(each): each for each in callbacks_of(callbacks) if _is_terminate_on_nan(each)}.values())
        self.scopes = contextlib.ExitStack()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest checkpoint, if there is one."""
        self.has_begun = True
        for each in self.ending:
            told = functools.partial(self._tell_last_batch, getattr(each, BATCH_END))
            self.scopes.enter_context(replaced(each, **{BATCH_END: told}))
        if self._checkpoints is not None:
            iterator = self._begun_executions().iterator
            self._checkpoints.begin(self.params, iterator.steps_per_epoch, iterator.data_adapter.num_batches)
            self._steps_done = self._ledger.resumed_from = self._checkpoints.step
            self.scopes.enter_context(_told_of_averages(self.model.optimizer, self._checkpoints))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the number of the epoch, which decides the order of its data."""
        executions = self._begun_executions()
        executions.begin_epoch()
        # With steps_per_epoch, Keras makes the iterator before this call, or keeps that of the epoch before.
        self._counter.assign(epoch, at_once=executions.iterator.steps_per_epoch is None)
        if self._checkpoints is not None:
            self._checkpoints.begin_epoch(epoch)

    def replay(self, iterator: Any, count: int) -> int:
        """Skips the batches that the resumed training has done. Returns how many of `count` steps they are."""
        return 0 if self._checkpoints is None else self._checkpoints.replay(iterator, count)

    def after(self, steps: int, logs: dict[str, Any]) -> None:
        """Checks and saves the training after a call that ran so many steps."""
        self._steps_done += steps
        self._watch.after(self._steps_done, steps, logs)
        if self._checkpoints is not None:
            self._checkpoints.after(steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the losses and notes the weights before other callbacks change them."""
        self._synchronize()
        self._watch.check()
        if self._checkpoints is not None:
            self._checkpoints.end_epoch(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the training as the last step left it."""
        if self._checkpoints is not None:
            self._checkpoints.end()

    def finish(self) -> None:
        """Saves what the other callbacks changed when the training ended."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _begun_executions(self) -> Executions:
        assert self.executions is not None  # Keras makes its iterator before it calls callbacks
        return self.executions

    def _tell_last_batch(self, tell: Callable[..., None], batch: int, logs: Any = None) -> None:
        """Tells a callback which batch was the last: Keras numbers the last batch of a call before the call."""
        tell(batch if self.executions is None else self.executions.last_batch, logs=logs)


def _told_of_averages(optimizer: Any, checkpoints: FitCheckpoints) -> contextlib.AbstractContextManager[None]:
    """Tells the checkpoints before Keras writes averages into the weights: after the last epoch's callbacks."""
    write = optimizer.finalize_variable_values

    def write_averages(weights: Any) -> None:
        checkpoints.before_averages()
        write(weights)

    return replaced(optimizer, finalize_variable_values=write_averages)


def _is_terminate_on_nan(callback: Any) -> bool:
    """Returns whether a callback ends the training as TerminateOnNaN does; a class of its own may go on."""
    cls, own = type(callback), keras.callbacks.TerminateOnNaN
    return isinstance(callback, own) and all(
        getattr(cls, name) is getattr(own, name) for name in ("on_batch_end", BATCH_END)
    )
