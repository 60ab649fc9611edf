"""The checkpoints of one `fit`: restores the newest, keeps the position in the data, and saves new ones.

A position in the data is an epoch and a number of batches. Keras' `fit` can begin at an epoch, but not within one. So
`replay` draws the finished batches of the epoch from the data and drops them. Callbacks still see these batches, which
keeps their count of batches right.

The last checkpoint holds two states. Training resumes from the state of the last step if `epochs` is raised. The other
state is the one that `fit` ended with. The two differ if Keras writes averages into the weights (`use_ema`), or if a
callback changes the weights at the end, such as EarlyStopping that restores the best ones. A `fit` that has nothing to
train returns the second state.

In a multi-worker training, every worker holds values of its own (metrics, statistics). So all workers take part in
each save, and the chief writes the file. They must save at the same step. SIGTERM reaches them at different moments, so
after each call they agree on whether one of them received it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import inner_optimizer, learning_rate_as_given
from tfopt.compat.trainer import set_initial_epoch
from tfopt.errors import ArtifactError, warn
from tfopt.training.checkpointing.compiled import compiled_with, differences
from tfopt.training.checkpointing.random_state import read_random, write_random
from tfopt.training.checkpointing.sigterm import Sigterm
from tfopt.training.checkpointing.state import averaged_variables, gather_state, read_state, write_state
from tfopt.training.checkpointing.store import Checkpoint, CheckpointStore
from tfopt.training.checkpointing.workers import Workers

FINISHED = "finished/"  # the prefix of the arrays that `fit` ended with


class FitCheckpoints:
    """Saves one `fit`, and resumes an earlier one.

    Made when Keras' training begins. Without a call of `restore`, the training starts from its beginning.

    Args:
        model: The model that `fit` trains.
        store: Where the checkpoints are.
        workers: The processes that train together.
        sigterm: Whether SIGTERM came.
        every: The number of steps between two checkpoints, or "epoch".
        check: Receives the arrays of each checkpoint before they are saved; it raises if they must not be.
        epoch_steps: The number of steps of an epoch, if it is known.

    Attributes:
        steps: The number of steps done, those of the restored checkpoint included.
        has_ended: Whether the restored training has no epoch left.
    """

    def __init__(
        self,
        model: keras.Model,
        store: CheckpointStore,
        workers: Workers,
        sigterm: Sigterm,
        *,
        every: int | Literal["epoch"],
        check: Callable[[Mapping[str, np.ndarray]], None],
        epoch_steps: int | None,
    ) -> None:
        self._model = model
        self._store = store
        self._workers = workers
        self._sigterm = sigterm
        self._every = every
        self._check = check
        self._epoch_steps = epoch_steps
        self._learning_rate = _constant_learning_rate(model.optimizer)
        # The position: finished epochs, steps in the epoch that goes on, steps in all.
        self._epoch = 0
        self._in_epoch = 0
        self.steps = 0
        self.has_ended = False
        self._saved_position: tuple[int, int] | None = None
        # What Keras logged before this fit.
        self._history: dict[str, list[float]] = {}
        self._logged_epochs: list[int] = []
        # What is left of resuming: batches to draw and drop, steps to count as done, metrics to restore.
        self._to_skip = 0
        self._to_replay = 0
        self._metrics: dict[str, Any] | None = None
        self._has_trained = False
        self._last_step: dict[str, np.ndarray] = {}  # averaged weights and their averages after the last step
        # The end of this fit: the checkpoint that `end` saved, or the state that a finished training ended with.
        self._ended: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        self._finished: tuple[dict[str, np.ndarray], Any] | None = None

    def restore(self, checkpoint: Checkpoint, epochs: int, steps_per_epoch: int | None, batches: int | None) -> None:
        """Restores a checkpoint, and sets the epoch that Keras begins with.

        Args:
            checkpoint: A checkpoint of the same model and data.
            epochs: As given to `fit`.
            steps_per_epoch: As given to `fit`.
            batches: The number of batches of the data; None if it has no end, or if the number is not known.
        Raises:
            ArtifactError: The checkpoint is of another model or data.
        """
        meta = checkpoint.meta
        self._compare(meta)
        if steps_per_epoch and batches and batches != steps_per_epoch and meta["epoch"] < epochs:
            raise ArtifactError(
                "Data with an end that is divided over several epochs cannot be resumed, because Keras counts its "
                f"batches from the beginning. Received: {batches} batches, with steps_per_epoch={steps_per_epoch}. "
                "Repeat the data (dataset.repeat()), or leave steps_per_epoch out."
            )
        arrays = {name: array for name, array in checkpoint.arrays.items() if not name.startswith(FINISHED)}
        if meta["epoch"] >= epochs or meta["stopped_early"]:
            arrays |= {
                name.removeprefix(FINISHED): checkpoint.arrays[name] for name in checkpoint.arrays.keys() - arrays
            }
            if meta.get("finished"):
                self._finished = arrays, meta["finished"]["random"]
        write_state(self._model, arrays)
        write_random(meta["random"])
        self._epoch, self._in_epoch, self.steps = meta["epoch"], meta["in_epoch"], checkpoint.step
        self._history, self._logged_epochs = meta["history"], meta["epochs"]
        self._saved_position = (self._epoch, self._in_epoch)
        if meta["stopped_early"] and self._epoch < epochs:
            warn(
                f"The training in {self._store.directory} was stopped early by a callback after {self._epoch} epochs "
                "and is not continued. Set another checkpoint_dir to train anew."
            )
            self._epoch = epochs
        elif self._epoch >= epochs:
            warn(
                f"There is nothing to train: the training in {self._store.directory} reached epoch {self._epoch} of "
                f"{epochs} before. Raise epochs to go on from there, or set another checkpoint_dir to train anew."
            )
        elif self._in_epoch:
            self._metrics = arrays
        self.has_ended = self._epoch >= epochs
        self._to_replay = self._in_epoch
        # With steps_per_epoch, one iterator serves several epochs, until its data ends.
        drawn = checkpoint.step % batches if batches else checkpoint.step
        self._to_skip = drawn if steps_per_epoch else self._in_epoch
        set_initial_epoch(self._model, self._epoch)

    def begin_epoch(self) -> None:
        """Restores the metrics of a resumed epoch; else saves the end of the epoch before, callbacks included."""
        if self._metrics is not None:
            write_state(self._model, self._metrics, only="metrics/")  # Keras has just reset them
            self._metrics = None
            return
        if self._every == "epoch" and self._has_trained and self._saved_position != (self._epoch, self._in_epoch):
            self._save()

    def replay(self, iterator: Any, count: int) -> int:
        """Drops the batches that were done before. Returns how many of a call's steps are among them."""
        if self._to_skip:
            _skip(iterator, tf.constant(self._to_skip))
            self._to_skip = 0
        done = min(count, self._to_replay)
        self._to_replay -= done
        return done

    def after(self, step: int, steps: int) -> None:
        """Notes a call that ran `steps` steps and ended with step number `step`; saves if it is time.

        Raises:
            SystemExit: SIGTERM came, and the training is saved.
        """
        self._has_trained = True
        self.steps = step
        self._in_epoch += steps
        if self._workers.any(self._sigterm.received):
            self._save()
            self._workers.any(True)  # no worker ends, or names the step, before the chief has written the file
            self._sigterm.end(self.in_words())
        if self._every != "epoch" and step // self._every > (step - steps) // self._every:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Moves the position to the next epoch. It must be called before other callbacks change the weights."""
        self._epoch, self._in_epoch = epoch + 1, 0
        averaged = averaged_variables(self._model)
        self._last_step = read_state(self._model, averaged) if averaged else {}

    def end(self) -> None:
        """Saves the training as its last step left it, and adds the earlier epochs to Keras' history."""
        if self._has_trained:
            self._ended = self._save(stopped_early=bool(self._model.stop_training), averages_are_written=True)
        history = self._model.history
        history.history, history.epoch = self._whole_history()

    def finish(self) -> None:
        """Adds the state that `fit` ended with to the last checkpoint. A finished training gets that state back."""
        if self._finished is not None:
            arrays, generators = self._finished
            self._check_masks(arrays)
            write_state(self._model, arrays)
            write_random(generators)
        elif self._ended is not None:
            trained, meta = self._ended
            now, generators = gather_state(read_state(self._model), self._workers.strategy), read_random()
            changed = {FINISHED + name: value for name, value in now.items() if not _same(value, trained[name])}
            if (changed or generators != meta["random"]) and self._workers.is_chief:
                self._store.save(self.steps, trained | changed, meta | {"finished": {"random": generators}})

    def _check_masks(self, finished: Mapping[str, np.ndarray]) -> None:
        """Raises ArtifactError if a pruning schedule has pruned more than the training that is finished."""
        now = gather_state(read_state(self._model), self._workers.strategy)
        other = [name for name in _masks(now) if not _same(now[name], finished[name])]
        if other:
            kept = [np.concatenate([arrays[name].ravel() for name in other]).mean() for arrays in (finished, now)]
            raise ArtifactError(
                f"A finished training keeps the masks that it ended with. Received: {1 - kept[1]:.1%} zeros in "
                f"{len(other)} masks, which have {1 - kept[0]:.1%} in {self._store.directory}. Raise epochs to prune "
                "further, set the target_sparsity as it was, or set another checkpoint_dir to train anew."
            )

    def in_words(self) -> str:
        """Returns the step that is reached, and the directory. It is the same on all workers."""
        return f"step {self.steps} in {self._store.directory}"

    def _compare(self, meta: Mapping[str, Any]) -> None:
        """Compares the data, and what a checkpoint was compiled with, with those of this training."""
        before, now = meta["steps_in_epoch"], self._epoch_steps
        if before is not None and now is not None and before != now:
            if meta["in_epoch"]:
                raise ArtifactError(
                    "The batches must be the same as before to resume within an epoch. Received: an epoch of "
                    f"{now} steps, with a checkpoint in {self._store.directory} at step {meta['in_epoch']} of {before}."
                    " Set global_batch_size and the data as they were, or another checkpoint_dir to train anew."
                )
            self._warn(f"an epoch has {now} steps and had {before}: the data or the batch size has changed.")
        differs = differences(compiled_with(self._model), meta.get("compiled", {}))
        refused = {"optimizer", "metrics"} | ({"loss"} if meta["in_epoch"] else set())
        if refused & differs.keys():
            words = "; ".join(differs[key] for key in sorted(refused & differs.keys()))
            raise ArtifactError(
                "A training must be resumed with the optimizer and the metrics that it was saved with, and within an "
                f"epoch with its loss. Received: {words}, with a checkpoint in {self._store.directory}. Compile as "
                "before, or set another checkpoint_dir to train anew."
            )
        for words in (differs[key] for key in ("loss", "settings") if key in differs):
            self._warn(f"{words}. The present one is used.")
        given, rate = self._learning_rate, meta["learning_rate"]
        if given is not None and rate is not None and given != rate:
            self._learning_rate = rate
            self._warn(
                f"the learning rate stays {rate:g}, as in the checkpoint; the optimizer is compiled with {given:g}. "
                "Set model.optimizer.learning_rate in a callback's on_train_begin to change it."
            )

    def _warn(self, words: str) -> None:
        warn(f"Resuming the training in {self._store.directory}: {words}")

    def _save(
        self, *, stopped_early: bool = False, averages_are_written: bool = False
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Saves the training. Returns the arrays and the record that were saved."""
        arrays = gather_state(self._read_as_of_last_step(averages_are_written), self._workers.strategy)
        self._check(arrays)
        self._saved_position = (self._epoch, self._in_epoch)
        history, epochs = self._whole_history()
        meta = {
            "epoch": self._epoch,
            "in_epoch": self._in_epoch,
            "history": history,
            "epochs": epochs,
            "stopped_early": stopped_early,
            "steps_in_epoch": self._epoch_steps,
            "learning_rate": self._learning_rate,
            "compiled": compiled_with(self._model),
            "random": read_random(),
            "finished": None,
        }
        if self._workers.is_chief:
            self._store.save(self.steps, arrays, meta)
        return arrays, meta

    def _read_as_of_last_step(self, averages_are_written: bool) -> dict[str, np.ndarray]:
        """Returns the state with the weights that training resumes from.

        With `use_ema`, Keras writes the averages into the weights when `fit` ends, and SwapEMAWeights exchanges the two
        at the end of each epoch. After such an exchange, the averages differ from those of the last step. Other changes
        that callbacks make to weights at the end of an epoch are saved.
        """
        state = read_state(self._model)
        swapped = any(not _same(state[name], value) for name, value in self._last_step.items() if _is_average(name))
        return state | self._last_step if averages_are_written or (self._in_epoch == 0 and swapped) else state

    def _whole_history(self) -> tuple[dict[str, list[float]], list[int]]:
        """Returns what Keras logged before this fit and in it."""
        new = self._model.history
        logged = {} if new is None else new.history
        names = [*self._history, *(name for name in logged if name not in self._history)]
        history = {name: [*self._history.get(name, []), *map(float, logged.get(name, []))] for name in names}
        return history, [*self._logged_epochs, *([] if new is None else new.epoch)]


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays of one shape and dtype hold the same bits."""
    return bool(one.tobytes() == other.tobytes())


def _masks(arrays: Mapping[str, np.ndarray]) -> list[str]:
    return [name for name, array in arrays.items() if name.startswith("constraint/") and array.dtype == bool]


def _is_average(name: str) -> bool:
    return name.startswith("optimizer/")


def _constant_learning_rate(optimizer: Any) -> float | None:
    """Returns the learning rate that an optimizer was made with, or None if it has a schedule."""
    rate = learning_rate_as_given(inner_optimizer(optimizer))
    return float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else None


def _skip(iterator: Any, count: tf.Tensor) -> None:
    """Draws so many batches from an iterator and drops them."""

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
    """Returns the value once the batch has been drawn."""
    first = keras.tree.flatten(batch)[0]
    tensors = first.values if isinstance(first, tf.distribute.DistributedValues) else (first,)
    with tf.control_dependencies([tensors[0]]):
        return tf.identity(value)
