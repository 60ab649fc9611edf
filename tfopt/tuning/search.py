"""`tfopt.tune`: the speed settings of a training, found by measurement on this machine.

First each setting is changed alone, then all together that were faster; after that, optuna proposes. A trial trains
beside the start, in turns with it, each in a process of its own (comparison.py), and counts by the lower end of the
interval of the ratio. At the end the best settings are left out one by one, for what each contributes, and what is left
is measured once more against the start. If that is not faster, the start stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import pydantic

from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, json_in, json_with, write_own
from tfopt.data.arguments import optional_package
from tfopt.errors import ConfigError, TrainingError
from tfopt.hardware import detect
from tfopt.recipe import Recipe
from tfopt.settings.validation import check_type
from tfopt.timing import Estimate
from tfopt.training import TrainingConfig
from tfopt.trials.process import Outcome, call_apart
from tfopt.trials.study import Study
from tfopt.tuning.comparison import Side, begin_turns, ratio
from tfopt.tuning.config import TuneConfig
from tfopt.tuning.facts import Facts
from tfopt.tuning.limit import find_limit
from tfopt.tuning.script_flags import command_of, lines_of
from tfopt.tuning.space import space_of, tables_of
from tfopt.tuning.trial import STEP
from tfopt.tuning.tune_report import Contribution, TuneReport, TuneTrial
from tfopt.tuning.workload import MODEL, RECIPE, Workload, of_script, workload_of

MARK, STUDY, TRIAL, REPORT = "tuning.json", "study.db", "trial.json", "tune.json"
COMPARE = {"script": "tfopt.tuning.script:compare_script"}
LOSS_STEPS = 10  # of each of the two epochs whose losses are compared
MOST_DOUBLES = 20  # proposals in a row that were tried before: then all is tried
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

    def workload(folder: Path) -> Workload:
        on_step("writing what the trials train on")
        return workload_of(model_or_recipe, data, folder, training)

    return _tune(workload, config, directory, on_step)


def tune_script(
    path: str,
    words: list[str],
    config: TuneConfig | None = None,
    *,
    directory: str | Path | None = None,
    on_step: OnStep = lambda words: None,
) -> TuneReport:
    """As `tune`, for the first fit of a script that knows nothing of tfopt. The script runs until that fit, twice in
    each trial; the callbacks of the fit are left out, but a callback that acts on each batch has another in its place.
    """
    return _tune(lambda folder: of_script(path, words, folder), config, directory, on_step)


def _tune(
    make: Callable[[Path], Workload], config: TuneConfig | None, directory: str | Path | None, on_step: OnStep
) -> TuneReport:
    config = TuneConfig() if config is None else config
    check_type("config", config, TuneConfig)
    optional_package("optuna", "compress", "A search")
    start = time.monotonic()
    with _folder(directory) as folder:
        workload = make(folder)
        _mark(folder, workload, config)
        return _Search(workload, config, folder, start, on_step).run()


@contextlib.contextmanager
def _folder(directory: str | Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as scopes:
        if directory is None:
            yield Path(scopes.enter_context(tempfile.TemporaryDirectory(prefix="tfopt_tune_")))
            return
        folder = Path(directory)
        scopes.enter_context(exclusive(folder))
        known = (folder / MARK).is_file() or (folder / RECIPE).is_file()  # the latter, if it was stopped before
        if any(folder.iterdir()) and not known:
            raise ConfigError(
                f"directory must be new, or of an earlier search. Received: {str(folder)!r}, which holds something "
                "else. Choose another directory."
            )
        check_replaceable(folder / REPORT, TuneReport.is_own)
        yield folder


def _mark(folder: Path, workload: Workload, config: TuneConfig) -> None:
    """Writes what the search is of; of an earlier call it compares it."""
    digest = hashlib.sha256(repr((dataclasses.replace(config, **FREE), workload.name, workload.words)).encode())
    for name in (RECIPE, MODEL):
        if (folder / name).is_file() and name == RECIPE:
            digest.update((folder / name).read_bytes())
    if Path(workload.name).is_file():
        digest.update(Path(workload.name).read_bytes())
    mark, own = folder / MARK, digest.hexdigest()
    check_replaceable(mark, json_with("tuning"))
    if mark.is_file() and json_in(mark.read_bytes())["tuning"] != own:
        raise ConfigError(
            f"directory must be new, or of a search of the same training and settings. Received: {str(folder)!r}, "
            "which has another search. Choose another directory, or remove it."
        )
    write_text(mark, json.dumps({"tuning": own}))


class _Search:
    """A search in progress."""

    def __init__(self, workload: Workload, config: TuneConfig, folder: Path, start: float, on_step: OnStep) -> None:
        self.workload, self.config, self.folder = workload, config, folder.resolve()
        self.start, self.on_step = start, on_step
        self.limit = find_limit(config.memory_limit_bytes, config.margin, hard=False)
        self.trials: dict[int, TuneTrial] = {}
        known = workload.kind != "script"
        self.training = Recipe.from_toml(folder / RECIPE, allow_code=True).training if known else TrainingConfig()

    @property
    def left_s(self) -> float:
        return 60 * self.config.minutes - (time.monotonic() - self.start)

    def run(self) -> TuneReport:
        self.on_step("training as it is")
        self.facts, examples_per_s, self.trial_s = self._look()
        self.space = space_of(self.facts, detect(), self.workload.kind, other_batches=self.config.other_batches)
        ended = "there is nothing to choose"
        if self.space.choices:
            self.study = self._open_study()
            ended = self._search()
        best = self._best
        contributions, changes = self._contributions({} if best is None else best.changes)
        speedup = self._confirmed(changes)
        if speedup is None:
            changes = {}
            contributions = tuple(dataclasses.replace(each, kept=False) for each in contributions)
        report = TuneReport(
            name=self.workload.name,
            kind=self.workload.kind,
            examples_per_s=examples_per_s,
            changes=changes,
            settings=self._tables(changes, final=True),
            speedup=speedup,
            contributions=contributions,
            trials=tuple(self.trials[number] for number in sorted(self.trials)),
            left_out=self.space.left_out,
            flags=command_of(self.workload, changes),
            lines=lines_of(self.workload, changes, self.facts),
            ended_by=ended,
            seconds=time.monotonic() - self.start,
        )
        write_own(self.folder / REPORT, report.to_json(), TuneReport.is_own)
        return report

    def _look(self) -> tuple[Facts, float, float]:
        """Trains the start alone. Returns its facts, its speed, and the seconds that it took.

        Raises:
            TrainingError: It fails.
        """
        (outcome,) = self._call("start", [{}], turns=3, limit_s=min(self.config.trial_limit_s, self.left_s))
        if outcome.failure:
            raise TrainingError(
                f"The training must run as it is in a process of its own. Received: {outcome.failure}. Layers of your "
                "own need keras.saving.register_keras_serializable, and a module that another process can import; a "
                "large training needs more minutes."
            )
        if not all(map(math.isfinite, outcome.result["losses"])):
            raise TrainingError(
                f"The training must have a finite loss as it is. Received: losses of {outcome.result['losses']}. See "
                "its learning rate and its data."
            )
        rates = outcome.result["rates"]
        return Facts(**outcome.result["facts"]), statistics.median(rates), outcome.seconds

    def _open_study(self) -> Study:
        optuna: Any = optional_package("optuna", "compress", "A search")
        space = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in self.space.choices.items()
        }
        return Study(self.folder / STUDY, "tuning", ["time"], space, self.config.seed)

    @property
    def _best(self) -> TuneTrial | None:
        """The trial with the largest lower end, if that is faster than the start."""
        found = [each for each in self.trials.values() if each.state == "measured" and each.speedup is not None]
        best = max(found, key=lambda each: _least(each), default=None)
        return best if best is not None and _least(best) > 1 else None

    def _search(self) -> str:
        """Tries settings until time ends it. Returns why it has ended."""
        proposed = self.study.propose(0)
        for number in sorted(proposed.keys() - self.study.open):  # of an earlier call
            self._take(number)
        for number in sorted(proposed.keys() & self.study.open):
            if self._why_end():
                return self._why_end()
            self._try(number, self.space.changes(proposed[number]))
        for changes in self.space.singles():
            if self._why_end():
                return self._why_end()
            self._put(changes)
        if not self._why_end():
            self._put(self._together())
        doubles = 0
        while not (reason := self._why_end()):
            if doubles >= MOST_DOUBLES:
                return "all settings that were proposed have been tried"
            count = len(self.study.propose(0))
            changes = self.space.changes(self.study.propose(count + 1)[count])
            doubles = 0 if self._try(count, changes) else doubles + 1
        return reason

    def _why_end(self) -> str:
        most = self.config.max_trials
        if most is not None and len(self.trials) >= most:
            return f"max_trials={most}"
        times = [self.trial_s, *(each.seconds for each in self.trials.values() if each.state == "measured")]
        longest = max(times[-3:])
        changed = 0 if self._best is None else len(self._best.changes)
        needed = longest * (2 + (changed if changed > 1 else 0))  # for the trial, the last comparison, and each setting
        return "" if self.left_s > needed else f"minutes={self.config.minutes:g}"

    def _together(self) -> dict[str, Any]:
        """Returns the fastest value of each setting whose change alone was faster."""
        found: dict[str, Any] = {}
        faster = [each for each in self.trials.values() if each.state == "measured" and _least(each) > 1]
        for each in sorted(faster, key=_least):
            own = {name: value for name, value in each.changes.items() if name != STEP or len(each.changes) == 1}
            found |= own if len(own) == 1 else {}
        return self.space.changes(found)

    def _put(self, changes: dict[str, Any]) -> None:
        if changes and all(each.changes != changes for each in self.trials.values()):
            self._try(self.study.put(self.space.full(changes)), changes)

    def _try(self, number: int, changes: dict[str, Any]) -> bool:
        """Tries settings, unless they were tried before. Returns whether they were new."""
        file = self._folder_of(number) / TRIAL
        earlier = next((each for each in self.trials.values() if each.changes == changes), None)
        if not changes or earlier is not None:
            self._tell(number, earlier)
            return False
        if not file.is_file():  # else the process was stopped before optuna was told
            shown = " ".join(f"{name}={value}" for name, value in changes.items())
            self.on_step(f"trial {number}: {shown}")
            tolerance = None if "global_batch_size" in changes else self.config.loss_tolerance
            bar = max(1.0, 0.0 if self._best is None else _least(self._best))
            trial, cut = self._compared(number, changes, tolerance, bar)
            if cut:
                return True  # time has ended it; a later call tries it again
            write_text(file, trial.to_json())
        self._take(number)
        self._tell(number, self.trials[number])
        return True

    def _compared(
        self, number: int, changes: dict[str, Any], tolerance: float | None, bar: float
    ) -> tuple[TuneTrial, bool]:
        """Trains a trial beside the start. Returns what was seen, and whether time has cut it."""
        begin, limit = time.monotonic(), min(self.config.trial_limit_s, max(self.left_s, 1.0))
        name = self._folder_of(number).relative_to(self.folder)
        first, second = self._call(str(name), [{}, changes], tolerance=tolerance, bar=bar, limit_s=limit)
        trial = TuneTrial(number=number, changes=changes, state="failed", seconds=time.monotonic() - begin)
        if first.failure or second.failure:
            own = second.failure if second.failure and not second.given_up else f"beside it, the start: {first.failure}"
            return dataclasses.replace(trial, reason=own), limit < self.config.trial_limit_s and trial.seconds >= limit
        losses = tuple(tuple(each.result["losses"]) for each in (first, second))
        trial = dataclasses.replace(trial, losses=losses, peak_bytes=second.result["peak_bytes"])
        if second.result["over"] == "loss":
            words = " and ".join(f"{each[-1]:.4g}" for each in losses)
            return dataclasses.replace(trial, state="loss", reason=f"the losses are {words}"), False
        found = ratio(first.result["rates"], second.result["rates"])
        state = "slower" if second.result["over"] == "slower" else "measured"
        return dataclasses.replace(trial, state=state, speedup=found), False

    def _take(self, number: int) -> None:
        file = self._folder_of(number) / TRIAL
        if file.is_file():
            self.trials[number] = pydantic.TypeAdapter(TuneTrial).validate_json(file.read_bytes())

    def _tell(self, number: int, trial: TuneTrial | None) -> None:
        """Tells optuna the time that the trial needs, as a share of that of the start."""
        if trial is None:
            self.study.finish(number, [1.0])
        else:
            self.study.finish(number, None if trial.speedup is None else [1 / _least(trial)])

    def _contributions(self, best: Mapping[str, Any]) -> tuple[tuple[Contribution, ...], dict[str, Any]]:
        """Leaves each setting out of the best ones. Returns what each contributes, and the settings that do."""
        found, kept = [], dict(best)
        for setting, value in best.items() if len(best) > 1 else ():
            rest = self.space.changes({name: each for name, each in best.items() if name != setting})
            reason, speedup, stays = "", None, True
            if rest == best:
                reason = "the other settings need it"
            elif self.left_s < 2 * self.trial_s:
                reason = "no time was left"
            else:
                self.on_step(f"leaving out {setting}")
                limit = min(self.config.trial_limit_s, max(self.left_s - self.trial_s, 1.0))
                without, whole = self._call(f"without_{setting}", [rest, dict(best)], limit_s=limit)
                reason = without.failure or whole.failure
                if not reason:
                    speedup = ratio(without.result["rates"], whole.result["rates"])
                    stays = speedup.median > 1
            if not stays:
                del kept[setting]
            start = self.space.choices[setting][0]
            found.append(
                Contribution(setting=setting, value=value, start=start, speedup=speedup, kept=stays, reason=reason)
            )
        return tuple(found), self.space.changes(kept)

    def _confirmed(self, changes: dict[str, Any]) -> Estimate | None:
        """Returns how much faster than the start settings are, in a comparison of their own; None if they are not."""
        if not changes:
            return None
        self.on_step("measuring the result against the start once more")
        limit = min(self.config.trial_limit_s, max(self.left_s, self.trial_s))
        first, second = self._call("confirmation", [{}, changes], turns=2 * self.config.turns, limit_s=limit)
        if first.failure or second.failure:
            return None
        found = ratio(first.result["rates"], second.result["rates"])
        return found if found.least > 1 else None

    def _tables(self, changes: Mapping[str, Any], *, final: bool = False) -> dict[str, Any]:
        if self.workload.kind == "script":
            return {} if final else dict(changes)
        if not changes:
            return {}
        found = tables_of(changes, self.training, self.facts)
        return {name: each for name, each in found.items() if name != STEP} if final else found

    def _folder_of(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03d}"

    def _call(
        self,
        name: str,
        sides: list[dict[str, Any]],
        *,
        limit_s: float,
        turns: int | None = None,
        tolerance: float | None = None,
        bar: float = 0.0,
    ) -> list[Outcome]:
        """Trains changes of the start in turns, each in a process of its own. The end of one ends all."""
        folder, ended = self.folder / name, threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        baton = folder / "turns.json"
        begin_turns(baton, len(sides))
        steps = self._loss_steps(sides)

        def run(number: int) -> Outcome:
            side = Side(
                number=number,
                sides=len(sides),
                baton=str(baton),
                settings=self._tables(sides[number]),
                steps=steps,
                tolerance=tolerance,
                window_s=self.config.window_s,
                turns=turns or self.config.turns,
                limit_s=limit_s / 2,
                bar=bar,
            )
            own = folder / str(number)
            arguments = {
                "workload": dataclasses.replace(self.workload, folder=str(self.folder)).to_dict(),
                "side": side.to_dict(),
                "limit": self.limit.to_dict(),
                "directory": str(own),
            }
            function = COMPARE.get(self.workload.kind, "tfopt.tuning.comparison:compare")
            outcome = call_apart(function, arguments, own, limit_s, lambda: "the other has ended" * ended.is_set())
            if outcome.failure:
                ended.set()
            return outcome

        with ThreadPoolExecutor(max(len(sides) - 1, 1)) as pool:
            others = [pool.submit(run, number) for number in range(1, len(sides))]
            try:
                first = run(0)
            except BaseException:  # also Ctrl-C, after which nothing may be left
                ended.set()
                raise
            return [first, *(each.result() for each in others)]

    def _loss_steps(self, sides: list[dict[str, Any]]) -> int:
        """Returns the steps of an epoch whose loss is compared: Keras' own function always makes whole executions."""
        counts = [each.get("steps_per_execution") for each in sides]
        if hasattr(self, "facts"):
            counts.append(self.facts.values.get("steps_per_execution"))
        unit = math.lcm(*(each for each in counts if isinstance(each, int)))
        return math.ceil(LOSS_STEPS / unit) * unit if self.workload.kind == "script" else LOSS_STEPS


def _least(trial: TuneTrial) -> float:
    return 0.0 if trial.speedup is None else trial.speedup.least
