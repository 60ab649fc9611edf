"""The state of one `fit`: created when `fit` is called, dropped when it ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.data.epoch_order import UNCONTROLLED, EpochCounter
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.checkpointing.resume import OpenCheckpoints
from tfopt.training.step.execution import Executions
from tfopt.training.step.guards import Watch
from tfopt.training.step.ledger import Ledger

BATCH_END = "on_train_batch_end"


@dataclass(kw_only=True)
class Fit:
    """One `fit` of a model.

    Attributes:
        watch: Checks the losses and the weights.
        ledger: Receives the step that a resumed fit starts from.
        counter: Receives the number of each epoch before its data is read.
        synchronize: Averages over the replicas what each updates by itself.
        open_checkpoints: Restores the newest checkpoint; None without a checkpoint directory.
        executions: The steps of each call into TensorFlow; None until Keras has made its iterator.
        checkpoints: Saves this fit; None until Keras' training begins, or without a checkpoint directory.
        has_begun: Whether Keras has called `FitCallback`.
        steps_done: The steps of this fit and, if it was resumed, those before.
        ending: The callbacks that end the training after the step whose loss is not finite.
    """

    watch: Watch
    ledger: Ledger
    counter: EpochCounter
    synchronize: Callable[[], None]
    open_checkpoints: OpenCheckpoints | None
    executions: Executions | None = None
    checkpoints: FitCheckpoints | None = None
    has_begun: bool = False
    steps_done: int = 0
    ending: Sequence[Any] = ()

    def begin(self, params: dict[str, Any]) -> None:
        """Restores the newest checkpoint, if there is one."""
        self.has_begun = True
        for each in self.ending:
            # An attribute of the instance, as long as the fit: Keras calls what it finds there.
            setattr(each, BATCH_END, functools.partial(_with_last_batch, self, getattr(each, BATCH_END)))
        if self.open_checkpoints is not None:
            iterator = self._begun_executions().iterator
            self.checkpoints = self.open_checkpoints(
                params, iterator.steps_per_epoch, iterator.data_adapter.num_batches
            )
            self.steps_done = self.ledger.resumed_from = self.checkpoints.steps

    def begin_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch, which decides the order of its data."""
        executions = self._begun_executions()
        executions.begin_epoch()
        # With steps_per_epoch, Keras makes the iterator before this call, or keeps that of the epoch before.
        self.counter.assign(epoch, at_once=executions.iterator.steps_per_epoch is None)
        if self.checkpoints is not None:
            self.checkpoints.begin_epoch()

    def replay(self, iterator: Any, count: int) -> int:
        """Skips the batches that the resumed training has done. Returns how many of `count` steps they are."""
        return 0 if self.checkpoints is None else self.checkpoints.replay(iterator, count)

    def after(self, steps: int, logs: dict[str, Any]) -> None:
        """Checks and saves the training after a call that ran so many steps."""
        self.steps_done += steps
        self.watch.after(self.steps_done, steps, logs)
        if self.checkpoints is not None:
            self.checkpoints.after(self.steps_done, steps)

    def end_epoch(self, epoch: int) -> None:
        """Checks the losses and notes the weights before other callbacks change them."""
        self.synchronize()
        self.watch.check()
        if self.checkpoints is not None:
            self.checkpoints.end_epoch(epoch)

    def end(self) -> None:
        """Saves the training as the last step left it."""
        self.counter.assign(UNCONTROLLED)
        if self.checkpoints is not None:
            self.checkpoints.end()

    def finish(self) -> None:
        """Saves what the other callbacks changed when the training ended."""
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def _begun_executions(self) -> Executions:
        assert self.executions is not None  # Keras makes its iterator before it calls callbacks
        return self.executions


@contextlib.contextmanager
def told_the_last_batch(fit: Fit, callbacks: Any) -> Iterator[None]:
    """Within it, the steps of a call end with the first loss that a TerminateOnNaN looks for, and it is told which.

    Keras numbers the last batch of a call before the call.
    """
    given = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    fit.ending = list({id(each): each for each in given if _is_terminate_on_nan(each)}.values())
    before = [vars(each).copy() for each in fit.ending]
    try:
        yield
    finally:
        for each, attributes in zip(fit.ending, before, strict=True):
            vars(each).pop(BATCH_END, None)
            if BATCH_END in attributes:
                setattr(each, BATCH_END, attributes[BATCH_END])


def _is_terminate_on_nan(callback: Any) -> bool:
    """Returns whether a callback ends the training as TerminateOnNaN does; a class of its own may go on."""
    cls, own = type(callback), keras.callbacks.TerminateOnNaN
    return isinstance(callback, own) and all(
        getattr(cls, name) is getattr(own, name) for name in ("on_batch_end", BATCH_END)
    )


def _with_last_batch(fit: Fit, tell: Callable[..., None], batch: int, logs: Any = None) -> None:
    tell(batch if fit.executions is None else fit.executions.last_batch, logs=logs)


class FitCallback(keras.callbacks.Callback):
    """Calls a `Fit` from Keras' training loop.

    It has no method for batches: if it had one, Keras would wait for the results of each batch.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self._fit = fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._fit.begin(self.params)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._fit.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._fit.end_epoch(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._fit.end()
