"""The callback that tfopt adds to a `fit`, and which of the others act on each batch.

A fit with a callback that acts on each batch has one step per call into TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.replace import callbacks_of, replaced
from tfopt.compat.trainer import profiles_batches
from tfopt.data.epoch_order import EpochCounter
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.step.guards import Watch
from tfopt.training.step.ledger import Ledger
from tfopt.training.step.step_runner import CallSizes

BATCH_END = "on_train_batch_end"
# The methods of a callback that Keras calls around each step. Under several steps per execution it calls them less.
PER_BATCH = ("on_train_batch_begin", BATCH_END, "on_batch_begin", "on_batch_end")
PER_TEST_BATCH = ("on_test_batch_begin", "on_test_batch_end")
# The attribute of the callbacks of tfopt that count the steps of a call themselves.
FOLLOWS = "_follows_several_steps"
# Methods of Keras' own callbacks that need no call for each step; those that save or write, only if by epoch.
HARMLESS = (
    keras.callbacks.ProgbarLogger.on_train_batch_end,
    keras.callbacks.ProgbarLogger.on_test_batch_end,
    keras.callbacks.TerminateOnNaN.on_batch_end,  # the runtime ends a call with the step that it looks for: `ending`
)
SAVING = (
    keras.callbacks.ModelCheckpoint.on_train_batch_end,
    keras.callbacks.BackupAndRestore.on_train_batch_end,
    keras.callbacks.OrbaxCheckpoint.on_train_batch_end,
)
WRITING = (
    keras.callbacks.TensorBoard.on_train_batch_begin,
    keras.callbacks.TensorBoard.on_train_batch_end,
    keras.callbacks.TensorBoard.on_test_batch_begin,
)


class FitCallback(keras.callbacks.Callback):
    """The state of one `fit`, and the callback by which Keras' training loop tells it where it is.

    It has no method for batches: if it had one, Keras would wait for the results of each batch. The counter receives
    the number of each epoch before its data is read, and the ledger the step that a resumed fit starts from.
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
        self.call_sizes: CallSizes | None = None  # until Keras has made its iterator
        self.has_begun = False  # whether Keras has called this callback
        # The callbacks that end the training after the step whose loss is not finite.
        self.ending = list({id(each): each for each in callbacks_of(callbacks) if _is_terminate_on_nan(each)}.values())
        self.scopes = contextlib.ExitStack()  # what lasts until the end of the fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest checkpoint, if there is one."""
        self.has_begun = True
        for each in self.ending:
            told = functools.partial(self._tell_last_batch, getattr(each, BATCH_END))
            self.scopes.enter_context(replaced(each, **{BATCH_END: told}))
        if self._checkpoints is not None:
            iterator = self._begun_sizes().iterator
            self._checkpoints.begin(self.params, iterator.steps_per_epoch, iterator.data_adapter.num_batches)
            self._steps_done = self._ledger.resumed_from = self._checkpoints.step
            self.scopes.enter_context(_told_of_averages(self.model.optimizer, self._checkpoints))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the number of the epoch, which decides the order of its data."""
        sizes = self._begun_sizes()
        sizes.begin_epoch()
        # With steps_per_epoch, Keras makes the iterator before this call, or keeps that of the epoch before.
        self._counter.assign(epoch, at_once=sizes.iterator.steps_per_epoch is None)
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

    def _begun_sizes(self) -> CallSizes:
        assert self.call_sizes is not None  # Keras makes its iterator before it calls callbacks
        return self.call_sizes

    def _tell_last_batch(self, tell: Callable[..., None], batch: int, logs: Any = None) -> None:
        """Tells a callback which batch was the last: Keras numbers the last batch of a call before the call."""
        tell(batch if self.call_sizes is None else self.call_sizes.last_batch, logs=logs)


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


def per_batch_callback(callbacks: Any, *, validates: bool) -> str | None:
    """Returns the class of the first callback of a fit that must be called for each batch, or None.

    If the fit validates, the callbacks see those batches too.
    """
    for callback in callbacks_of(callbacks):
        if getattr(callback, FOLLOWS, False):
            continue
        for name in PER_BATCH + (PER_TEST_BATCH if validates else ()):
            method = getattr(callback, name)
            function = getattr(method, "__func__", method)
            if function is not getattr(keras.callbacks.Callback, name) and not _is_harmless(function, callback):
                return type(callback).__name__
    return None


def _is_harmless(function: Any, callback: Any) -> bool:
    if function in SAVING:
        return bool(callback.save_freq == "epoch")
    if function in WRITING:  # the scalars of batches go to a writer of the script
        by_epoch = callback.update_freq == "epoch" and not profiles_batches(callback)
        return by_epoch and not tf.summary.should_record_summaries()
    return function in HARMLESS


def hold_masks(model: keras.Model) -> None:
    """Applies masks and clusters again: an optimizer with `use_ema` averages the weights before they are applied.

    Keras writes the averages into the weights at the end of `fit`.
    """
    for variable in model.trainable_variables:
        enforce = getattr(variable.constraint, "enforce", None)  # of tfopt.pruning and tfopt.clustering
        if enforce is not None:
            enforce()
