"""The checkpoints of one `fit`: restores the newest, keeps the position in the data, and saves new ones.

A position in the data is an epoch and a number of batches. Keras' `fit` can begin at an epoch, but not within one. So
`replay` draws the finished batches of the epoch from the data and drops them. Callbacks still see these batches, which
keeps their count of batches right.

The last checkpoint holds two states. Training resumes from the state of the last step if `epochs` is raised. The other
state is the one that `fit` ended with. The two differ if Keras writes averages into the weights (`use_ema`), or if a
callback changes the weights at the end, such as EarlyStopping that restores the best ones. A `fit` that has nothing to
train returns the second state.

A fit calls these methods in this order; `begin_epoch`, `end_epoch` and `end` before other callbacks hear of the same:

| method | what is saved |
|---|---|
| `begin_epoch` | with "epoch", the end of the epoch before, with what callbacks changed |
| `after` (a call of the step) | the step, if it is time or SIGTERM came |
| `end_epoch` | nothing; notes the averaged weights before callbacks swap them |
| `before_averages` | nothing; notes the weights before `use_ema` overwrites them |
| `end` | the last step |
| `finish` (after `fit`) | the last step again, with the state that `fit` ended with, if it differs |

In a multi-worker training, every worker holds values of its own (metrics, statistics). So all workers take part in
each save, and the chief writes the file. They must save at the same step. SIGTERM reaches them at different moments, so
after each call they agree on whether one of them received it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import inner_optimizer, learning_rate_as_given
from tfopt.compat.trainer import set_initial_epoch
from tfopt.errors import ArtifactError, warn
from tfopt.training.checkpointing.record import compiled_with, differences, read_random, write_random
from tfopt.training.checkpointing.state import averaged_variables, gather_state, read_state, write_state
from tfopt.training.checkpointing.store import Checkpoint, CheckpointStore
from tfopt.training.checkpointing.workers import Sigterm, Workers

FINISHED = "finished/"  # the prefix of the arrays that `fit` ended with


@dataclass
class _Position:
    """A place in a training: finished epochs, steps of the epoch that goes on, steps in all."""

    epoch: int = 0
    in_epoch: int = 0
    step: int = 0


@dataclass
class _Resumed:
    """What a fit goes on from; as it is here for one that starts from the beginning."""

    step: int = 0  # done before this fit, in which Keras logged history and epochs
    history: dict[str, list[float]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    to_skip: int = 0  # batches that are still to be drawn from the data and dropped
    to_replay: int = 0  # steps that still count as done
    metrics: dict[str, Any] | None = None  # the state whose metrics the first epoch begins with
    # The state that a finished training ended with: arrays, and the random generators.
    finished: tuple[dict[str, np.ndarray], Any] | None = None


class FitCheckpoints:
    """Saves one `fit`, and resumes an earlier one; `Checkpoints.around_fit` makes it."""

    def __init__(
        self,
        model: keras.Model,
        store: CheckpointStore,
        workers: Workers,
        sigterm: Sigterm,
        *,
        every: int | Literal["epoch"],
        check: Callable[[Mapping[str, np.ndarray]], None],
    ) -> None:
        self._model = model
        self._store = store
        self._workers = workers
        self._sigterm = sigterm
        self._every = every
        self._check = check
        self._epoch_steps: int | None = None  # if it is known
        self._learning_rate: float | None = None  # if it is constant
        self._position = _Position()
        self._resumed = _Resumed()
        self._saved_step = 0
        self._ended_an_epoch = False
        self._last_step: dict[str, np.ndarray] = {}  # averaged weights and their averages after the last step
        self._ended: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None  # the checkpoint that `end` saved

    @property
    def step(self) -> int:
        """The number of steps done, those of the restored checkpoint included."""
        return self._position.step

    def begin(self, params: Mapping[str, Any], steps_per_epoch: int | None, batches: int | None) -> None:
        """Restores the newest checkpoint, if there is one, and sets the epoch that Keras begins with.

        It is called when Keras' training begins, with the `params` of a callback and the number of batches of the data:
        None if the data has no end, or if the number is not known.

        Raises:
            ArtifactError: The checkpoint is of another model or data, or the workers find different ones.
            ConfigError: There is something to train, and the directory cannot be written.
        """
        self._epoch_steps = params.get("steps")
        rate = learning_rate_as_given(inner_optimizer(self._model.optimizer))  # a variable, or a schedule
        self._learning_rate = float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else None
        checkpoint = self._store.load_newest()
        step = -1 if checkpoint is None else checkpoint.step
        if not self._workers.agree(step):
            raise ArtifactError(
                "All workers must find the same checkpoints. Received: checkpoint_dir="
                f"{self._store.directory}, whose newest is of step {step} here and of another step elsewhere. "
                "Put checkpoint_dir on storage that all workers share."
            )
        if checkpoint is not None:
            self._restore(checkpoint, params["epochs"], steps_per_epoch, batches)
        if self._position.epoch < params["epochs"]:
            self._workers.on_chief(
                self._store.check_writable,
                "checkpoint_dir must be a directory that the chief can write. Received: checkpoint_dir="
                f"{self._store.directory}; the chief's message says why not.",
            )

    def _restore(self, checkpoint: Checkpoint, epochs: int, steps_per_epoch: int | None, batches: int | None) -> None:
        meta = checkpoint.meta
        self._compare(meta)
        if steps_per_epoch and batches and batches != steps_per_epoch and meta["epoch"] < epochs:
            raise ArtifactError(
                "Data with an end that is divided over several epochs cannot be resumed, because Keras counts its "
                f"batches from the beginning. Received: {batches} batches, with steps_per_epoch={steps_per_epoch}. "
                "Repeat the data (dataset.repeat()), or leave steps_per_epoch out."
            )
        position = self._position = _Position(meta["epoch"], meta["in_epoch"], checkpoint.step)
        # With steps_per_epoch, one iterator serves several epochs, until its data ends.
        drawn = checkpoint.step % batches if batches else checkpoint.step
        resumed = self._resumed = _Resumed(
            checkpoint.step,
            meta["history"],
            meta["epochs"],
            to_skip=drawn if steps_per_epoch else position.in_epoch,
            to_replay=position.in_epoch,
        )
        self._saved_step = checkpoint.step
        arrays = {name: array for name, array in checkpoint.arrays.items() if not name.startswith(FINISHED)}
        if position.epoch >= epochs or meta["stopped_early"]:
            ended = checkpoint.arrays.keys() - arrays
            arrays |= {name.removeprefix(FINISHED): checkpoint.arrays[name] for name in ended}
            if meta.get("finished"):
                resumed.finished = arrays, meta["finished"]["random"]
        write_state(self._model, arrays)
        write_random(meta["random"])
        if meta["stopped_early"] and position.epoch < epochs:
            warn(
                f"The training in {self._store.directory} was stopped early by a callback after {position.epoch} "
                "epochs and is not continued. Set another checkpoint_dir to train anew."
            )
            position.epoch = epochs
        elif position.epoch >= epochs:
            warn(
                f"There is nothing to train: the training in {self._store.directory} reached epoch {position.epoch} of "
                f"{epochs} before. Raise epochs to go on from there, or set another checkpoint_dir to train anew."
            )
        elif position.in_epoch:
            resumed.metrics = arrays
        set_initial_epoch(self._model, position.epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Restores the metrics of a resumed epoch; else saves the end of the epoch before, callbacks included."""
        self._position.epoch = epoch  # which may begin with fit's initial_epoch
        if self._resumed.metrics is not None:
            write_state(self._model, self._resumed.metrics, only="metrics/")  # Keras has just reset them
            self._resumed.metrics = None
        elif self._every == "epoch" and self.step > self._saved_step:
            self._save()

    def replay(self, iterator: Any, count: int) -> int:
        """Drops the batches that were done before. Returns how many of a call's steps are among them."""
        resumed = self._resumed
        if resumed.to_skip:
            _skip(iterator, tf.constant(resumed.to_skip))
            resumed.to_skip = 0
        done = min(count, resumed.to_replay)
        resumed.to_replay -= done
        return done

    def after(self, steps: int) -> None:
        """Notes a call that ran so many steps; saves if it is time.

        Raises:
            SystemExit: SIGTERM came, and the training is saved.
        """
        self._position.step += steps
        self._position.in_epoch += steps
        if self._workers.any(self._sigterm.received):
            self._save()
            self._workers.any(True)  # no worker ends, or names the step, before the chief has written the file
            self._sigterm.end(self.in_words())
        if self._every != "epoch" and self.step // self._every > (self.step - steps) // self._every:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Moves the position to the next epoch. It must be called before other callbacks change the weights."""
        self._position.epoch, self._position.in_epoch = epoch + 1, 0
        self._ended_an_epoch = True
        averaged = averaged_variables(self._model)
        self._last_step = read_state(self._model, averaged) if averaged else {}

    def before_averages(self) -> None:
        """Notes the weights as callbacks left them, before Keras writes their averages into them (`use_ema`)."""
        now = read_state(self._model, averaged_variables(self._model)) if self._last_step else {}
        if not self._are_swapped(now):
            self._last_step = now

    def end(self) -> None:
        """Saves the training as its last step left it, and adds the earlier epochs to Keras' history."""
        # An epoch may end without a step: a training was stopped after its last step, before the epoch's end was saved.
        if self.step > self._resumed.step or self._ended_an_epoch:
            self._ended = self._save(stopped_early=bool(self._model.stop_training), averages_are_written=True)
        history = self._model.history
        history.history, history.epoch = self._whole_history()

    def finish(self) -> None:
        """Adds the state that `fit` ended with to the last checkpoint. A finished training gets that state back."""
        if self._resumed.finished is not None:
            arrays, generators = self._resumed.finished
            self._check_masks(arrays)
            write_state(self._model, arrays)
            write_random(generators)
        elif self._ended is not None:
            trained, meta = self._ended
            now, generators = gather_state(read_state(self._model), self._workers.strategy), read_random()
            changed = {FINISHED + name: value for name, value in now.items() if not _same(value, trained[name])}
            if (changed or generators != meta["random"]) and self._workers.is_chief:
                self._store.save(self.step, trained | changed, meta | {"finished": {"random": generators}})

    def _check_masks(self, finished: Mapping[str, np.ndarray]) -> None:
        """Raises ArtifactError if a pruning schedule has pruned more than the training that is finished."""
        now = gather_state(read_state(self._model), self._workers.strategy)
        masks = [name for name, array in now.items() if name.startswith("constraint/") and array.dtype == bool]
        other = [name for name in masks if not _same(now[name], finished[name])]
        if other:
            kept = [np.concatenate([arrays[name].ravel() for name in other]).mean() for arrays in (finished, now)]
            raise ArtifactError(
                f"A finished training keeps the masks that it ended with. Received: {1 - kept[1]:.1%} zeros in "
                f"{len(other)} masks, which have {1 - kept[0]:.1%} in {self._store.directory}. Raise epochs to prune "
                "further, set the target_sparsity as it was, or set another checkpoint_dir to train anew."
            )

    def in_words(self) -> str:
        """Returns what is saved: the step that is reached, and the directory. It is the same on all workers."""
        return f"step {self.step} in {self._store.directory}" if self.step else "nothing"

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
        self._saved_step = self.step
        history, epochs = self._whole_history()
        meta = {
            "epoch": self._position.epoch,
            "in_epoch": self._position.in_epoch,
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
            self._store.save(self.step, arrays, meta)
        return arrays, meta

    def _read_as_of_last_step(self, averages_are_written: bool) -> dict[str, np.ndarray]:
        """Returns the state with the weights that training resumes from.

        With `use_ema`, Keras writes the averages into the weights when `fit` ends, and SwapEMAWeights exchanges the two
        at the end of each epoch. After such an exchange, the averages differ from those of the last step. Other changes
        that callbacks make to weights at the end of an epoch are saved.
        """
        state = read_state(self._model)
        swapped = self._position.in_epoch == 0 and self._are_swapped(state)
        return state | self._last_step if averages_are_written or swapped else state

    def _are_swapped(self, state: Mapping[str, np.ndarray]) -> bool:
        averages = (name for name in self._last_step if name.startswith("optimizer/"))
        return any(not _same(state[name], self._last_step[name]) for name in averages)

    def _whole_history(self) -> tuple[dict[str, list[float]], list[int]]:
        """Returns what Keras logged before this fit and in it."""
        new, old = self._model.history, self._resumed
        logged = {} if new is None else new.history
        names = [*old.history, *(name for name in logged if name not in old.history)]
        history = {name: [*old.history.get(name, []), *map(float, logged.get(name, []))] for name in names}
        return history, [*old.epochs, *([] if new is None else new.epoch)]


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays of one shape and dtype hold the same bits."""
    return bool(one.tobytes() == other.tobytes())


def _skip(iterator: Any, count: tf.Tensor) -> None:
    """Draws so many batches from an iterator and drops them."""

    def one_more(iterator: Any, done: tf.Tensor) -> tf.Tensor:
        first = keras.tree.flatten(iterator.get_next())[0]
        drawn = first.values[0] if isinstance(first, tf.distribute.DistributedValues) else first
        with tf.control_dependencies([drawn]):
            return tf.identity(done + 1)

    @tf.function
    def skip(iterator: Any) -> None:
        tf.while_loop(
            lambda done: done < count, lambda done: one_more(iterator, done), (tf.constant(0),), parallel_iterations=1
        )

    skip(iterator)
