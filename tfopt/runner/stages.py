"""The stages of a run: what each trains, which pass it applies, and the artifact that it exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras

from tfopt.data import Examples
from tfopt.pruning import PruningConfig, PruningSchedule, ShrinkSchedule, StructuredPruningConfig, shrink
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.recipe import Recipe
from tfopt.report import PassReport
from tfopt.tasks import Task
from tfopt.training import Plan


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit of a recipe.

    Attributes:
        name: Name of the phase in logs, reports and checkpoints.
        epochs: Number of epochs.
        learning_rate: Learning rate at the start.
        callbacks: Callbacks of this fit alone.
        from_scratch: Whether the weights are new. Such a fit has a warm-up and moving averages of the weights; a later
            fit continues with small steps.
    """

    name: str
    epochs: int
    learning_rate: float
    callbacks: Sequence[keras.callbacks.Callback] = ()
    from_scratch: bool = False


class Work(Protocol):
    """What a stage works on.

    Attributes:
        model: The model, which a stage may replace.
        plan: The plan of the training.
        examples: The examples.
        task: The task.
    """

    model: keras.Model
    plan: Plan
    examples: Examples
    task: Task

    def fit(self, fit: Fit) -> None:
        """Trains the model."""

    def note(self, report: PassReport) -> None:
        """Records and prints the report of a pass."""

    def calibration_data(self) -> Any:
        """Returns batches of (inputs, targets)."""

    def gradient_data(self) -> Any:
        """Returns batches of (inputs, targets) as the loss of a fit takes them, in the same order whenever read."""


class Stage(Protocol):
    """A stage of a run.

    Attributes:
        artifact: Name of the artifact, a directory below the export directory.
        fits: Names of the fits of the stage.
    """

    @property
    def artifact(self) -> str: ...

    @property
    def fits(self) -> Sequence[str]: ...

    def run(self, work: Work) -> Any:
        """Runs the stage, and returns what is exported: a Keras model or a quantized model."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains the model in float."""

    epochs: int
    learning_rate: float
    artifact: str = "float32"
    fits: Sequence[str] = ("train",)

    def run(self, work: Work) -> Any:
        work.fit(Fit(name="train", epochs=self.epochs, learning_rate=self.learning_rate, from_scratch=True))
        return work.model


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Removes whole channels of the model: in rounds while it is trained on, or all at once before that."""

    config: StructuredPruningConfig
    learning_rate: float
    artifact: str = "shrunk"
    fits: Sequence[str] = ("shrink",)

    def run(self, work: Work) -> Any:
        rate = self.config.learning_rate or self.learning_rate
        fit = Fit(name="shrink", epochs=self.config.epochs, learning_rate=rate)
        if self.config.at_once:
            result = shrink(work.model, self.config, work.gradient_data())
            work.model = result.model
            work.fit(fit)
        else:
            schedule = ShrinkSchedule(work.model, self.config, data=work.gradient_data())
            work.fit(replace(fit, callbacks=[schedule]))
            assert schedule.result is not None  # the fit has ended
            result = schedule.result
            work.model = result.model
        work.note(result.report)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Prunes the model while it is trained on."""

    config: PruningConfig
    learning_rate: float
    artifact: str = "pruned"
    fits: Sequence[str] = ("prune",)

    def run(self, work: Work) -> Any:
        schedule = PruningSchedule(work.model, self.config, data=work.gradient_data())
        rate = self.config.learning_rate or self.learning_rate
        work.fit(Fit(name="prune", epochs=self.config.epochs, learning_rate=rate, callbacks=[schedule]))
        assert schedule.report is not None  # the fit has ended
        work.note(schedule.report)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantizes the model to int8, after or during training."""

    config: QuantizationConfig
    learning_rate: float
    artifact: str = "int8"

    @property
    def fits(self) -> Sequence[str]:
        return ("quantize",) if self.config.training else ()

    def run(self, work: Work) -> Any:
        config: QuantizationConfig | None = self.config
        if self.config.metric == "accuracy":  # the default; the task may have another score
            config = replace(self.config, metric=work.task.score(work.examples))
        if self.config.training:
            with work.plan.scope():
                work.model = quantize(work.model, config, calibration_data=work.calibration_data())
            rate = self.config.learning_rate or self.learning_rate
            work.fit(Fit(name="quantize", epochs=self.config.epochs, learning_rate=rate))
            config = None  # the ranges are in the model
        quantized = quantize(work.model, config, calibration_data=work.calibration_data())
        work.note(quantized.report)
        return quantized


def stages(recipe: Recipe) -> list[Stage]:
    """Returns the stages of a recipe, in their order.

    Example:
        >>> [stage.artifact for stage in stages(Recipe(name="mine", quantization=QuantizationConfig()))]
        ['float32', 'int8']
    """
    rate = recipe.training.learning_rate
    found: list[Stage] = [Train(epochs=recipe.training.epochs, learning_rate=rate)]
    if recipe.shrink is not None:
        found.append(Shrink(config=recipe.shrink, learning_rate=rate))
    if recipe.pruning is not None:
        found.append(Prune(config=recipe.pruning, learning_rate=rate))
    if recipe.quantization is not None:
        found.append(Quantize(config=recipe.quantization, learning_rate=rate))
    return found
