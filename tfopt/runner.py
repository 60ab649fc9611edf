"""Runs a recipe: plan, data, training, pruning, quantization, export, verification, report."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.markup import escape

from tfopt.atomic.directories import check_target, exclusive
from tfopt.atomic.files import write_text
from tfopt.data import Examples
from tfopt.errors import UnsupportedModelError
from tfopt.exporting import ExportConfig, export, verify_together
from tfopt.hardware import detect
from tfopt.profiling import GpuMonitor
from tfopt.pruning import PruningSchedule
from tfopt.pruning.weights import find_weights
from tfopt.quantization import quantize
from tfopt.recipe import Recipe
from tfopt.recipes import find_recipe
from tfopt.report import PassReport, Phase, Receipt, RunReport
from tfopt.reporting.progress import FitProgress
from tfopt.reporting.terminal import PlanTable, ReceiptsTable, pass_summary
from tfopt.training import Ledger, Plan, TrainingConfig, ledger, plan
from tfopt.training import compile as compile_model
from tfopt.training.checkpointing.store import check_mode


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        model: The trained Keras model, pruned if the recipe prunes.
        plan: The plan of the training.
        report: The results and measurements of all stages, as plain records.
        receipts: The receipt of each artifact by name ("float32", "pruned", "int8"); empty without an export.
        export_dir: Directory of the artifacts, receipts.json and report.html; None without an export.
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


def run(recipe: Recipe | str | Path, *, quick: bool = False, console: Console | None = None) -> RunResult:
    """Runs a recipe from training to the report.

    Exports the trained model as float32/. If the recipe prunes or quantizes, also exports the pruned model as pruned/
    and the quantized model as int8/. Verifies each artifact in a fresh process, and writes receipts.json and
    report.html beside them.

    Args:
        recipe: A recipe, its name, or a .toml file.
        quick: Whether to make a short trial run: few epochs on few examples, with another export directory.
        console: Console for the progress. None means standard output.
    Raises:
        ConfigError: The recipe or its plan is wrong.
        ExportError: The export directory cannot be written. This is checked before training.
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
    console = console or Console()
    export_dir = None if settings.export_dir is None else Path(settings.export_dir)
    if export_dir is not None:
        for name in _artifacts(settings):
            check_target(export_dir / name)
    for phase in _phases(settings):
        own = _training_of(settings, phase)
        if own.checkpoint_dir is not None:  # an error is raised before any phase trains
            check_mode(own.checkpoint_dir, own.resume)
    console.print(f"[bold]{escape(settings.name)}[/bold]  {escape(settings.description)}\n")
    decided = plan(settings)
    if not decided.is_chief:  # this worker trains the same weights; the chief exports them
        return _run(settings, decided, None, Console(quiet=True))
    with exclusive(export_dir) if export_dir is not None else contextlib.nullcontext():
        return _run(settings, decided, export_dir, console)


def _artifacts(settings: Recipe) -> list[str]:
    """Returns the names of the artifacts that a recipe exports, in their order."""
    return ["float32", *(["pruned"] if settings.pruning else []), *(["int8"] if settings.quantization else [])]


def _phases(settings: Recipe) -> list[str]:
    """Returns the names of the training phases of a recipe, in their order."""
    trains_quantized = settings.quantization is not None and settings.quantization.training
    return ["train", *(["prune"] if settings.pruning else []), *(["quantize"] if trains_quantized else [])]


def _training_of(settings: Recipe, phase: str) -> TrainingConfig:
    """Returns the training settings of one phase. Each phase has its own checkpoint directory."""
    training = settings.training
    if training.checkpoint_dir is None:
        return training
    # resume=True requires a checkpoint of the first phase. The run may have stopped before a later phase began.
    resume = "auto" if training.resume is True and phase != "train" else training.resume
    return replace(training, checkpoint_dir=str(Path(training.checkpoint_dir) / phase), resume=resume)


def _run(settings: Recipe, decided: Plan, export_dir: Path | None, console: Console) -> RunResult:
    console.print(PlanTable(decided.decisions))
    examples = settings.data.load()
    monitor = GpuMonitor()
    phases: list[Phase] = []
    passes: list[PassReport] = []
    with _seeded(settings.training.seed):
        model = _build(settings, decided, examples)
        console.print(
            f"\n{model.name}: {model.count_params():,} parameters, {len(examples.x_train):,} examples to train on, "
            f"{len(examples.x_test):,} to test on\n"
        )
        try:
            phases.append(_fit(model, decided, settings, examples, "train", [monitor], console))
            if export_dir is not None:
                _export(model, export_dir, "float32", examples, console)
            if settings.pruning is not None:
                schedule = PruningSchedule(model, settings.pruning)
                phases.append(_fit(model, decided, settings, examples, "prune", [schedule, monitor], console))
                assert schedule.report is not None  # the fit has ended
                passes.append(schedule.report)
                console.print(pass_summary(schedule.report))
                if export_dir is not None:
                    _export(model, export_dir, "pruned", examples, console, baseline="float32")
            quantization = settings.quantization
            if quantization is not None and quantization.training:
                with decided.scope():
                    model = quantize(model, quantization, calibration_data=examples.x_train)
                phases.append(_fit(model, decided, settings, examples, "quantize", [monitor], console))
                quantization = None  # the ranges are in the model
        finally:
            monitor.stop()
        if settings.quantization is not None:
            labelled = (examples.x_train, examples.y_train)
            quantized = quantize(model, quantization, calibration_data=labelled)
            passes.append(quantized.report)
            console.print(pass_summary(quantized.report))
            if export_dir is not None:  # the baseline is float32, also after pruning
                _export(quantized, export_dir, "int8", examples, console, baseline="float32")
    receipts: dict[str, Receipt] = {}
    if export_dir is not None:
        with console.status("verifying the artifacts, each in a fresh process"):
            names = _artifacts(settings)
            paths = [export_dir / name for name in names]
            receipts = dict(zip(names, verify_together(paths, data=(examples.x_test, examples.y_test)), strict=True))
    report = RunReport(
        recipe=settings.name,
        description=settings.description,
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        environment=_environment(),
        plan=decided.decisions,
        phases=phases,
        utilization=monitor.utilization,
        passes=passes,
        receipts=receipts,
    )
    if export_dir is not None:
        _write_reports(report, export_dir, console)
    else:
        console.print(
            f"\naccuracy on the test examples: {phases[-1].history['val_accuracy'][-1]:.2%}; nothing exported"
        )
    return RunResult(model=model, plan=decided, report=report, receipts=receipts, export_dir=export_dir)


def _build(settings: Recipe, decided: Plan, examples: Examples) -> keras.Model:
    with decided.scope():
        model = settings.model.build(examples.input_shape, examples.outputs)
    if not isinstance(model, keras.Model) or not model.built:
        raise UnsupportedModelError(
            f"The builder must return a built Keras 3 model. Received: {model!r} from {settings.model.builder!r}. "
            "Begin the model with keras.Input, or call it once on a batch."
        )
    if settings.pruning is not None:
        find_weights(model, settings.pruning.exclude)  # raises its errors before the training
    return model


def _fit(
    model: keras.Model,
    decided: Plan,
    settings: Recipe,
    examples: Examples,
    phase: str,
    callbacks: list[keras.callbacks.Callback],
    console: Console,
) -> Phase:
    """Runs one phase with Keras' own fit: training, pruning with fine-tuning, or training with fake quantization."""
    training = settings.training
    epochs, rate = training.epochs, training.learning_rate
    if phase == "prune":
        assert settings.pruning is not None
        epochs = settings.pruning.epochs
        rate = settings.pruning.learning_rate or training.learning_rate
    elif phase == "quantize":
        assert settings.quantization is not None
        epochs = settings.quantization.epochs
        rate = settings.quantization.learning_rate or training.learning_rate
    steps = -(-len(examples.x_train) // training.global_batch_size) * epochs
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps) if training.decay == "cosine" else rate
    optimizer = training.optimizer
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": schedule}})
    else:  # a new optimizer: its slots belong to one fit of one model
        optimizer = type(optimizer).from_config(optimizer.get_config())
    decided = replace(decided, config=_training_of(settings, phase))
    compile_model(
        model,
        decided,
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        decided.pipeline((examples.x_train, examples.y_train), random_shift=settings.data.random_shift),
        validation_data=decided.pipeline((examples.x_test, examples.y_test), training=False),
        epochs=epochs,
        shuffle=False,  # the pipeline shuffles
        verbose=0,
        callbacks=[*callbacks, FitProgress(f"{phase:5}", console=console)],
    )
    has_own_step = type(model).train_step is not keras.Model.train_step
    steps_taken = Ledger() if has_own_step else ledger(model)
    return Phase(
        name=phase,
        history={name: [float(value) for value in values] for name, values in history.history.items()},
        step_time_ms=steps_taken.step_time_ms,
        trace_seconds=steps_taken.trace_seconds,
        compile_seconds=steps_taken.compile_seconds,
    )


def _export(
    model: Any, export_dir: Path, name: str, examples: Examples, console: Console, baseline: str | None = None
) -> None:
    with console.status(f"exporting {name}"):
        artifact = export(
            model,
            export_dir / name,
            ExportConfig(int8_nodes="all"),  # the same nodes in every run, and the smallest artifact
            calibration_data=examples.x_train,
            baseline=None if baseline is None else export_dir / baseline,
        )
    _print_line(f"exported {export_dir / name}, {artifact.bytes_on_disk:,} bytes", console)


def _write_reports(report: RunReport, export_dir: Path, console: Console) -> None:
    from tfopt.reporting.html_page import write_html  # here, because it imports matplotlib

    receipts = {name: receipt.to_dict() for name, receipt in report.receipts.items()}
    write_text(export_dir / "receipts.json", json.dumps(receipts, indent=2))
    page = write_html(report, export_dir / "report.html")
    console.print()
    console.print(ReceiptsTable(report.receipts))
    for receipt in report.receipts.values():
        for problem in receipt.problems:
            _print_line(f"{receipt.artifact}: {problem}", console, style="red")
    for name in sorted({"float32", "pruned", "int8"} - set(report.receipts)):
        if (export_dir / name).exists():
            _print_line(f"{export_dir / name} is from an earlier run", console)
    _print_line(f"\nreport: {page}", console)


def _print_line(words: str, console: Console, style: str | None = None) -> None:
    """Prints a line with a path, which must not be wrapped or read as markup."""
    console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)


def _environment() -> dict[str, str]:
    hardware = detect()
    return {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "Python": platform.python_version(),
        "processor": f"{hardware.cpu_model or 'unknown'}, {hardware.logical_cores} cores",
        "GPU": ", ".join(gpu.name for gpu in hardware.gpus) or "none",
    }


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
