"""`tfopt.compress`: the smallest and fastest artifacts of a model within a budget, found by measurement.

Before any training two artifacts are measured: the smallest that the settings allow, without training, and the given
model with all its channels. What no trained model can reach is then known, and what others will cost is predicted from
their multiply-adds. optuna proposes how many multiply-adds are left, and how the groups of channels share the loss.
Proposals that the prediction puts over the budget are left out. The others are trained, the one first that tells most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import pydantic

from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import write_text, writing_to
from tfopt.atomic.own_files import write_own
from tfopt.compression.candidates import (
    Allocation,
    farthest,
    interval,
    is_near,
    measure_sensitivity,
    possible_shares,
    why_give_up,
    why_leave_out,
)
from tfopt.compression.checks import check_examples, check_model, check_reachable, with_fitting_teacher
from tfopt.compression.config import BYTES, DROP, MEMORY, CompressionConfig, changes_in, latency_at
from tfopt.compression.directory import prepare
from tfopt.compression.front import (
    CompressedModel,
    CompressionReport,
    TrialRecord,
    figures_of,
    front,
)
from tfopt.compression.trial import ARTIFACT, BASELINE, LOSSES, RECIPE, read_losses
from tfopt.data import Examples
from tfopt.data.arguments import optional_package
from tfopt.errors import ConfigError, TrainingError
from tfopt.exporting.verification.sizes import bytes_on_disk
from tfopt.report import Receipt
from tfopt.settings.validation import check_type
from tfopt.trials.own_modules import own_modules
from tfopt.trials.process import OUTCOME, Outcome, call_apart, read_outcome
from tfopt.trials.study import STARTUP, Study

STUDY, SENSITIVITY, REPORT, PLOT = "study.db", "sensitivity.json", "report.json", "front.svg"
SMALLEST, UNSHRUNK = "smallest", "unshrunk"
MOST_PROPOSALS = 8 * STARTUP  # of one call
LEFT_OUT = "an earlier call left it out, for what it knew"
TRIED = "a model with as many multiply-adds was tried"
UNKNOWN_LAYER = (
    "Layers of your own need keras.saving.register_keras_serializable, and a module that another process can import."
)
OnStep = Callable[[str], object]


def compress(
    model: keras.Model,
    data: Examples,
    config: CompressionConfig | None = None,
    *,
    directory: str | Path,
    on_step: OnStep = lambda words: None,
) -> CompressionReport:
    """Searches for smaller and faster artifacts of a trained model within a budget, by measurement on this machine.

    Each trial removes channels, trains what is left with the given model as its teacher, quantizes to int8, exports,
    and measures score, latency and size in fresh processes. It runs in a process of its own: one that crashes, hangs or
    finds no memory is recorded, and the search goes on. A trial that runs at the time limit is ended, and the result is
    what was found until then. What comes before the trials (the examples are written, the model is exported in float32,
    the sensitivity is measured) takes of the time too, but is not interrupted.

    Called again with the same directory after a stop, the search goes on; the same seed proposes the same first trials
    in any case, and later ones depend on what was measured.

    Args:
        model: A built functional or Sequential Keras model, trained, and compiled with its loss.
        data: Examples to train on, to score and to calibrate with; `tfopt.data.arrays` makes them of arrays. The scores
            are those of the validation part, or of the test part if there is none.
        config: The budget and the settings. None means CompressionConfig(), which has no bounds.
        directory: Directory for the trials, their artifacts, report.json and front.svg. It is new, or of an earlier
            call with the same model and settings; the bounds and the limits of time and of trials may differ.
            A directory in which nothing has been measured yet may get other settings.
        on_step: Is called with a few words when a step begins.
    Returns: A report. `report.front` has the artifacts of which none is better in every figure, `report.best` the
        fastest within the budget, and `report.missed` by how much the nearest one misses it.
    Raises:
        ConfigError: The budget cannot be met: even the smallest model is too large or too slow. This is known before
            any training. Or a setting or the examples are wrong, the metric does not fit them, the directory is of
            another model or of other settings, or the time limit is too short for the first measurements.
        UnsupportedModelError: The model is not compiled, or has no channels, or next to none, that can be removed; or
            it has a Lambda of a lambda.
        TrainingError: The first measurements failed in their own processes.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> compress(model, [1, 2], directory="never")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: data must be an Examples. ...
    """
    return compress_from("", model, data, config, directory, on_step)


def compress_from(
    source: str,
    model: keras.Model,
    data: Examples,
    config: CompressionConfig | None,
    directory: str | Path,
    on_step: OnStep,
) -> CompressionReport:
    """As `compress`; the directory keeps the source of the model, the recipe or the file of the command."""
    start = time.monotonic()
    config = CompressionConfig() if config is None else config
    check_type("config", config, CompressionConfig)
    optional_package("optuna", "compress", "A compression")
    most = check_model(model, data, config)
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"directory must be a directory. Received: {str(folder)!r}, a file. Choose another name.")
    with exclusive(folder):
        measured = [read_outcome(folder / name) for name in (SMALLEST, UNSHRUNK)]
        is_begun = (folder / STUDY).is_file() or any(each is not None and not each.failure for each in measured)
        if not is_begun:
            check_examples(model, data, config)
        config = with_fitting_teacher(config, model)
        config.recipe(SMALLEST, most).to_toml()  # raises for what another process cannot be given
        prepare(folder, model, data, config, source, is_begun, on_step)
        return _Search(model, data, config, folder, most, start, on_step).run()


class _Search:
    """A search in progress."""

    def __init__(
        self,
        model: keras.Model,
        data: Examples,
        config: CompressionConfig,
        folder: Path,
        most: Mapping[str, float],
        start: float,
        on_step: OnStep,
    ) -> None:
        self.model, self.data, self.config, self.folder, self.most = model, data, config, folder, most
        self.start, self.on_step = start, on_step
        self.candidates: dict[int, tuple[float, dict[str, float]]] = {}  # share of the multiply-adds, and ratios
        self.outcomes: dict[int, Outcome] = {}
        self.models: dict[int, CompressedModel] = {}
        self.cut: dict[int, float] = {}  # seconds of trials that only time has ended; a later call may try them again
        self.study: Study | None = None
        self.ended = ""  # why

    @property
    def left_s(self) -> float:
        return self.config.time_limit_s - (time.monotonic() - self.start)

    @property
    def _by_time(self) -> str:
        return f"by time_limit_s={self.config.time_limit_s:g}; the same call goes on"

    def run(self) -> CompressionReport:
        self.smallest = self._untrained(SMALLEST, self.most)
        self._check_reachable()
        self.unshrunk = self._untrained(UNSHRUNK, {})
        if self.left_s > 0 or (self.folder / STUDY).is_file():  # the report has what earlier calls have measured
            self._search()
        else:
            self.ended = self._by_time
        return self._report()

    def _search(self) -> None:
        self.on_step("measuring the sensitivity of each group")
        seconds = self.left_s / 4
        file = self.folder / SENSITIVITY
        found = measure_sensitivity(self.model, self.data, self.config.shrink, len(self.most), seconds, file)
        self.allocation = Allocation(found, self.most)
        self.study = self._open_study()
        self.most_proposals = len(self.study.propose(0)) + MOST_PROPOSALS  # another budget may want others
        for ended in self.study.propose(0).keys() - self.study.open:  # in an earlier call
            self._take(ended, read_outcome(self._folder_of(ended)))
        while (number := self._next(self.study)) is not None:
            self._try(self.study, number)

    def _untrained(self, name: str, ratios: Mapping[str, float]) -> CompressedModel:
        """Measures an artifact that needs no training: its score is that of the model, or does not count."""
        outcome = read_outcome(self.folder / name)
        if outcome is None or outcome.failure:
            self.on_step(f"measuring the {name} model")
            outcome = self._call(name, ratios, limit_s=max(self.left_s, 1.0))
        if outcome.failure and self.left_s <= 0:
            raise ConfigError(
                "time_limit_s must suffice for the measurement of two artifacts. Received: "
                f"time_limit_s={self.config.time_limit_s:g}, which was over before. Set several minutes."
            )
        if outcome.failure:
            remedy = (
                UNKNOWN_LAYER if "Could not locate" in outcome.failure else "Correct what it names, and call again."
            )
            raise TrainingError(
                f"The {name} model must be measured in a process of its own. Received: "
                f"{outcome.failure.removesuffix('.')}. {self.folder / name / 'log.txt'} has its output. {remedy}"
            )
        return self._model_of(name, outcome.result)

    def _check_reachable(self) -> None:
        try:
            check_reachable(self.smallest.figures, self.config)
        except ConfigError:
            (self.folder / SMALLEST / OUTCOME).unlink(missing_ok=True)  # a later call measures anew
            raise

    def _open_study(self) -> Study:
        optuna: Any = optional_package("optuna", "compress", "A compression")
        shares = possible_shares(self.allocation, self.model, self.config.shrink)
        space = {
            "multiply_adds": optuna.distributions.FloatDistribution(*shares, log=True),
            "amounts": optuna.distributions.CategoricalDistribution(("sensitive", "even")),
        }
        return Study(self.folder / STUDY, "compression", self._told, space, self.config.seed)

    @cached_property
    def _told(self) -> list[str]:
        return [DROP, *map(latency_at, self.config.batch_sizes), BYTES]

    def _next(self, study: Study) -> int | None:
        """Returns the number of the next trial; None at the end of the search."""
        seconds = [each.seconds for each in self.outcomes.values() if not each.failure]
        if self.left_s <= min(seconds, default=0.0):
            self.ended = self._by_time
            return None
        if self.config.max_trials is not None and len(self.outcomes) >= self.config.max_trials:
            self.ended = f"by max_trials={self.config.max_trials}; a call with more goes on"
            return None
        for count in range(STARTUP, self.most_proposals + 1, STARTUP):
            self._propose(study, count)
            too_long = {self.candidates[each][0] for each in self.cut}
            shares = {number: self.candidates[number][0] for number in study.open}
            shares = {number: share for number, share in shares.items() if share not in too_long}
            worth = {number: share for number, share in shares.items() if not self._reason_to_leave_out(share)}
            found = farthest(worth, self._tried, *self._interval())
            if found is not None:
                return found
            for number in shares:
                study.leave_out(number)
        self.ended = "because no other proposal is worth a training"
        return None

    def _propose(self, study: Study, count: int) -> dict[int, Any]:
        """Returns what optuna proposes, at least `count`, by the number of the trial; notes what each leaves."""
        found = study.propose(count)
        for number, settings in found.items():
            if number not in self.candidates:
                ratios = self.allocation.ratios(settings["multiply_adds"], settings["amounts"])
                self.candidates[number] = self.allocation.share(ratios), ratios
        return found

    @property
    def _tried(self) -> list[float]:
        """Shares that need not be tried again. The smallest model counts: its score will hardly do."""
        return [1.0, self.smallest.multiply_adds, *(self.candidates[each][0] for each in self.outcomes)]

    def _interval(self) -> tuple[float, float]:
        drops = {each.multiply_adds: each.figures[DROP] for each in self.models.values()}
        return interval(drops, self.config.max_score_drop)

    def _reason_to_leave_out(self, share: float) -> str:
        measured = [self.smallest, self.unshrunk, *self.models.values()]
        known = [(each.multiply_adds, each.figures) for each in measured]
        budget = {name: bound for name, bound in self.config.budget.items() if name not in (DROP, MEMORY)}
        return why_leave_out(share, self._interval()[0], known, budget)

    def _reason_to_give_up(self, number: int) -> str:
        share = self.candidates[number][0]
        smaller = [other for other, each in self.models.items() if each.multiply_adds <= share]
        losses = {each: read_losses(self._folder_of(each)) for each in (number, *smaller)}
        return why_give_up(losses.pop(number), losses.values(), self.config.shrink.epochs)

    def _try(self, study: Study, number: int) -> None:
        """Trains and measures one candidate."""
        share, ratios = self.candidates[number]
        outcome, cut = read_outcome(self._folder_of(number)), False  # the process was stopped before optuna was told
        if outcome is None:
            self.on_step(f"training trial {number}, with {share:.1%} of the multiply-adds")
            # A first trial that hangs leaves time for others; what half of the time is too short for, a quarter is too.
            default = self.left_s if self.models or self.cut else self.left_s / 2
            limit = min(self.config.trial_limit_s or default, self.left_s)
            name = self._folder_of(number).relative_to(self.folder)
            outcome = self._call(name, ratios, limit_s=limit, why_give_up=lambda: self._reason_to_give_up(number))
            cut = self.config.trial_limit_s is None and outcome.seconds >= limit
        if outcome.failure and (cut or self.left_s <= 0):  # with more time it might not have failed
            (self._folder_of(number) / OUTCOME).unlink(missing_ok=True)
            self.cut[number] = outcome.seconds
            return
        self._take(number, outcome)
        found = self.models.get(number)
        if outcome.given_up:
            study.leave_out(number)
        else:
            study.finish(number, None if found is None else [found.figures[name] for name in self._told])

    def _take(self, number: int, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self.outcomes[number] = outcome
        if not outcome.failure:
            self.models[number] = self._model_of(f"trials/{number:03d}", outcome.result)

    def _folder_of(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03d}"

    def _call(
        self,
        name: str | Path,
        ratios: Mapping[str, float],
        *,
        limit_s: float,
        why_give_up: Callable[[], str] | None = None,
    ) -> Outcome:
        """Makes and measures an artifact in a process of its own. What may be given up is trained."""
        own = self.folder / name
        with writing_to(own):
            own.mkdir(parents=True, exist_ok=True)
            (own / LOSSES).unlink(missing_ok=True)  # of a call that time has ended
        write_text(own / RECIPE, changes_in(self.config.recipe(f"compressed_{own.name}", ratios)))
        arguments = {
            "run": str(self.folder.resolve()),
            "trial": str(own.resolve()),
            "metric": self.config.metric,
            "heals": why_give_up is not None,
            "modules": own_modules(self.model),
        }
        return call_apart("tfopt.compression.trial:run_trial", arguments, own, limit_s, why_give_up or (lambda: ""))

    def _model_of(self, name: str, result: Mapping[str, Any]) -> CompressedModel:
        receipts = tuple(pydantic.TypeAdapter(Receipt).validate_python(each) for each in result["receipts"])
        own = self.folder / name
        return CompressedModel(
            name=name,
            artifact=str(own / ARTIFACT),
            recipe=str(own / RECIPE),
            multiply_adds=result["multiply_adds"],
            receipts=receipts,
            figures=figures_of(receipts),
        )

    def _report(self) -> CompressionReport:
        receipts = self.unshrunk.receipts
        latencies = {latency_at(each.batch_size): each.latency_ms_median * (each.speedup or 1.0) for each in receipts}
        report = CompressionReport(
            directory=str(self.folder),
            score=next(iter(receipts[0].scores)),
            budget=self.config.budget,
            baseline={DROP: 0.0, **latencies, BYTES: float(bytes_on_disk(self.folder / BASELINE))},
            front=front([self.unshrunk, *self.models.values()], self.config.budget),
            trials=self._trials(),
            ended=self.ended,
            seconds=time.monotonic() - self.start,
        )
        write_own(self.folder / REPORT, report.to_json(), CompressionReport.is_own)
        report.plot(self.folder / PLOT)
        return report

    def _trials(self) -> tuple[TrialRecord, ...]:
        """Returns what became of each proposal."""
        if self.study is None:
            return ()
        records, is_open = [], self.study.open
        for number, settings in self._propose(self.study, 0).items():
            outcome, share = self.outcomes.get(number), self.candidates[number][0]
            if outcome is not None:
                bad = "given up" if outcome.given_up else "failed"
                state, reason = (bad if outcome.failure else "measured"), outcome.failure
            else:
                reason = self._reason_to_leave_out(share) or (TRIED if is_near(share, self._tried) else "")
                state = "open" if number in is_open and not reason else "left out"
                if state == "open" and number in self.cut:
                    reason = f"its time was over after {self.cut[number]:.0f} s"
                elif state == "left out" and not reason:
                    reason = LEFT_OUT
            records.append(
                TrialRecord(number=number, settings=settings, multiply_adds=share, state=state, reason=reason)
            )
        return tuple(records)
