"""The stages of a run: what each trains, which pass it applies, and the artifact that it exports.

`run` of a stage returns what is exported: a Keras model or a quantized model. `artifact` is the name of its directory
below the export directory, and `fits` has the names of its fits. Where `is_baseline` is set, the artifacts of the next
stages are compared with its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tfopt.clustering import ClusteringConfig, cluster
from tfopt.errors import TfoptWarning
from tfopt.exporting import ExportConfig
from tfopt.exporting.config import Precision
from tfopt.exporting.export import check_export
from tfopt.exporting.formats import SAVED_MODEL
from tfopt.pruning import PruningConfig, PruningSchedule, ShrinkSchedule, StructuredPruningConfig, shrink
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.recipe import Recipe
from tfopt.runner.run_report import artifact_name
from tfopt.runner.teacher import teacher_recipe
from tfopt.runner.work import TEACHER, TRAIN, Work
from tfopt.training.checkpointing.record import read_random, write_random

# Settings that change the quality of the quantization only, which means nothing before training.
CHEAP: dict[str, Any] = {
    "calibration_examples": 2,
    "observer": "minmax",
    "equalization": False,
    "smooth_quant": 0.0,
    "bias_correction": False,
    "rounding": "nearest",
    "max_accuracy_drop": None,
}


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What most stages have: a learning rate, an artifact in float32, and one fit."""

    learning_rate: float
    is_baseline: ClassVar[bool] = False
    precision: ClassVar[Precision] = "float32"


@dataclass(frozen=True, kw_only=True)
class Teach(_Stage):
    """Trains the teacher, a recipe of its own, from which the later fits learn."""

    epochs: int
    artifact: str = TEACHER
    fits: Sequence[str] = (TEACHER,)
    is_baseline: ClassVar[bool] = True

    def run(self, work: Work) -> Any:
        assert work.teacher is not None  # the run has made it
        work.teacher.fit(TEACHER, self.epochs, self.learning_rate, from_scratch=True)
        work.lessons.learn_from(work.teacher.model)
        return work.teacher.model


@dataclass(frozen=True, kw_only=True)
class Train(_Stage):
    """Trains the model in float."""

    epochs: int
    artifact: str = "float32"
    fits: Sequence[str] = (TRAIN,)
    is_baseline: ClassVar[bool] = True

    def run(self, work: Work) -> Any:
        work.fit(TRAIN, self.epochs, self.learning_rate, from_scratch=True)
        if work.lessons.from_parent:
            work.lessons.learn_from(work.model)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Shrink(_Stage):
    """Removes whole channels of the model: in rounds while it is trained on, or all at once before that."""

    config: StructuredPruningConfig
    artifact: str = "shrunk"
    fits: Sequence[str] = ("shrink",)

    def run(self, work: Work) -> Any:
        if self.config.at_once:
            result = shrink(work.model, self.config, work.gradient_data())
            work.model = result.model
            work.fit("shrink", self.config.epochs, self.learning_rate)
        else:
            schedule = ShrinkSchedule(work.model, self.config, data=work.gradient_data())
            work.fit("shrink", self.config.epochs, self.learning_rate, [schedule])
            assert schedule.result is not None  # the fit has ended
            result = schedule.result
            work.model = result.model
        work.note(result.report)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Prune(_Stage):
    """Prunes the model while it is trained on."""

    config: PruningConfig
    artifact: str = "pruned"
    fits: Sequence[str] = ("prune",)

    def run(self, work: Work) -> Any:
        schedule = PruningSchedule(work.model, self.config, data=work.gradient_data())
        work.fit("prune", self.config.epochs, self.learning_rate, [schedule])
        assert schedule.report is not None  # the fit has ended
        work.note(schedule.report)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Cluster(_Stage):
    """Lets the weights of each layer share a few values, and trains these on."""

    config: ClusteringConfig
    artifact: str = "clustered"
    fits: Sequence[str] = ("cluster",)
    precision: ClassVar[Precision] = "codebook_weight_only"

    def run(self, work: Work) -> Any:
        work.note(cluster(work.model, self.config))
        work.fit("cluster", self.config.epochs, self.learning_rate)
        return work.model


@dataclass(frozen=True, kw_only=True)
class Quantize(_Stage):
    """Quantizes the model to int8, after or during training."""

    config: QuantizationConfig
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
            work.fit("quantize", self.config.epochs, self.learning_rate)
            config = None  # the ranges are in the model
        quantized = quantize(work.model, config, calibration_data=work.calibration_data())
        work.note(quantized.report)
        return quantized


RecipeStage = Teach | Train | Shrink | Prune | Cluster | Quantize


def stages(recipe: Recipe) -> list[RecipeStage]:
    """Returns the stages of a recipe, in their order.

    Example:
        >>> [stage.artifact for stage in stages(Recipe(name="mine", quantization=QuantizationConfig()))]
        ['float32', 'int8']
    """
    rate = recipe.training.learning_rate
    found: list[RecipeStage] = [Train(epochs=recipe.training.epochs, learning_rate=rate)]
    if (teacher := teacher_recipe(recipe)) is not None:
        found.insert(0, Teach(epochs=teacher.training.epochs, learning_rate=teacher.training.learning_rate))
    if recipe.shrink is not None:
        found.append(Shrink(config=recipe.shrink, learning_rate=recipe.shrink.learning_rate or rate))
    if recipe.pruning is not None:
        found.append(Prune(config=recipe.pruning, learning_rate=recipe.pruning.learning_rate or rate))
    if recipe.clustering is not None:
        found.append(Cluster(config=recipe.clustering, learning_rate=recipe.clustering.learning_rate or rate))
    if recipe.quantization is not None:
        found.append(Quantize(config=recipe.quantization, learning_rate=recipe.quantization.learning_rate or rate))
    return found


def artifacts(recipe: Recipe) -> list[str]:
    """Returns the names of the directories of a recipe's artifacts, in their order.

    Example:
        >>> artifacts(Recipe(name="mine", quantization=QuantizationConfig(), formats=("saved_model", "onnx")))
        ['float32', 'float32_onnx', 'int8', 'int8_onnx']
    """
    return [artifact_name(stage.artifact, each) for stage in stages(recipe) for each in dict.fromkeys(recipe.formats)]


def rehearse(work: Work, quantization: QuantizationConfig | None, *, exports: bool) -> None:
    """Tries on the untrained model what a run needs at its end, so that no training is lost to an export that fails.

    Everything that depends on the kind of model is tried once: freezing, quantizing or the preparation for training
    with fake quantization, the graphs of the artifacts, and their outputs on a few examples. What depends on the
    trained weights is left out: the measurement of nodes, the search for a loss of accuracy, better ranges and better
    rounding. Nothing is written, and neither the model nor the global random generators change.

    Raises:
        TfoptError: The export or the quantization would end the run.
    """
    sample, formats = [next(iter(work.calibration_data()))], tuple(dict.fromkeys(work.recipe.formats))
    with _unnoticed():
        for each in formats if exports else ():
            if quantization is None or quantization.training or each != SAVED_MODEL:
                check_export(work.model, ExportConfig(format=each), sample)
        if quantization is None:
            return
        model = work.model
        small: QuantizationConfig | None = replace(quantization, **CHEAP)
        if quantization.training:
            with work.plan.scope():
                model = quantize(model, small, calibration_data=sample)
            small = None  # the ranges are in the model
        quantized = quantize(model, small, calibration_data=sample)
        if exports:  # a SavedModel's check has the outputs of the float model too
            config = ExportConfig(precision="int8", int8_nodes="all", float_weights="int8")
            for each in formats:
                check_export(quantized, config.of_format(each), sample)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Leaves no trace: no warning, which would come again at the end, and no number drawn from a generator."""
    before = read_random()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TfoptWarning)
            yield
    finally:
        write_random(before)
