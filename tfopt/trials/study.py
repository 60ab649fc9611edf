"""The study of a search: optuna proposes the trials and keeps them in a file, from which a stopped search goes on.

Each proposal has a seed of its own, made of the seed of the study and the number of the trial. So a search that goes on
proposes what it would have proposed, and the first trials of a seed are always the same: until that many have ended,
optuna's sampler draws at random, and only then it learns from what was measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import optional_package
from tfopt.errors import ArtifactError

STARTUP = 16


class Study:
    """A study of optuna in a file. `optuna-dashboard sqlite:///FILE` shows it.

    Args:
        file: The file, an SQLite database. An earlier study in it goes on.
        name: The name of the study.
        figures: The names of what a trial measures. Less is better.
        space: optuna's distributions by the name of the setting.
        seed: The seed of the proposals.
    Raises:
        ArtifactError: The file is damaged, or cannot be written.
    Example:
        >>> import tempfile
        >>> optuna = optional_package("optuna", "compress", "A search")
        >>> space = {"share": optuna.distributions.FloatDistribution(0.1, 1.0)}
        >>> study = Study(Path(tempfile.mkdtemp(), "study.db"), "mine", ["loss"], space, seed=0)
        >>> first = study.propose(2)
        >>> study.finish(0, [0.5])
        >>> sorted(study.open), first == study.propose(2)
        ([1], True)

    Reference:
        Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", KDD 2019, arXiv:1907.10902.
    """

    def __init__(self, file: Path, name: str, figures: Sequence[str], space: Mapping[str, Any], seed: int) -> None:
        self._optuna = optional_package("optuna", "compress", "A search")
        self._space, self._seed, self._file = dict(space), seed, file
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        with warnings.catch_warnings(), self._readable():
            warnings.simplefilter("ignore")  # the names are experimental in optuna
            self._study = self._optuna.create_study(
                storage=f"sqlite:///{file.absolute()}",
                study_name=name,
                directions=["minimize"] * len(figures),
                load_if_exists=True,
            )
            self._study.set_metric_names(list(figures))

    def propose(self, count: int) -> dict[int, dict[str, Any]]:
        """Returns the settings of the trials by their numbers, after proposing new ones up to `count` trials."""
        with self._readable():
            for number in range(len(self._study.get_trials(deepcopy=False)), count):
                seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
                self._add(partial(self._optuna.samplers.TPESampler, seed=seed, n_startup_trials=STARTUP))
            trials = self._study.get_trials(deepcopy=False)
        return {each.number: dict(each.params) for each in trials}

    def put(self, settings: Mapping[str, Any]) -> int:
        """Adds a trial with given settings, from which the sampler learns too, and returns its number."""
        with self._readable():
            samplers = self._optuna.samplers
            return self._add(lambda: samplers.PartialFixedSampler(dict(settings), samplers.RandomSampler(seed=0)))

    def _add(self, make_sampler: Callable[[], Any]) -> int:
        """Adds a trial, and returns its number. It is drawn in memory, so the file gets it whole or not at all."""
        optuna, earlier = self._optuna, self._study.get_trials(deepcopy=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental settings
            memory = optuna.create_study(directions=self._study.directions, sampler=make_sampler())
            memory.add_trials(earlier)
            drawn = memory.ask(self._space)
        running = optuna.trial.TrialState.RUNNING
        trial = optuna.trial.create_trial(state=running, params=drawn.params, distributions=self._space)
        self._study.add_trial(trial)
        return len(earlier)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns what optuna, SQLAlchemy and SQLite raise for a damaged file into one error that names it."""
        try:
            yield
        except Exception as error:  # of three packages, from KeyError to OperationalError
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ArtifactError(
                f"A study must be a file that tfopt wrote, whole and writable. Received: {self._file} ({reason}). Make "
                "room if the disk is full, and let no two processes search in one directory; otherwise remove the "
                "file: the search begins anew, and reads the outcomes of the trials that it tries again."
            ) from error

    @property
    def open(self) -> set[int]:
        """The numbers of the trials that have not ended."""
        return {each.number for each in self._study.get_trials(deepcopy=False) if not each.state.is_finished()}

    def finish(self, number: int, values: Sequence[float] | None) -> None:
        """Records what a trial measured; None if it failed."""
        state = self._optuna.trial.TrialState.FAIL if values is None else None
        with self._readable():
            self._study.tell(number, None if values is None else list(values), state=state)

    def leave_out(self, number: int) -> None:
        """Records that a trial is not worth its time, or not all of it; optuna calls it pruned."""
        with self._readable():
            self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)
