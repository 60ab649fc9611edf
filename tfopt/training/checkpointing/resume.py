"""Saves a training while it runs, and resumes it where it was: the same weights as if it had never stopped.

A position in the data is an epoch and a number of batches. Keras' `fit` can begin at an epoch but not within one, so
the batches that were done are drawn from the data again and thrown away: `replay`. For callbacks they are batches like
others, which keeps their count.

The last checkpoint holds two states. One is that of the last step, from which training goes on when epochs are raised.
The other is what `fit` ended with. They differ where Keras writes averages into the weights (`use_ema`) or a callback
changes them at the end, such as EarlyStopping that restores the best. A training that is done returns the second.

In a multi-worker training every worker takes part in a save, since each holds values of its own (metrics, statistics),
and the chief writes the file. So all must save at the same step: after a SIGTERM, which reaches them at different
moments, they agree on one.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import inner_optimizer, learning_rate_as_given
from tfopt.compat.trainer import set_initial_epoch
from tfopt.errors import ArtifactError, ConfigError, TfoptWarning
from tfopt.training.checkpointing.lock import only_training
from tfopt.training.checkpointing.state import (
    averaged_variables,
    gather_state,
    read_random,
    read_state,
    write_random,
    write_state,
)
from tfopt.training.checkpointing.store import CheckpointStore, check_mode

TERMINATED = 128 + signal.SIGTERM
FINISHED = "finished/"  # what the names of arrays begin with that `fit` ended with


class Resume:
    """The checkpoints of one training.

    Args:
        directory: Where they are; with several workers, storage that all of them share.
        every: Steps between two, or "epoch".
        keep: How many stay.
        mode: "auto" goes on from what is there, True insists on it, False insists on an empty directory.
        strategy: What the model trains under.
        check: Given what is to be saved, raises when it is not worth it.
    Raises:
        ConfigError: The directory does not go with the mode.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int | Literal["epoch"],
        keep: int,
        mode: bool | Literal["auto"],
        strategy: tf.distribute.Strategy,
        check: Callable[[Mapping[str, np.ndarray]], None],
    ) -> None:
        self._store = CheckpointStore(Path(directory), keep)
        self._every = every
        self._strategy = strategy
        self._check = check
        self._terminated = False  # SIGTERM came to this process
        self._ending = False  # the training is saved and the process told to end
        self._model: Any = None
        check_mode(directory, mode)

    def last_checkpoint(self) -> str | None:
        """Returns the newest checkpoint in words."""
        steps = self._store.steps()
        return f"step {steps[-1]} in {self._store.directory}" if steps else None

    @contextlib.contextmanager
    def around_fit(self) -> Iterator[None]:
        """Holds the directory while `fit` runs, takes SIGTERM as a request to save, and saves what `fit` ends with.

        Raises:
            ConfigError: Another training uses the directory.
            SystemExit: SIGTERM came; the training is saved.
        """
        self._ended: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        self._finished: tuple[dict[str, np.ndarray], Any] | None = None
        with self._locked(), self._listening():
            yield
            self._finish()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other trainings out. The chief writes and so it locks; if it cannot, no worker may begin."""
        with contextlib.ExitStack() as lock:
            refused: ConfigError | None = None
            if self._strategy.extended.should_checkpoint:
                try:
                    lock.enter_context(only_training(self._store.directory))
                except ConfigError as error:
                    refused = error
            if self._any_worker(refused is not None):
                raise refused or ConfigError(
                    "checkpoint_dir must be used by one training at a time. Received: checkpoint_dir="
                    f"{self._store.directory}, which another training uses; the chief's message names it."
                )
            yield

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Takes SIGTERM as a request to save and end, with exit code 143."""
        self._terminated = self._ending = False
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return

        def request(number: int, frame: FrameType | None) -> None:
            self._terminated = True

        before = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            # With several workers another's SIGTERM may have ended the training. This worker's own, if it comes while
            # the process ends, must not cut that short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self._ending else before)
            if self._model is not None:
                set_initial_epoch(self._model, None)
                self._model = None

    def begin(
        self, model: keras.Model, params: Mapping[str, Any], steps_per_epoch: int | None, batches: int | None
    ) -> int:
        """Restores the newest checkpoint, if there is one, and returns the number of steps done.

        Args:
            model: Compiled as the saved one was.
            params: Keras' own, of a callback: "epochs" and, where it is known, "steps" of an epoch.
            steps_per_epoch: As given to `fit`.
            batches: How many the data holds; None if it has no end, or if that is not known.
        Raises:
            ArtifactError: None can be read, or it is of another model or data, or the workers found different ones.
        """
        epochs = params["epochs"]
        self._steps_in_epoch = params.get("steps")
        self._learning_rate = _constant_learning_rate(model.optimizer)
        self._model = model
        self._epoch, self._in_epoch, self._steps = 0, 0, 0
        self._history: dict[str, list[float]] = {}
        self._epochs_seen: list[int] = []
        self._to_skip = self._to_replay = 0
        self._restored: dict[str, Any] | None = None
        self._last_step: dict[str, np.ndarray] = {}
        self._saved: tuple[int, int] | None = None  # the position of the newest checkpoint
        self._has_trained = False
        checkpoint = self._store.load_newest()
        self._agree_on_step(-1 if checkpoint is None else checkpoint.step)
        if checkpoint is None:
            return 0
        meta = checkpoint.meta
        self._compare(meta)
        if steps_per_epoch and batches and batches != steps_per_epoch and meta["epoch"] < epochs:
            raise ArtifactError(
                "Data with an end that is divided over several epochs cannot be resumed, since Keras counts it from "
                f"the beginning. Received: {batches} batches, with steps_per_epoch={steps_per_epoch}. "
                "Repeat the data (dataset.repeat()), or leave steps_per_epoch out."
            )
        arrays = {name: array for name, array in checkpoint.arrays.items() if not name.startswith(FINISHED)}
        if meta["epoch"] >= epochs or meta["stopped_early"]:
            changed = {
                name.removeprefix(FINISHED): checkpoint.arrays[name] for name in checkpoint.arrays.keys() - arrays
            }
            arrays |= changed
            if meta.get("finished"):
                self._finished = arrays, meta["finished"]["random"]
        write_state(model, arrays)
        write_random(meta["random"])
        self._epoch, self._in_epoch, self._steps = meta["epoch"], meta["in_epoch"], checkpoint.step
        self._history, self._epochs_seen = meta["history"], meta["epochs"]
        self._saved = (self._epoch, self._in_epoch)
        if meta["stopped_early"] and self._epoch < epochs:
            warnings.warn(
                f"The training in {self._store.directory} was stopped early by a callback after {self._epoch} epochs "
                "and is not continued. Set another checkpoint_dir to train anew.",
                TfoptWarning,
                stacklevel=2,
            )
            self._epoch = epochs
        elif self._epoch >= epochs:
            warnings.warn(
                f"There is nothing to train: the training in {self._store.directory} reached epoch {self._epoch} of "
                f"{epochs} before. Raise epochs to go on from there, or set another checkpoint_dir to train anew.",
                TfoptWarning,
                stacklevel=2,
            )
        elif self._in_epoch:
            self._restored = arrays
        self._to_replay = self._in_epoch
        # With steps_per_epoch an iterator lives on from epoch to epoch, until its data ends.
        drawn = checkpoint.step % batches if batches else checkpoint.step
        self._to_skip = drawn if steps_per_epoch else self._in_epoch
        set_initial_epoch(model, self._epoch)
        return self._steps

    def begin_epoch(self, epoch: int) -> None:
        """Saves what the epoch before ended with, its callbacks included; restores the figures of a resumed epoch."""
        if self._restored is not None:
            write_state(self._model, self._restored, only="metrics/")  # Keras has just reset them
            self._restored = None
            return
        if self._every == "epoch" and self._has_trained and self._saved != (self._epoch, self._in_epoch):
            self._save()

    def replay(self, iterator: Any, count: int) -> int:
        """Throws away the batches that were done before; returns how many of a call's steps were among them."""
        if self._to_skip:
            _skip(iterator, tf.constant(self._to_skip))
            self._to_skip = 0
        done = min(count, self._to_replay)
        self._to_replay -= done
        return done

    def after(self, step: int, steps: int) -> None:
        """Takes note of a call of `steps` steps, the last of which was number `step`; saves if it is time.

        Raises:
            SystemExit: SIGTERM came; the training is saved.
        """
        self._has_trained = True
        self._steps = step
        self._in_epoch += steps
        if self._any_worker(self._terminated):
            self._save()
            self._terminate()
        if self._every != "epoch" and step // self._every > (step - steps) // self._every:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Moves the position to the next epoch; to be called before other callbacks change anything."""
        self._epoch, self._in_epoch = epoch + 1, 0
        averaged = averaged_variables(self._model)
        self._last_step = read_state(self._model, averaged) if averaged else {}

    def end(self) -> None:
        """Saves the training as its last step left it, and makes its history whole."""
        if self._has_trained:
            self._ended = self._save(stopped_early=bool(self._model.stop_training), averages_are_written=True)
        history = self._model.history
        history.history, history.epoch = self._whole_history()

    def _finish(self) -> None:
        """Adds what `fit` ended with, all callbacks included, to the last checkpoint; or restores it."""
        if self._finished is not None:
            arrays, generators = self._finished
            write_state(self._model, arrays)
            write_random(generators)
        elif self._ended is not None:
            trained, meta = self._ended
            now, generators = gather_state(read_state(self._model), self._strategy), read_random()
            changed = {FINISHED + name: value for name, value in now.items() if not _same(value, trained[name])}
            if (changed or generators != meta["random"]) and self._strategy.extended.should_checkpoint:
                self._store.save(self._steps, trained | changed, meta | {"finished": {"random": generators}})
        self._ended = self._finished = None
        if self._any_worker(self._terminated):  # it came after the last step, during the last evaluation for example
            self._terminate()

    def _terminate(self) -> None:
        self._ending = True
        print(f"tfopt: SIGTERM: saved {self.last_checkpoint()}", file=sys.stderr)  # noqa: T201
        raise SystemExit(TERMINATED)

    def _compare(self, meta: Mapping[str, Any]) -> None:
        """Compares what a checkpoint was trained with to what this training is given."""
        before, now = meta["steps_in_epoch"], self._steps_in_epoch
        if before is not None and now is not None and before != now:
            if meta["in_epoch"]:
                raise ArtifactError(
                    f"The data must be divided as before to go on within an epoch. Received: an epoch of {now} steps, "
                    f"with a checkpoint in {self._store.directory} at step {meta['in_epoch']} of {before}. "
                    "Set global_batch_size and the data as they were, or another checkpoint_dir to train anew."
                )
            self._warn(f"an epoch has {now} steps and had {before}: the data or the batch size is another.")
        given, rate = self._learning_rate, meta["learning_rate"]
        if given is not None and rate is not None and given != rate:
            self._learning_rate = rate
            self._warn(
                f"the learning rate is the checkpoint's; the optimizer was compiled with {given:g}, and then with "
                f"{rate:g}. Set model.optimizer.learning_rate in a callback's on_train_begin to change it."
            )

    def _warn(self, words: str) -> None:
        warnings.warn(f"Resuming the training in {self._store.directory}: {words}", TfoptWarning, stacklevel=2)

    def _save(
        self, *, stopped_early: bool = False, averages_are_written: bool = False
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Saves the training, and returns what was saved."""
        arrays = gather_state(self._read_as_of_last_step(averages_are_written), self._strategy)
        self._check(arrays)
        self._saved = (self._epoch, self._in_epoch)
        history, epochs = self._whole_history()
        meta = {
            "epoch": self._epoch,
            "in_epoch": self._in_epoch,
            "history": history,
            "epochs": epochs,
            "stopped_early": stopped_early,
            "steps_in_epoch": self._steps_in_epoch,
            "learning_rate": self._learning_rate,
            "random": read_random(),
            "finished": None,
        }
        if self._strategy.extended.should_checkpoint:
            self._store.save(self._steps, arrays, meta)
        return arrays, meta

    def _read_as_of_last_step(self, averages_are_written: bool) -> dict[str, np.ndarray]:
        """Returns the state with the weights that training goes on from.

        With `use_ema` Keras writes the averages into the weights when `fit` ends, and SwapEMAWeights exchanges the two
        at the end of each epoch; that the averages have changed since the last step tells so. What other callbacks
        do to weights at the end of an epoch counts.
        """
        state = read_state(self._model)
        swapped = any(not _same(state[name], value) for name, value in self._last_step.items() if _is_average(name))
        return state | self._last_step if averages_are_written or (self._in_epoch == 0 and swapped) else state

    def _whole_history(self) -> tuple[dict[str, list[float]], list[int]]:
        """Returns what was logged before this fit and in it."""
        new = self._model.history
        logged = {} if new is None else new.history
        names = [*self._history, *(name for name in logged if name not in self._history)]
        history = {name: [*self._history.get(name, []), *map(float, logged.get(name, []))] for name in names}
        return history, [*self._epochs_seen, *([] if new is None else new.epoch)]

    def _several_workers(self) -> bool:
        return isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def _any_worker(self, value: bool) -> bool:
        if not self._several_workers():
            return value
        return float(self._sum(tf.constant(float(value)))) > 0

    @functools.cached_property
    def _sum(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Sums a number over the workers. A collective: each of them calls it."""

        def add(value: tf.Tensor) -> tf.Tensor:
            return self._strategy.reduce("SUM", self._strategy.run(tf.identity, args=(value,)), axis=None)

        return tf.function(add)

    def _agree_on_step(self, step: int) -> None:
        if not self._several_workers():
            return
        total = self._strategy.num_replicas_in_sync
        value = tf.constant(float(step), "float64")
        mean = float(self._sum(value)) / total
        spread = float(self._sum((value - mean) ** 2))
        if spread:
            raise ArtifactError(
                "All workers must find the same checkpoints. Received: checkpoint_dir="
                f"{self._store.directory}, whose newest is of step {step} here and of another step elsewhere. "
                "Put checkpoint_dir on storage that all workers share."
            )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype hold the same bits."""
    return bool(one.tobytes() == other.tobytes())


def _is_average(name: str) -> bool:
    return name.startswith("optimizer/")


def _constant_learning_rate(optimizer: Any) -> float | None:
    """Returns the learning rate that an optimizer was made with; None of a schedule, which follows the steps."""
    rate = learning_rate_as_given(inner_optimizer(optimizer))
    return float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else None


def _skip(iterator: Any, count: tf.Tensor) -> None:
    @tf.function
    def skip(iterator: Any) -> None:
        tf.while_loop(
            lambda done: done < count,
            lambda done: _after(iterator.get_next(), done + 1),
            (tf.constant(0),),
            parallel_iterations=1,
        )

    skip(iterator)


def _after(batch: Any, value: tf.Tensor) -> tf.Tensor:
    first = keras.tree.flatten(batch)[0]
    tensors = first.values if isinstance(first, tf.distribute.DistributedValues) else (first,)
    with tf.control_dependencies([tensors[0]]):
        return tf.identity(value)
