"""`tfopt.tune`: the speed settings of a training, found by measurement on this machine.

First each setting is changed alone, then all together that were faster; after that, optuna proposes (exploration.py). A
trial trains beside the start, in turns with it, each in a process of its own (sides.py), and counts by the lower end of
the interval of the ratio. At the end the best settings are left out one by one, for what each contributes, and what is
left is measured once more against the start. If that is not faster, the start stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, json_in, json_with, write_own
from tfopt.atomic.scratch import scratch_directory
from tfopt.data.arguments import optional_package
from tfopt.errors import ConfigError, TfoptError, TrainingError, warn
from tfopt.hardware import detect
from tfopt.recipe import Recipe
from tfopt.recipe.kept import keep
from tfopt.settings.validation import check_type
from tfopt.timing import Estimate, shown_ratio
from tfopt.training import TrainingConfig
from tfopt.trials.process import raise_own
from tfopt.tuning.comparison import LOSS_STEPS
from tfopt.tuning.config import TuneConfig
from tfopt.tuning.exploration import Exploration, trial_name
from tfopt.tuning.facts import Facts
from tfopt.tuning.script import command, lines
from tfopt.tuning.sides import Sides
from tfopt.tuning.space import space_of, tables_of
from tfopt.tuning.trial import STEP
from tfopt.tuning.tune_report import Contribution, TuneReport, TuneTrial
from tfopt.tuning.workload import RECIPE, Workload, of_script, recipe_or_model, workload_of

MARK, REPORT = "tuning.json", "tune.json"
LAST_TRIALS = 1.5  # the last comparison has twice the turns of a trial, but starts as fast
# What a later call with the same directory may change.
FREE: dict[str, Any] = {"minutes": 1.0, "max_trials": None, "trial_limit_s": 1.0}
OnStep = Callable[[str], object]


def tune(
    model_or_recipe: keras.Model | Recipe | str | Path,
    data: Any = None,
    config: TuneConfig | None = None,
    *,
    training: TrainingConfig | None = None,
    directory: str | Path | None = None,
    on_step: OnStep = lambda words: None,
) -> TuneReport:
    """Finds faster settings of a training by measurement on this machine.

    It searches the settings of which this machine and this training offer a choice: precision, XLA, strategy, the place
    of the augmentation, the cache, steps per execution, micro-batches, prefetch; with `other_batches` also larger
    batches. Each trial trains in a process of its own, in turns with the settings of the start. One that crashes, hangs
    or takes too much memory is recorded, and the search goes on; one that does not reach the loss of the start after
    the same steps does not count. The result was measured to be faster than the start in a last comparison; if none
    was, the start stays.

    Called again with the same directory after a stop, the search goes on. Neither the model nor the global random
    generators change.

    Args:
        model_or_recipe: A compiled Keras model; or a recipe, its name or its .toml file.
        data: The examples of a model: `tfopt.data.Examples`, a tuple of arrays, or a tf.data.Dataset.
        config: The time, and what may change. None means TuneConfig().
        training: Settings of a model's training. None means those of the plan that `tfopt.compile` was given or, if
            Keras compiled the model, Keras' own step.
        directory: Directory for the trials, their logs and tune.json. None keeps nothing.
        on_step: Is called with a few words when a step begins.
    Returns: A report. `report.to_toml()` has the settings.
    Raises:
        ConfigError: A setting is wrong, or the directory is of another search.
        UnsupportedModelError: The model is not compiled.
        TrainingError: The training fails as it is. The message has the cause.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> tune(model)
        Traceback (most recent call last):
        ...
        tfopt.errors.UnsupportedModelError: model must be compiled, because the trials train it. ...
    """
    if training is not None and not isinstance(model_or_recipe, keras.Model):
        raise ConfigError("training must be left out with a recipe, which has its own. Change recipe.training.")
    shapes = [list(each.shape) for each in getattr(model_or_recipe, "weights", ())]
    config = TuneConfig() if config is None else config

    def write(folder: Path) -> Workload:
        on_step("writing what the trials train on")
        return workload_of(recipe_or_model(model_or_recipe), data, folder, training)

    return _search(write, config, directory, on_step, [shapes])


def tune_script(
    path: str,
    words: Sequence[str],
    config: TuneConfig,
    *,
    directory: str | Path | None = None,
    on_step: OnStep = lambda words: None,
) -> TuneReport:
    """As `tune`, for a script that knows nothing of tfopt.

    Each trial runs the script until its first fit, which trains as `tfopt accelerate` lets it, in turns with the script
    as it is. The fit keeps its data and its progress bar, not its callbacks. `report.command` runs the script with the
    settings that were found.
    """
    check_type("config", config, TuneConfig)
    if config.other_batches:
        raise ConfigError(
            "other_batches must be left out with a script, which sets its own batch. Received: other_batches=True. "
            "tfopt tune --only batch-size finds a batch for it."
        )
    return _search(lambda folder: of_script(path, words, folder), config, directory, on_step)


def _search(
    write: Callable[[Path], Workload],
    config: TuneConfig,
    directory: str | Path | None,
    on_step: OnStep,
    identity: Sequence[Any] = (),
) -> TuneReport:
    """Writes what is tuned into the directory of the search, and searches."""
    check_type("config", config, TuneConfig)
    optional_package("optuna", "compress", "A search")
    start = time.monotonic()
    with _folder(directory) as folder:
        workload = write(folder)
        same = [dataclasses.replace(config, **FREE).__dict__, dataclasses.replace(workload, folder=""), *identity]
        _mark(folder, same)
        return _Search(workload, config, folder, start, on_step).run()


@contextlib.contextmanager
def _folder(directory: str | Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as scopes:
        if directory is None:
            yield scopes.enter_context(scratch_directory())
            return
        folder = Path(directory)
        scopes.enter_context(exclusive(folder))
        known = (folder / MARK).is_file() or (folder / RECIPE).is_file()  # the latter, if it was stopped before that
        if any(folder.iterdir()) and not known:
            raise ConfigError(
                f"directory must be new, or of an earlier search. Received: {str(folder)!r}, which holds something "
                "else. Choose another directory."
            )
        check_replaceable(folder / REPORT, TuneReport.is_own)
        yield folder


def _mark(folder: Path, identity: Any) -> None:
    """Writes what the search is of; of an earlier call it compares it."""
    recipe = folder / RECIPE  # a script has none
    written = recipe.read_bytes() if recipe.is_file() else b""
    own = hashlib.sha256(written + repr(identity).encode()).hexdigest()
    mark = folder / MARK
    check_replaceable(mark, json_with("tuning"))
    found = json_in(mark.read_bytes()) if mark.is_file() else None  # None too if it is empty
    if found is not None and found["tuning"] != own:
        raise ConfigError(
            f"directory must be new, or of a search of the same training and settings. Received: {str(folder)!r}, "
            "which has another search. Choose another directory, or remove it."
        )
    write_text(mark, json.dumps({"tuning": own}))


class _Search:
    """A search in progress."""

    def __init__(self, workload: Workload, config: TuneConfig, folder: Path, start: float, on_step: OnStep) -> None:
        self.workload, self.config, self.folder = workload, config, folder
        self.start, self.on_step = start, on_step
        self.sides = Sides(workload, config, folder)
        self.recipe = None if workload.kind == "script" else Recipe.from_toml(folder / RECIPE, allow_code=True)
        self.training = None if self.recipe is None else self.recipe.training

    @property
    def left_s(self) -> float:
        return 60 * self.config.minutes - (time.monotonic() - self.start)

    def run(self) -> TuneReport:
        self.on_step("training as it is")
        self.facts, examples_per_s, self.longest_s = self._look()
        self.sides.loss_steps = math.ceil(LOSS_STEPS / self.facts.at_once) * self.facts.at_once
        of_model, larger = self.workload.kind == "model", self.config.other_batches
        self.space = space_of(self.facts, detect(), of_model=of_model, other_batches=larger)
        self.exploration = Exploration(self.space, self.config.seed, self.folder, self._measure, self._why_end)
        ended = self.exploration.run() if self.space.choices else "there is nothing to choose"
        best, trials = self.exploration.best, self.exploration.trials
        contributions, changes = self._contributions({} if best is None else best.changes)
        speedup, unconfirmed = self._confirmed(changes)
        if speedup is None:
            changes, contributions = {}, tuple(dataclasses.replace(each, kept=False) for each in contributions)
        report = TuneReport(
            name=self.workload.title,
            kind=self.workload.kind,
            examples_per_s=examples_per_s,
            changes=changes,
            settings={name: each for name, each in self._tables(changes).items() if name != STEP},
            speedup=speedup,
            contributions=contributions,
            trials=tuple(trials[number] for number in sorted(trials)),
            left_out=self.space.left_out,
            ended_by=ended,
            seconds=time.monotonic() - self.start,
            command=command(changes, self.workload.name, self.workload.words) if self.training is None else "",
            lines=lines(changes, self.facts) if self.training is None else (),
            unconfirmed=unconfirmed,
        )
        write_own(self.folder / REPORT, report.to_json(), TuneReport.is_own)
        if self.workload.kind == "recipe" and self.recipe is not None and (file := kept_for_later(self.recipe, report)):
            report = dataclasses.replace(report, kept=file)
            write_own(self.folder / REPORT, report.to_json(), TuneReport.is_own)
        return report

    def _look(self) -> tuple[Facts, float, float]:
        """Trains the start alone. Returns its facts, its speed, and the seconds that it took.

        Raises:
            ConfigError: The minutes are too few for it.
            TrainingError: It fails.
        """
        limit = min(self.config.trial_limit_s, self.left_s)
        outcome = self.sides.alone(limit)
        if outcome.failure and outcome.seconds >= limit:
            raise ConfigError(
                "minutes and trial_limit_s must be enough to train as it is for some steps. Received: "
                f"minutes={self.config.minutes:g}, trial_limit_s={self.config.trial_limit_s:g}; {outcome.failure}. "
                "Raise them, or shorten the input pipeline's start."
            )
        if outcome.failure:
            raise_own(outcome.failure)
            remedy = (
                "Layers of your own need keras.saving.register_keras_serializable, and a module that another process "
                "can import."
            )
            if self.workload.kind == "script":
                remedy = "Run the script without tfopt first."
            reason = outcome.failure.rstrip(".")
            raise TrainingError(f"The training must run as it is in a process of its own. Received: {reason}. {remedy}")
        if not all(map(math.isfinite, outcome.result["losses"])):
            raise TrainingError(
                f"The training must have a finite loss as it is. Received: losses of {outcome.result['losses']}. See "
                "its learning rate and its data."
            )
        return Facts(**outcome.result["facts"]), statistics.median(outcome.result["rates"]), outcome.seconds

    def _why_end(self) -> str:
        most, best = self.config.max_trials, self.exploration.best
        if most is not None and len(self.exploration.trials) >= most:
            return f"max_trials={most}"
        each = 0 if best is None or len(best.changes) == 1 else len(best.changes)  # is left out once
        needed = self.longest_s * (1 + each + LAST_TRIALS)
        return "" if self.left_s > needed else f"minutes={self.config.minutes:g}"

    def _limit_s(self) -> float:
        """Returns the seconds for a comparison that is not the last."""
        return min(self.config.trial_limit_s, max(self.left_s - LAST_TRIALS * self.longest_s, 1.0))

    def _measure(self, number: int, changes: dict[str, Any], bar: float) -> TuneTrial:
        shown = " ".join(f"{name}={value}" for name, value in changes.items())
        self.on_step(f"trial {number}: {shown}")
        found = self.sides.compare(
            trial_name(number), {}, self._tables(changes), self._limit_s(), tolerance=self._tolerance(changes), bar=bar
        )
        if found.speedup is not None:
            self.longest_s = max(self.longest_s, found.seconds)
        return TuneTrial(number=number, changes=changes, **found.__dict__)

    def _contributions(self, best: Mapping[str, Any]) -> tuple[tuple[Contribution, ...], dict[str, Any]]:
        """Leaves each setting out of the best ones. Returns what each contributes, and the settings that do."""
        found, kept = [], dict(best)
        for setting, value in best.items() if len(best) > 1 else ():
            rest = self.space.changes({name: each for name, each in best.items() if name != setting})
            reason, speedup = "", None
            if rest == best:
                reason = "the other settings need it"
            elif self.left_s < (1 + LAST_TRIALS) * self.longest_s:
                reason = "no time was left"
            else:
                self.on_step(f"leaving out {setting}")
                sides = self._tables(rest), self._tables(best)
                seen = self.sides.compare(f"without_{setting}", *sides, self._limit_s())
                reason, speedup = seen.reason, seen.speedup
            stays = speedup is None or speedup.median > 1
            if not stays:
                del kept[setting]
            start = self.space.choices[setting][0]
            found.append(
                Contribution(setting=setting, value=value, start=start, speedup=speedup, kept=stays, reason=reason)
            )
        return tuple(found), self.space.changes(kept)

    def _confirmed(self, changes: dict[str, Any]) -> tuple[Estimate | None, str]:
        """Returns how much faster than the start settings are, in a comparison of their own; or what it saw instead."""
        if not changes:
            return None, ""
        self.on_step("measuring the result against the start once more")
        found = self.sides.compare(
            "confirmation",
            {},
            self._tables(changes),
            min(self.config.trial_limit_s, max(self.left_s, self.longest_s)),
            turns=2 * self.config.turns,
            tolerance=self._tolerance(changes),
        )
        if found.speedup is None:
            return None, found.reason
        return (found.speedup, "") if found.speedup.least > 1 else (None, f"{shown_ratio(found.speedup)} of the start")

    def _tolerance(self, changes: Mapping[str, Any]) -> float | None:
        """Returns how far the losses may be apart. Those of different batches say nothing."""
        return None if "global_batch_size" in changes else self.config.loss_tolerance

    def _tables(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if self.training is None:  # a script has no tables
            return dict(changes)
        return tables_of(changes, self.training, self.facts) if changes else {}


def kept_for_later(recipe: Recipe, report: TuneReport) -> str:
    """Keeps a result for later runs of the recipe. Returns the file; empty if nothing is kept."""
    if report.speedup is None:
        return ""
    try:
        return str(keep(recipe, report.settings, report.speedup) or "")
    except (TfoptError, OSError) as error:  # the result of minutes is not lost for it
        warn(f"The result is not kept for later runs. {error}")
        return ""
