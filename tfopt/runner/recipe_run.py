"""Runs a recipe: plan, examples, stages, verification, report."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.markup import escape

from tfopt.atomic.directories import check_target, exclusive
from tfopt.data import EpochCounter, Examples, InputReport, decide, epoch_steps, measure
from tfopt.errors import UnsupportedModelError
from tfopt.exporting import ExportConfig, export, verify_together
from tfopt.profiling import GpuMonitor
from tfopt.profiling.monitoring.epoch_logs import LOGGED
from tfopt.pruning.structured.shrink import find_groups
from tfopt.pruning.weights import select_weights
from tfopt.quantization import QuantizedModel
from tfopt.recipe import Recipe
from tfopt.recipes import find_recipe
from tfopt.report import PassReport, Phase, Receipt, RunReport
from tfopt.report.record import decision_table
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table, pairs
from tfopt.reporting.receipts import receipt_table
from tfopt.reporting.terminal import FitProgress, PlanTable, pass_summary
from tfopt.runner.augmentation import PlacedAugmentation, place_augmentation
from tfopt.runner.model_check import are_shares, check_input, check_outputs, with_float_inputs
from tfopt.runner.rehearsal import rehearse
from tfopt.runner.run_report import (
    check_reports,
    environment,
    print_line,
    print_score,
    remove_reports,
    write_reports,
)
from tfopt.runner.stages import Fit, Stage, stages
from tfopt.tasks import Task
from tfopt.tasks.label_smoothing import smoothed
from tfopt.terminal import PrintableConsole
from tfopt.training import Ledger, Plan, TrainingConfig, ledger, plan
from tfopt.training import compile as compile_model
from tfopt.training.checkpointing.store import check_mode
from tfopt.training.optimizers import make_optimizer
from tfopt.training.step.guards import check_weights

VERIFIED_AT_ONCE = 64
MEASURED_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class RunResult(Shown):
    """The result of a run.

    Attributes:
        model: The trained Keras model, pruned if the recipe prunes.
        plan: The plan of the training.
        report: The results and measurements of all stages, as plain records.
        receipts: The receipt of each artifact by name ("float32", "shrunk", "pruned", "int8"); empty without an export.
        export_dir: Directory of the artifacts, receipts.json, report.json and report.html; None without an
            export.
    """

    model: keras.Model
    plan: Plan
    report: RunReport
    receipts: Mapping[str, Receipt]
    export_dir: Path | None

    @property
    def ok(self) -> bool:
        """Whether every artifact was verified without a problem."""
        return all(receipt.ok for receipt in self.receipts.values())

    def __str__(self) -> str:
        lines = [f"{self.report.recipe}: {self.report.description}", *map(str, self.report.phases)]
        return "\n".join([*lines, *map(str, self.receipts.values())])

    def _sheet(self) -> Sheet:
        report, receipts = self.report, self.receipts
        shown = receipt_table(receipts, self.export_dir or Path())
        rows = [(label, *(cell.text for cell in cells)) for label, cells in shown.rows.items()]
        problems = [(PROBLEM, name, problem) for name, each in receipts.items() for problem in each.problems]
        tables = [
            Table(head=("", *receipts), rows=rows, figures=range(1, len(receipts) + 1), folded=""),
            Table(rows=problems),
            pairs(shown.shared),
            decision_table(report.plan, folded="plan"),
            Table(rows=[(phase.name, str(phase)) for phase in report.phases], folded="training"),
        ]
        return Sheet(title=report.recipe, note=report.description, tables=tables)


def run(recipe: Recipe | str | Path, *, quick: bool = False, console: Console | None = None) -> RunResult:
    """Runs a recipe from training to the report.

    Exports the trained model as float32/. If the recipe shrinks, prunes or quantizes, also exports the results of these
    stages as shrunk/, pruned/ and int8/. Verifies each artifact in a fresh process, and writes receipts.json and
    report.html beside them.

    Args:
        recipe: A recipe, its name, or a .toml file.
        quick: Whether to make a short trial run: few epochs on few examples, with another export directory.
        console: Console for the progress. None means standard output.
    Raises:
        ConfigError: The recipe or its plan is wrong, or the export directory has a report that tfopt did not write.
        ExportError: The export directory cannot be written. Both are checked before training.
    Example:
        >>> from tfopt.data.config import DataConfig
        >>> from tfopt.recipe import ModelConfig
        >>> from tfopt.training import TrainingConfig
        >>> small = Recipe(
        ...     name="small",
        ...     model=ModelConfig(builder="mlp", arguments={"units": [8]}),
        ...     data=DataConfig(source="synthetic", arguments={"examples": 100, "input_shape": [4]}),
        ...     training=TrainingConfig(epochs=1),
        ... )
        >>> result = run(small, console=Console(quiet=True))
        >>> result.report.phases[0].name, result.receipts
        ('train', {})
    """
    settings = find_recipe(recipe)
    if quick:
        settings = settings.quick()
    console = console or PrintableConsole()
    export_dir = None if settings.export_dir is None else Path(settings.export_dir)
    if export_dir is not None:
        for stage in stages(settings):
            check_target(export_dir / stage.artifact)
        check_reports(export_dir)
    for phase in (phase for stage in stages(settings) for phase in stage.fits):
        own = _training_of(settings, phase)
        if own.checkpoint_dir is not None:  # an error is raised before any stage trains
            check_mode(own.checkpoint_dir, own.resume)
    console.print(f"[bold]{escape(settings.name)}[/bold]  {escape(settings.description)}\n")
    decided = plan(settings)
    if not decided.is_chief:  # this worker trains the same weights; the chief exports them
        return _run(settings, decided, None, Console(quiet=True))
    with exclusive(export_dir) if export_dir is not None else contextlib.nullcontext():
        return _run(settings, decided, export_dir, console)


class _Work:
    """A run in progress; see tfopt.runner.stages.Work."""

    def __init__(
        self, recipe: Recipe, decided: Plan, examples: Examples, augmentation: PlacedAugmentation, console: Console
    ) -> None:
        self.recipe, self.plan, self.examples, self.console = recipe, decided, examples, console
        self._augmentation = augmentation
        self.task: Task = recipe.find_task()
        self.monitor = GpuMonitor()
        self.model = _build(recipe, decided, examples)
        self.phases: list[Phase] = []
        self.passes: list[PassReport] = []

    def fit(self, fit: Fit) -> None:
        """Trains the model with Keras' own fit."""
        training, data = self.recipe.training, self.recipe.data
        steps = epoch_steps(
            self.examples,
            training.global_batch_size,
            steps_per_epoch=training.steps_per_epoch,
            drop_remainder=training.drop_remainder,
            buckets=len(data.bucket_boundaries),
        )
        decided = replace(self.plan, config=_training_of(self.recipe, fit.name))
        with decided.scope():
            optimizer = make_optimizer(
                training,
                learning_rate=fit.learning_rate,
                steps=steps * fit.epochs,
                warmup_steps=round(steps * training.warmup_epochs) if fit.from_scratch else 0,
                averages=fit.from_scratch,
            )
        compile_model(
            self.model,
            decided,
            optimizer=optimizer,
            loss=self._loss(),
            metrics=self.task.metrics(self.examples),
            augment=self._augmentation.device,
        )
        options = {**data.pipeline_arguments(), "augment": self._augmentation.host}
        batches = decided.pipeline(self.examples, **options)
        history = self.model.fit(
            batches,
            validation_data=decided.pipeline(self.examples, training=False, **options),
            epochs=fit.epochs,
            steps_per_epoch=training.steps_per_epoch,
            shuffle=False,  # the pipeline shuffles
            verbose=0,
            callbacks=[*fit.callbacks, self.monitor, FitProgress(f"{fit.name:5}", console=self.console)],
        )
        check_weights(self.model, fit.name, batches)
        has_own_step = type(self.model).train_step is not keras.Model.train_step
        steps_taken = Ledger() if has_own_step else ledger(self.model)
        self.phases.append(
            Phase(
                name=fit.name,
                history={
                    name: [float(value) for value in values]
                    for name, values in history.history.items()
                    if name not in LOGGED  # the timeline of the report shows them
                },
                step_time_ms=steps_taken.step_time_ms,
                trace_seconds=steps_taken.trace_seconds,
                compile_seconds=steps_taken.compile_seconds,
            )
        )

    def _loss(self) -> Any:
        soft_loss = self.task.soft_loss
        of_shares = self._augmentation.needs_one_hot or are_shares(self.examples, self.task)
        make = soft_loss if soft_loss is not None and of_shares else self.task.loss
        return smoothed(make(self.examples), self.recipe.training.label_smoothing)

    def note(self, report: PassReport) -> None:
        """Records and prints the report of a pass."""
        self.passes.append(report)
        self.console.print(pass_summary(report))

    def calibration_data(self) -> Any:
        """Returns batches of training examples. The first ones are a fair sample; see Examples."""
        return with_float_inputs(self.examples.batches("train"), self.model)

    def gradient_data(self) -> Any:
        """Returns batches of training examples without augmentation, with the targets that the loss of a fit takes."""
        augment = self._augmentation.host or self._augmentation.device  # it makes shares of class numbers
        plain = replace(self.plan, epoch=EpochCounter())
        return plain.pipeline(self.examples, training=False, split="train", augment=augment)

    def measure_input(self) -> InputReport:
        """Measures the pipeline of the training, and how long a step would wait for it."""
        options = {**self.recipe.data.pipeline_arguments(), "augment": self._augmentation.host}
        with self.console.status("measuring the input pipeline"):
            report = measure(
                replace(self.plan, epoch=EpochCounter()).pipeline(self.examples, **options),
                step_time_ms=self.phases[0].step_time_ms,
                seconds=MEASURED_SECONDS,
            )
        wait = "" if report.wait_ms is None else f"; a training step waits {report.wait_ms:.3g} ms for its batch"
        print_line(f"input: {report.examples_per_second:,.0f} examples per second{wait}", self.console)
        return report

    def export(self, exported: Any, export_dir: Path, stage: Stage, baseline: str | None) -> None:
        """Exports what a stage returned."""
        target = export_dir / stage.artifact
        if baseline is None:
            remove_reports(export_dir)  # they would be of other artifacts
        with self.console.status(f"exporting {stage.artifact}"):
            artifact = export(
                exported,
                target,
                ExportConfig(int8_nodes=self.recipe.int8_nodes, float_weights="int8"),
                calibration_data=self.calibration_data(),
                evaluation_data=with_float_inputs(self.examples.batches("test", VERIFIED_AT_ONCE), self.model),
                baseline=None if baseline is None else export_dir / baseline,
            )
        print_line(f"exported {target}, {artifact.bytes_on_disk:,} bytes", self.console)
        if isinstance(exported, QuantizedModel) and artifact.report is not None and artifact.report != exported.report:
            self.passes[-1] = artifact.report  # the export has chosen the nodes that are faster in int8
            if pass_summary(artifact.report) != pass_summary(exported.report):
                self.console.print(pass_summary(artifact.report))


def _run(settings: Recipe, decided: Plan, export_dir: Path | None, console: Console) -> RunResult:
    examples = settings.data.load()
    augmentation = place_augmentation(settings, examples, decided)
    decisions = (*decided.decisions, *decide(examples, settings.data), *augmentation.decisions)
    console.print(PlanTable(decisions))
    for note in examples.notes:
        print_line(note, console)
    with _seeded(settings.training.seed):
        work = _Work(settings, decided, examples, augmentation, console)
        console.print(f"\n{work.model.name}: {work.model.count_params():,} parameters, {_sizes(examples)}\n")
        try:
            ran = stages(settings)
            if export_dir is not None or settings.quantization is not None:
                with console.status("trying the end of the run on the untrained model"):
                    rehearse(work, settings.quantization, exports=export_dir is not None)
            for stage in ran:
                exported = stage.run(work)
                if export_dir is not None:  # the baseline is float32, also after pruning
                    work.export(exported, export_dir, stage, None if stage is ran[0] else ran[0].artifact)
        finally:
            work.monitor.stop()
    receipts = {} if export_dir is None else _verify(work, export_dir, ran)
    report = RunReport(
        recipe=settings.name,
        description=settings.description,
        task=work.task.name,
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        environment=environment(),
        plan=decisions,
        phases=work.phases,
        utilization=work.monitor.utilization,
        input=None if export_dir is None or settings.data.service is not None else work.measure_input(),
        passes=work.passes,
        receipts=receipts,
    )
    if export_dir is not None:
        write_reports(report, export_dir, console)
    else:
        print_score(work.phases[-1], console)
    return RunResult(model=work.model, plan=decided, report=report, receipts=receipts, export_dir=export_dir)


def _verify(work: _Work, export_dir: Path, ran: Sequence[Stage]) -> dict[str, Receipt]:
    names = [stage.artifact for stage in ran]
    with work.console.status("verifying the artifacts, each in a fresh process"):
        receipts = verify_together(
            [export_dir / name for name in names],
            data=with_float_inputs(work.examples.batches("test", VERIFIED_AT_ONCE), work.model),
            metric=work.task.score(work.examples),
        )
    return dict(zip(names, receipts, strict=True))


def _sizes(examples: Examples) -> str:
    train, test = examples.size("train"), examples.size("test")
    known = [f"{count:,} to {what} on" for count, what in ((train, "train"), (test, "test")) if count is not None]
    return f"examples: {', '.join(known) or 'an unknown number'}"


def _training_of(settings: Recipe, phase: str) -> TrainingConfig:
    """Returns the training settings of one phase. Each phase has its own checkpoint directory."""
    training = settings.training
    if training.checkpoint_dir is None:
        return training
    # resume=True requires a checkpoint of the first phase. The run may have stopped before a later phase began.
    resume = "auto" if training.resume is True and phase != "train" else training.resume
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
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds Python, NumPy and TensorFlow, and restores the generators of Python and NumPy at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    keras.utils.set_random_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
