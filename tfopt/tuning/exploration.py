"""Which settings are tried, in which order: each change alone, then all together that were faster, then as optuna says.

Each trial has a number, from which the seed of its proposal is made. The first numbers belong to the changes alone and
to all together, also where these need no trial. So a seed proposes the same, whatever was measured before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

from tfopt.atomic.checked_json import read_as_written, with_checksum
from tfopt.atomic.files import write_text
from tfopt.data.arguments import optional_package
from tfopt.trials.study import Study
from tfopt.tuning.space import Space
from tfopt.tuning.trial import STEP
from tfopt.tuning.tune_report import TuneTrial

STUDY, TRIAL = "study.db", "trial.json"
MOST_DOUBLES = 20  # proposals in a row that were tried before: then all is tried
_TRIAL = pydantic.TypeAdapter(TuneTrial)
Measure = Callable[[int, dict[str, Any], float], TuneTrial]


class Exploration:
    """The trials of a search. With the directory of an earlier one, it goes on.

    Args:
        space: The settings.
        seed: The seed of the proposals.
        folder: Directory of the search.
        measure: Tries changes, given the number of the trial, the changes, and the speedup below which a trial may end
            early.
        why_end: Returns why no trial may begin; nothing if one may.
    """

    def __init__(
        self, space: Space, seed: int, folder: Path, measure: Measure, why_end: Callable[[], str] = lambda: ""
    ) -> None:
        optuna: Any = optional_package("optuna", "compress", "A search")
        choices = {name: optuna.distributions.CategoricalDistribution(each) for name, each in space.choices.items()}
        self._study = Study(folder / STUDY, "tuning", ["time"], choices, seed)
        self._space, self._folder, self._measure, self._why_end = space, folder, measure, why_end
        self.trials: dict[int, TuneTrial] = {}

    @property
    def best(self) -> TuneTrial | None:
        """The trial with the largest lower end, if that is faster than the start."""
        return max((each for each in self.trials.values() if is_faster(each)), key=least, default=None)

    def run(self) -> str:
        """Tries settings until there is a reason to end, and returns it."""
        proposed = self._study.propose(0)
        for number in sorted(proposed.keys() - self._study.open):  # of an earlier call
            self._take(number)
        singles, doubles, number = self._space.singles(), 0, 0
        while not (reason := self._why_end()):
            if doubles >= MOST_DOUBLES:
                return "all settings that were proposed have been tried"
            alone = number < len(singles)
            if number not in proposed:
                if number <= len(singles):
                    self._study.put(self._space.full(singles[number] if alone else self._together()))
                proposed = self._study.propose(number + 1)
            if number in self._study.open:
                new = self._try(
                    number, self._space.changes(proposed[number]), 1.0 if alone else max(1.0, least(self.best))
                )
                if new is None:
                    return self._why_end() or "time"
                doubles = 0 if new else doubles + 1
            number += 1
        return reason

    def _together(self) -> dict[str, Any]:
        """Returns the fastest value of each setting whose change alone was faster."""
        found: dict[str, Any] = {}
        for each in sorted(filter(is_faster, self.trials.values()), key=least):
            own = {name: value for name, value in each.changes.items() if name != STEP or len(each.changes) == 1}
            found |= own if len(own) == 1 else {}
        return self._space.changes(found)

    def _try(self, number: int, changes: dict[str, Any], bar: float) -> bool | None:
        """Tries settings, unless they were tried before. Returns whether they were new; None if time has ended it."""
        same = next((each for each in self.trials.values() if each.changes == changes), None)
        if same is None and changes:
            file = self._file(number)
            if not os.path.lexists(file):  # else the process was stopped before optuna was told
                trial = self._measure(number, changes, bar)
                if trial.state == "cut":
                    return None  # a later call tries it again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(with_checksum(trial.to_dict())))
            self._take(number)
        told = self.trials.get(number, same)
        if told is None:  # the start itself
            self._study.finish(number, [1.0])
        else:  # the time that it needs, as a share of that of the start
            self._study.finish(number, None if told.speedup is None else [1 / least(told)])
        return number in self.trials

    def _take(self, number: int) -> None:
        file = self._file(number)
        if os.path.lexists(file):
            remedy = f"Remove {self._folder}: the search then begins anew."
            self.trials[number] = read_as_written(file, _TRIAL, "A trial", remedy)

    def _file(self, number: int) -> Path:
        return self._folder / trial_name(number) / TRIAL


def trial_name(number: int) -> str:
    """Returns the directory of a trial within that of the search.

    Example:
        >>> trial_name(7)
        'trials/007'
    """
    return f"trials/{number:03d}"


def least(trial: TuneTrial | None) -> float:
    return 0.0 if trial is None or trial.speedup is None else trial.speedup.least


def is_faster(trial: TuneTrial) -> bool:
    """Returns whether a trial is faster than the start, by the lower end of the interval."""
    return trial.state == "measured" and least(trial) > 1
