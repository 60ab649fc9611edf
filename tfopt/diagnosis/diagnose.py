"""Watches a training, measures its step, and says what holds it back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.replace import forget, kept, replaced
from tfopt.compat.trainer import built_under
from tfopt.diagnosis.experiments import CannotMeasureError, unchanged
from tfopt.diagnosis.measured import WORTH, AbsentError, Measured, is_worth
from tfopt.diagnosis.observation import Observation, Predictions
from tfopt.diagnosis.rules.table import RULES
from tfopt.diagnosis.watch import watching
from tfopt.errors import ConfigError, TrainingError
from tfopt.hardware import detect
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.profiling.monitoring.callback import GpuMonitor
from tfopt.profiling.trace import record_trace, summarize
from tfopt.report import Diagnosis, DiagnosisReport, StepBreakdown
from tfopt.settings.validation import check_type
from tfopt.terminal import working
from tfopt.training.checkpointing.state import build_state, has_variables, own_optimizers

TRACED_STEPS = 10
# What fit leaves on a model, beside the values of variables.
OF_FIT = ("history", "stop_training")
# Seconds between two samples of the GPUs.
SAMPLED_S = 0.1


def diagnose(
    model: keras.Model, *args: Any, steps: int = 100, trace_dir: str | Path | None = None, **options: Any
) -> DiagnosisReport:
    """Trains a model for some steps, says where their time goes, and what would make them faster.

    The arguments are those of `fit`. The model, its optimizer and the random generators are afterwards as they were
    before. What belongs to neither is not: a generator has given some batches, a callback has seen the steps, and a
    variable, a table or a `tf.random.Generator` in a map of the data set has changed, because the map runs far more
    often than in `fit`.

    Args:
        model: A compiled model.
        args, options: The arguments of `keras.Model.fit`, with the data first.
        steps: Number of steps to watch.
        trace_dir: Directory for a trace of TensorFlow's profiler of some steps; None records none.
    Returns: The parts of the step, and the causes that were found, the largest gain first.
    Raises:
        ConfigError: The model is not compiled, or `steps` is too small.
        TrainingError: The training is too short to measure.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse", run_eagerly=True)
        >>> report = diagnose(model, np.zeros((640, 8)), np.zeros((640, 1)), steps=20)
        >>> report.diagnoses[0].cause
        'eager'
    """
    with _observed(model, args, steps, options) as observation:
        return report(observation, trace_dir=trace_dir)


@contextlib.contextmanager
def _observed(model: keras.Model, args: tuple[Any, ...], steps: int, options: dict[str, Any]) -> Iterator[Observation]:
    """Trains for some steps, yields what was watched, and makes the model as it was before."""
    check_keras_3(model)
    check_type("model", model, keras.Model)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 4:
        raise ConfigError(
            f"steps must be a whole number of at least 4. Received: steps={steps!r}. Use 100, the default."
        )
    if not model.compiled:
        raise ConfigError(f"model must be compiled. Received: {model.name!r}, which is not. Call model.compile first.")
    if not args and options.get("x") is None:
        raise ConfigError("The data must follow the model, as in fit. Received: none. Pass it, for example x and y.")
    observation = Observation(limit=steps, stops=True)
    with kept(model, *OF_FIT):
        if not has_variables(model) or (model.built and model.optimizer is not None and not model.optimizer.built):
            _build(model, args, options)
        with unchanged(model), _own_optimizers_kept(model):
            observe_fit(observation, model, model.fit, args, {"verbose": 0, **options, "epochs": 10**6})
            observation.epochs, observation.length_is_known = options.get("epochs", 2), "epochs" in options
            yield observation


@contextlib.contextmanager
def _own_optimizers_kept(model: keras.Model) -> Iterator[None]:
    """Lets copies take the places of optimizers that only the model's own step can build."""
    own = {name: each for name, each in own_optimizers(model).items() if not each.built}
    try:
        with replaced(model, **{name: unbuilt_copy(each) for name, each in own.items()}):
            yield
    finally:
        if own:
            forget(model, "train_function")  # it holds the copies


def _build(model: keras.Model, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Makes the variables of a model and its optimizer, as the first step of `fit` does, without that step."""

    def build(iterator: Any) -> dict[str, Any]:
        if built_under(model) is None:  # otherwise fit has done it
            build_state(model, keras.tree.map_structure(_open_spec, next(iterator)))
        return {}

    def make(force: bool = False) -> None:
        model.train_function = build

    short = {"epochs": 1, "initial_epoch": 0, "steps_per_epoch": 1, "verbose": 0}
    options = {**options, **short, "callbacks": None, "validation_data": None, "validation_split": 0.0}
    with kept(model, "train_function"), replaced(model, make_train_function=make):
        type(model).fit(model, *args, **options)  # not that of tfopt.compile, which needs its own training function


def _open_spec(value: Any) -> tf.TensorSpec | None:
    """Returns the spec of a tensor for any number of examples; None for an optional input that is missing."""
    if value is None or isinstance(value, tf.experimental.Optional):
        return None
    return tf.TensorSpec((None, *value.shape[1:]), value.dtype)


def observe_fit(
    observation: Observation, model: keras.Model, fit: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Runs a fit, of which the bound method and its arguments are given, and adds its steps to an observation."""
    before, observation.data = observation.data, args[0] if args else options.get("x")
    if before is not observation.data:  # other examples
        observation.epochs = 0
    observation.epochs += int(options.get("epochs", 1))
    with contextlib.ExitStack() as scopes:
        if tf.config.list_physical_devices("GPU"):
            monitor = scopes.enter_context(GpuMonitor(SAMPLED_S))
            scopes.callback(lambda: setattr(observation, "load", monitor.utilization))
        return fit(*args, **scopes.enter_context(watching(model, observation, options)))


class DoctorHook:
    """Watches what a program does with `compile`, `fit` and `predict`, for some steps: a `tfopt.scripts.hook.FitHook`.

    With `stops`, training ends after these steps.
    """

    def __init__(self, steps: int = 100, *, stops: bool = False) -> None:
        self._steps, self._stops = steps, stops
        self._predictions = Predictions()
        self._current = self._longest = self._new()

    @property
    def observation(self) -> Observation:
        """What was watched of the model that was watched for the most steps."""
        return max(self._current, self._longest, key=lambda each: each.steps)

    def follow(self, model: keras.Model) -> Observation:
        """Returns what is watched of a model. Only the steps of one model can be compared with each other."""
        if self._current.model not in (None, model):
            self._longest, self._current = self.observation, self._new()
        return self._current

    def _new(self) -> Observation:
        return Observation(limit=self._steps, stops=self._stops, predictions=self._predictions)

    def compile(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts the compilations after the first fit."""
        if self._current.model is model:
            self._current.compilations += 1
        return original(*args, **kwargs)

    def fit(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watches a fit."""
        seen = self.observation
        if seen.is_enough:
            if seen.model is model and seen.data is (args[0] if args else kwargs.get("x")):
                seen.epochs += int(kwargs.get("epochs", 1))  # the training is longer than what is watched
            return original(*args, **kwargs)
        return observe_fit(self.follow(model), model, original, args, kwargs)

    def predict(self, model: keras.Model, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads the memory after a call of predict."""
        seen, before = self._predictions, _traces(model)
        seen.functions += model.predict_function is None
        outputs = original(*args, **kwargs)
        seen.traces += max(_traces(model) - before, 0)  # fewer where the function was made anew
        seen.resident_bytes.append(psutil.Process().memory_info().rss)
        return outputs


def _traces(model: keras.Model) -> int:
    """Returns how often the function that predicts was traced; 0 where it is plain Python, as with run_eagerly."""
    count = getattr(model.predict_function, "experimental_get_tracing_count", None)
    return 0 if count is None else int(count())


def report(observation: Observation, name: str | None = None, trace_dir: str | Path | None = None) -> DiagnosisReport:
    """Runs the experiments on what was watched, and checks every rule. Without a name, it is that of the model.

    With a directory, TensorFlow's profiler records a trace of some steps there.

    Raises:
        TrainingError: The training is too short to measure.
    """
    with working("measuring the step of the training") as now:
        measured = _measured(observation)
        parts = measured.breakdown
        found: list[Diagnosis] = []
        absent, unchecked = {}, {}
        for rule in RULES:
            now(f"measuring the step of the training: {rule.cause.replace('_', ' ')}")
            try:
                result = rule.check(measured)
            except AbsentError as reason:
                result = str(reason)
            except CannotMeasureError as error:
                unchecked[rule.cause] = str(error)
                continue
            if isinstance(result, Diagnosis) and is_worth(result):
                found.append(dataclasses.replace(result, source=rule.source))
            elif isinstance(result, Diagnosis):
                absent[rule.cause] = f"{result.title}: that would save {result.gain:.1%} (threshold {WORTH:.0%})"
            else:
                absent[rule.cause] = result
        reached = None
        try:
            reached = measured.efficiency
        except CannotMeasureError as error:
            unchecked["efficiency"] = str(error)
        trace = None
        if trace_dir is not None:
            with measured.experiments.ready_step() as run, record_trace(trace_dir) as mark:
                for _ in range(TRACED_STEPS):
                    with mark():
                        run()
            trace = summarize(trace_dir)
        found.sort(key=lambda each: -1.0 if each.gain is None else each.gain, reverse=True)
        return DiagnosisReport(
            name=name or measured.model.name,
            breakdown=parts,
            diagnoses=found,
            absent=absent,
            unchecked=unchecked,
            efficiency=reached,
            trace=trace,
        )


def _measured(observation: Observation) -> Measured:
    """Returns the measurements of what was watched, of which the parts of the step are made."""
    try:
        measured = Measured(observation, detect())
        measured.breakdown  # noqa: B018 - computed once
    except CannotMeasureError as error:
        raise TrainingError(f"The training cannot be measured: {error}.") from error
    return measured


def profile(model: keras.Model, *args: Any, steps: int = 100, **options: Any) -> StepBreakdown:
    """Trains a model for some steps, and says where their time goes; see `diagnose`, which also looks for causes.

    Args:
        model: A compiled model.
        args, options: The arguments of `keras.Model.fit`, with the data first.
        steps: Number of steps to watch.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", jit_compile=False)
        >>> parts = profile(model, np.zeros((640, 8)), np.zeros((640, 1)), steps=20)
        >>> parts.steps, parts.batch_size
        (20, 32)
    """
    with _observed(model, args, steps, options) as observation:
        return _measured(observation).breakdown
