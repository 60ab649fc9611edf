"""Saves a training while it runs, and resumes it: the weights are the same as without the interruption.

`Resume` belongs to a compiled model. It holds the settings and the directory. `FitCheckpoints` belongs to one `fit`; it
holds the position in the data, and saves and restores the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.trainer import set_initial_epoch
from tfopt.errors import ArtifactError, ConfigError
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.checkpointing.lock import only_training
from tfopt.training.checkpointing.sigterm import Sigterm, sigterm_requests
from tfopt.training.checkpointing.store import CheckpointStore, check_mode
from tfopt.training.checkpointing.workers import Workers

# Restores the newest checkpoint. It takes Keras' `params` of a callback ("epochs" and, if it is known, "steps"), then
# `steps_per_epoch` and the number of batches.
OpenCheckpoints = Callable[[Mapping[str, Any], int | None, int | None], FitCheckpoints]


class Resume:
    """The checkpoints of a model that is trained by one or several calls of `fit`.

    Args:
        directory: Where the checkpoints are. Several workers need storage that all of them share.
        every: The number of steps between two checkpoints, or "epoch".
        keep: How many checkpoints stay.
        mode: "auto" resumes from a checkpoint if there is one; True requires one; False requires that there is none.
        strategy: The strategy that the model trains under.
    Raises:
        ConfigError: The directory holds checkpoints with False, or none with True.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int | Literal["epoch"],
        keep: int,
        mode: bool | Literal["auto"],
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._store = CheckpointStore(Path(directory), keep)
        self._every = every
        self._workers = Workers(strategy)
        check_mode(directory, mode)

    def last_checkpoint(self) -> str | None:
        """Returns the newest checkpoint in words."""
        return self._store.newest_in_words()

    @contextlib.contextmanager
    def around_fit(
        self, model: keras.Model, check: Callable[[Mapping[str, np.ndarray]], None]
    ) -> Iterator[OpenCheckpoints]:
        """Locks the directory during one `fit`, and takes SIGTERM as a request to save the training.

        Args:
            model: The model that `fit` trains.
            check: Receives the arrays of each checkpoint before they are saved; it raises if they must not be.
        Returns: The function that restores the newest checkpoint. It is called when Keras' training begins.
        Raises:
            ConfigError: Another training uses the directory.
            SystemExit: SIGTERM came, and the training is saved.
        """
        opened: list[FitCheckpoints] = []
        with self._locked(), sigterm_requests() as sigterm:

            def open_checkpoints(
                params: Mapping[str, Any], steps_per_epoch: int | None, batches: int | None
            ) -> FitCheckpoints:
                opened.append(self._open(model, params, steps_per_epoch, batches, check, sigterm))
                return opened[-1]

            try:
                yield open_checkpoints
            finally:
                set_initial_epoch(model, None)  # restoring a checkpoint sets it
            if self._workers.any(sigterm.received):  # after the last step, for example during the last evaluation
                sigterm.end(opened[-1].in_words() if opened else "nothing")

    def _open(
        self,
        model: keras.Model,
        params: Mapping[str, Any],
        steps_per_epoch: int | None,
        batches: int | None,
        check: Callable[[Mapping[str, np.ndarray]], None],
        sigterm: Sigterm,
    ) -> FitCheckpoints:
        checkpoint = self._store.load_newest()
        step = -1 if checkpoint is None else checkpoint.step
        if not self._workers.agree(step):
            raise ArtifactError(
                "All workers must find the same checkpoints. Received: checkpoint_dir="
                f"{self._store.directory}, whose newest is of step {step} here and of another step elsewhere. "
                "Put checkpoint_dir on storage that all workers share."
            )
        fit = FitCheckpoints(
            model, self._store, self._workers, sigterm, every=self._every, check=check, epoch_steps=params.get("steps")
        )
        if checkpoint is not None:
            fit.restore(checkpoint, params["epochs"], steps_per_epoch, batches)
        if not fit.has_ended:
            self._check_writable()
        return fit

    def _check_writable(self) -> None:
        """Raises ConfigError on every worker if the chief, which writes, will not be able to save."""
        refused: ConfigError | None = None
        if self._workers.is_chief:
            try:
                self._store.check_writable()
            except ConfigError as error:
                refused = error
        if self._workers.any(refused is not None):
            raise refused or ConfigError(
                "checkpoint_dir must be a directory that the chief can write. Received: checkpoint_dir="
                f"{self._store.directory}; the chief's message says why not."
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other trainings out. The chief writes, so it locks; if it cannot, every worker raises an error."""
        with contextlib.ExitStack() as lock:
            refused: ConfigError | None = None
            if self._workers.is_chief:
                try:
                    lock.enter_context(only_training(self._store.directory))
                except ConfigError as error:
                    refused = error
            if self._workers.any(refused is not None):
                raise refused or ConfigError(
                    "checkpoint_dir must be used by one training at a time. Received: checkpoint_dir="
                    f"{self._store.directory}, which another training uses; the chief's message names it."
                )
            yield
