"""Saves a training while it runs, and resumes it: the weights are the same as without the interruption.

`Resume` belongs to a compiled model. It holds the settings and the directory. `FitCheckpoints` belongs to one `fit`; it
holds the position in the data, and saves and restores the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.trainer import set_initial_epoch
from tfopt.errors import ConfigError
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.checkpointing.lock import only_training
from tfopt.training.checkpointing.store import CheckpointStore, check_mode
from tfopt.training.checkpointing.workers import Workers, sigterm_requests
from tfopt.training.config import TrainingConfig


class Resume:
    """The checkpoints of a model that is trained by one or several calls of `fit`.

    Args:
        config: The settings, with a directory. Several workers need storage that all of them share.
        strategy: The strategy that the model trains under.
    Raises:
        ConfigError: The directory holds checkpoints with resume=False, or none with resume=True.
    """

    def __init__(self, config: TrainingConfig, strategy: tf.distribute.Strategy) -> None:
        assert config.checkpoint_dir is not None
        self._store = CheckpointStore(Path(config.checkpoint_dir), config.keep_checkpoints)
        self._every = config.checkpoint_every
        self._workers = Workers(strategy)
        check_mode(config.checkpoint_dir, config.resume)

    def last_checkpoint(self) -> str | None:
        """Returns the newest checkpoint in words."""
        return self._store.newest_in_words()

    @contextlib.contextmanager
    def around_fit(
        self, model: keras.Model, check: Callable[[Mapping[str, np.ndarray]], None]
    ) -> Iterator[FitCheckpoints]:
        """Locks the directory during one `fit`, and takes SIGTERM as a request to save the training.

        Args:
            model: The model that `fit` trains.
            check: Receives the arrays of each checkpoint before they are saved; it raises if they must not be.
        Raises:
            ConfigError: Another training uses the directory.
            SystemExit: SIGTERM came, and the training is saved.
        """
        with self._locked(), sigterm_requests() as sigterm:
            fit = FitCheckpoints(model, self._store, self._workers, sigterm, every=self._every, check=check)
            try:
                yield fit
            finally:
                set_initial_epoch(model, None)  # restoring a checkpoint sets it
            if self._workers.any(sigterm.received):  # after the last step, for example during the last evaluation
                sigterm.end(fit.in_words())

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
