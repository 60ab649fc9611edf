"""A run in progress: its model, its examples, and what a stage does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from tfopt.data import EpochCounter, Examples, InputReport, epoch_steps, measure
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.config import cuts_boxes, pipeline_settings
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import Artifact, ExportConfig, export
from tfopt.exporting.config import Format, Precision
from tfopt.exporting.formats import SAVED_MODEL
from tfopt.profiling import GpuMonitor
from tfopt.profiling.monitoring.callback import LOGGED
from tfopt.pruning.structured.shrink import find_groups
from tfopt.pruning.weights import find_weights, select_weights
from tfopt.quantization import QuantizedModel
from tfopt.quantization.weight_only import WeightOnlyConfig
from tfopt.recipe import Recipe
from tfopt.report import Decision, PassReport, Phase
from tfopt.reporting.terminal import FitProgress, pass_summary
from tfopt.runner.model_check import are_shares, check_input, check_outputs, with_float_inputs
from tfopt.runner.run_report import artifact_name, print_line, remove_reports
from tfopt.runner.teacher import Lessons, teacher_recipe
from tfopt.tasks import Task
from tfopt.tasks.label_smoothing import smoothed
from tfopt.training import Ledger, Plan, TrainingConfig, ledger
from tfopt.training import compile as compile_model
from tfopt.training.choices import choose_augmentation_place
from tfopt.training.optimizers import make_optimizer
from tfopt.training.step.guards import check_weights

VERIFIED_AT_ONCE = 64
MEASURED_SECONDS = 1.5
TEACHER, TRAIN = "teacher", "train"  # the phases of the first fits: of a teacher, and of the recipe's own model


class Work:
    """A run in progress, on which its stages work. A stage may replace the model.

    The monitor watches all fits. `phases` are what the fits recorded, and `passes` what the passes reported.

    Args:
        teacher: The run of the teacher, if that is a recipe of its own.
    """

    def __init__(
        self,
        recipe: Recipe,
        decided: Plan,
        examples: Examples,
        augmentation: Augmentation | None,
        on_device: bool,
        console: Console,
        teacher: Work | None = None,
    ) -> None:
        self.recipe, self.plan, self.examples, self.console = recipe, decided, examples, console
        self._augmentation = augmentation
        self._on_host = None if on_device else augmentation
        self._on_device = augmentation if on_device else None
        self.task: Task = recipe.find_task()
        self.monitor = GpuMonitor()
        self.model = _build(recipe, decided, examples)
        self.phases: list[Phase] = []
        self.passes: list[PassReport] = []
        self.lessons = Lessons(recipe.distillation, examples, self.note)
        self.teacher = teacher
        if teacher is not None:
            teacher.monitor, teacher.phases = self.monitor, self.phases

    def fit(
        self,
        name: str,
        epochs: int,
        learning_rate: float,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        *,
        from_scratch: bool = False,
    ) -> None:
        """Trains the model with Keras' own fit. The name is that of the phase in logs, reports and checkpoints.

        A fit from scratch, of new weights, has a warm-up and moving averages of the weights. A later fit continues with
        small steps.
        """
        training = self.recipe.training
        decided = self.compile(name, epochs, learning_rate, from_scratch=from_scratch)
        with self.lessons.taught(self.model) as examples:
            batches = self.batches(decided, examples)
            history = self.model.fit(
                batches,
                validation_data=self.batches(decided, training=False),
                epochs=epochs,
                steps_per_epoch=training.steps_per_epoch,
                shuffle=False,  # the pipeline shuffles
                verbose=0,
                callbacks=[*callbacks, self.monitor, FitProgress(f"{name:5}", console=self.console)],
            )
        check_weights(self.model, name, batches)
        has_own_step = type(self.model).train_step is not keras.Model.train_step
        steps_taken = Ledger() if has_own_step else ledger(self.model)
        self.phases.append(
            Phase(
                name=name,
                history={
                    key: [float(value) for value in values]
                    for key, values in history.history.items()
                    if key not in LOGGED  # the timeline of the report shows them
                },
                step_time_ms=steps_taken.step_time_ms,
                trace_seconds=steps_taken.trace_seconds,
                compile_seconds=steps_taken.compile_seconds,
            )
        )

    def compile(self, name: str, epochs: int, learning_rate: float, *, from_scratch: bool = False) -> Plan:
        """Compiles the model for a fit, as `fit` does, and returns the plan of this fit."""
        training, data = self.recipe.training, self.recipe.data
        steps = epoch_steps(
            self.examples,
            training.global_batch_size,
            steps_per_epoch=training.steps_per_epoch,
            drop_remainder=training.drop_remainder,
            buckets=len(data.bucket_boundaries),
        )
        decided = replace(self.plan, config=training_of(self.recipe, name))
        with decided.scope():
            optimizer = make_optimizer(
                training,
                learning_rate=learning_rate,
                steps=steps * epochs,
                warmup_steps=round(steps * training.warmup_epochs) if from_scratch else 0,
                averages=from_scratch,
            )
        compile_model(
            self.model,
            decided,
            optimizer=optimizer,
            loss=loss_of(self.recipe, self.examples, self._augmentation),
            metrics=self.task.metrics(self.examples),
            augment=self._on_device,
        )
        return decided

    def try_teacher(self) -> None:
        """Raises before any training what the recipe's teacher would raise."""
        trained_here = self.model if self.lessons.from_parent else None
        self.lessons.rehearse(self.model, trained_here if self.teacher is None else self.teacher.model)

    def batches(self, decided: Plan, examples: Examples | None = None, *, training: bool = True) -> Any:
        """Returns batches of examples, by default those of the run, with the recipe's settings of the pipeline."""
        examples = self.examples if examples is None else examples
        settings = pipeline_settings(self.recipe.data)
        return decided.pipeline(examples, training=training, augment=self._on_host, **settings)

    def note(self, report: PassReport) -> None:
        """Records and prints the report of a pass."""
        self.passes.append(report)
        self.console.print(pass_summary(report))

    def calibration_data(self) -> Any:
        """Returns batches of training examples. The first ones are a fair sample; see Examples."""
        return with_float_inputs(self.examples.batches("train"), self.model)

    def gradient_data(self) -> Any:
        """Returns batches of training examples without augmentation, with the targets that the loss of a fit takes."""
        plain = replace(self.plan, epoch=EpochCounter())
        augment = self._augmentation  # it makes shares of class numbers
        return plain.pipeline(self.examples, training=False, split="train", augment=augment)

    def measure_input(self) -> InputReport:
        """Measures the pipeline of the training, and how long a step would wait for it."""
        with self.console.status("measuring the input pipeline"):
            report = measure(
                self.batches(replace(self.plan, epoch=EpochCounter())),
                step_time_ms=next(each.step_time_ms for each in self.phases if each.name == TRAIN),
                seconds=MEASURED_SECONDS,
            )
        wait = "" if report.wait_ms is None else f"; a training step waits {report.wait_ms:.3g} ms for its batch"
        print_line(f"input: {report.examples_per_second:,.0f} examples per second{wait}", self.console)
        return report

    def export(
        self, exported: Any, export_dir: Path, name: str, baseline: str | None, precision: Precision = "float32"
    ) -> None:
        """Writes what a stage returned in each format of the recipe. The baseline is in the first of them.

        The precision is that of a SavedModel. Other formats hold a float model in float32.
        """
        first, *others = dict.fromkeys(self.recipe.formats)
        if baseline is None:
            remove_reports(export_dir)  # they would be of other artifacts
        artifact = self._export(exported, export_dir, name, first, baseline, precision)
        if isinstance(exported, QuantizedModel) and artifact.report is not None and artifact.report != exported.report:
            self.passes[-1] = artifact.report  # the export has chosen the nodes that are faster in int8
            if pass_summary(artifact.report) != pass_summary(exported.report):
                self.console.print(pass_summary(artifact.report))
        for each in others:
            self._export(exported, export_dir, name, each, baseline or name, precision)

    def _export(
        self,
        exported: Any,
        export_dir: Path,
        name: str,
        file_format: Format,
        baseline: str | None,
        precision: Precision,
    ) -> Artifact:
        target = export_dir / artifact_name(name, file_format)
        config = ExportConfig(
            int8_nodes=self.recipe.int8_nodes, float_weights="int8", batch_sizes=self.recipe.batch_sizes
        )
        clustering = self.recipe.clustering
        if precision != "float32" and clustering is not None and file_format == SAVED_MODEL:
            smallest = WeightOnlyConfig(minimum_size=clustering.minimum_size)  # what was clustered, is stored so
            config = ExportConfig(precision=precision, weight_only=smallest)
        with self.console.status(f"exporting {target.name}"):
            artifact = export(
                exported,
                target,
                config.of_format(file_format),
                calibration_data=self.calibration_data(),
                evaluation_data=with_float_inputs(self.examples.batches("test", VERIFIED_AT_ONCE), self.model),
                baseline=None if baseline is None else export_dir / artifact_name(baseline, self.recipe.formats[0]),
            )
        print_line(f"exported {target}, {artifact.bytes_on_disk:,} bytes", self.console)
        return artifact


def begin(
    recipe: Recipe,
    decided: Plan,
    examples: Examples,
    augmentation: Augmentation | None,
    places: Sequence[Decision],
    console: Console,
    teacher: Work | None = None,
) -> Work:
    """Builds the model of a recipe, and returns the run that begins. `place_augmentation` gives the two in between."""
    on_device = any(each.value == "device" for each in places)
    if on_device:
        decided = replace(decided, data=replace(recipe.data, augment=replace(recipe.data.augment, where="device")))
    return Work(recipe, decided, examples, augmentation, on_device, console, teacher)


def loss_of(recipe: Recipe, examples: Examples, augmentation: Augmentation | None) -> Any:
    """Returns the loss of a recipe, for targets as its augmentation leaves them."""
    task = recipe.find_task()
    mixed = augmentation is not None and augmentation.needs_one_hot
    make = task.soft_loss if task.soft_loss is not None and (mixed or are_shares(examples, task)) else task.loss
    return smoothed(make(examples), recipe.training.label_smoothing)


def place_augmentation(recipe: Recipe, examples: Examples, plan: Plan) -> tuple[Augmentation | None, list[Decision]]:
    """Returns the augmentation of a recipe, and the decision where it runs: in the pipeline or in the training step.

    Raises:
        ConfigError: The augmentation does not fit the examples or the task.
    """
    place, reason = choose_augmentation_place(
        recipe.data.augment.where,
        plan.hardware,
        in_stages=bool(plan.stage_devices),
        cuts_boxes=cuts_boxes(recipe.data, examples),
    )
    augmentation = recipe.data.augmentation(examples, on_gpu=place == "device" and bool(plan.hardware.gpus))
    if augmentation is None:
        return None, []
    augmentation.check(examples.decoded("train").batch(1).element_spec)
    if augmentation.needs_one_hot and recipe.find_task().soft_loss is None:
        raise ConfigError(
            f"mixup and cutmix need a task whose targets can be mixed. Received: task={recipe.find_task().name!r}. "
            "Set augment.mixup and augment.cutmix to 0."
        )
    return augmentation, [Decision(setting="augment.where", value=place, reason=reason)]


def training_of(settings: Recipe, phase: str) -> TrainingConfig:
    """Returns the training settings of one phase. Each phase has its own checkpoint directory."""
    training = settings.training
    if training.checkpoint_dir is None:
        return training
    # resume=True requires a checkpoint of the first phase. The run may have stopped before a later phase began.
    is_first = phase == TEACHER or (phase == TRAIN and teacher_recipe(settings) is None)
    resume = "auto" if training.resume is True and not is_first else training.resume
    return replace(training, checkpoint_dir=str(Path(training.checkpoint_dir) / phase), resume=resume)


def _build(settings: Recipe, decided: Plan, examples: Examples) -> keras.Model:
    with decided.scope():
        model = settings.model.build(examples.input_shape, examples.outputs)
    if not isinstance(model, keras.Model) or not model.built:
        raise UnsupportedModelError(
            f"The builder must return a built Keras 3 model. Received: {model!r} from {settings.model.builder!r}. "
            "Begin the model with keras.Input, or call it once on a batch."
        )
    check_input(model, examples)
    check_outputs(model, examples, settings.find_task())
    if settings.shrink is not None:
        find_groups(model, settings.shrink)  # raises its errors before the training
    if settings.pruning is not None:
        select_weights(model, settings.pruning)  # raises its errors before the training
    if settings.clustering is not None:
        find_weights(model, settings.clustering.exclude, settings.clustering.include)  # likewise
    return model
