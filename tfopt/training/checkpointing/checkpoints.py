"""Saves a training while it runs, and resumes it: the weights are the same as without the interruption.

`Checkpoints` belongs to a compiled model. It holds the settings and the directory. `FitCheckpoints` belongs to one
`fit`; it holds the position in the data, and saves and restores the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.trainer import set_initial_epoch
from tfopt.training.checkpointing.fit_checkpoints import FitCheckpoints
from tfopt.training.checkpointing.lock import only_training
from tfopt.training.checkpointing.store import CheckpointStore, check_mode
from tfopt.training.checkpointing.workers import Workers, sigterm_requests
from tfopt.training.config import TrainingConfig


class Checkpoints:
    """The checkpoints of a model that is trained by one or several calls of `fit` under a strategy.

    Several workers need a directory on storage that all of them share.

    Raises:
        ConfigError: The directory holds checkpoints with resume=False, or none with resume=True.
    """

    def __init__(self, config: TrainingConfig, strategy: tf.distribute.Strategy) -> None:
        assert config.checkpoint_dir is not None
        self._store = CheckpointStore(Path(config.checkpoint_dir), config.keep_checkpoints)
        self._every = config.checkpoint_every
        self._workers = Workers(strategy)
        check_mode(config.checkpoint_dir, config.resume)

    def newest(self) -> str | None:
        """Returns the newest checkpoint in words, or None where there is none."""
        steps = self._store.steps()
        return f"step {steps[-1]} in {self._store.directory}" if steps else None

    @contextlib.contextmanager
    def around_fit(
        self, model: keras.Model, check: Callable[[Mapping[str, np.ndarray]], None]
    ) -> Iterator[FitCheckpoints]:
        """Locks the directory during one `fit`, and takes SIGTERM as a request to save the training.

        The check receives the arrays of each checkpoint before they are saved, and raises if they must not be.

        Raises:
            ConfigError: Another training uses the directory.
            SystemExit: SIGTERM came, and the training is saved.
        """
        with contextlib.ExitStack() as scopes:
            self._workers.on_chief(
                lambda: scopes.enter_context(only_training(self._store.directory)),
                "checkpoint_dir must be used by one training at a time. Received: checkpoint_dir="
                f"{self._store.directory}, which another training uses; the chief's message names it.",
            )
            sigterm = scopes.enter_context(sigterm_requests())
            fit = FitCheckpoints(model, self._store, self._workers, sigterm, every=self._every, check=check)
            try:
                yield fit
            finally:
                set_initial_epoch(model, None)  # restoring a checkpoint sets it
            if self._workers.any(sigterm.received):  # after the last step, for example during the last evaluation
                sigterm.end(fit.in_words())
