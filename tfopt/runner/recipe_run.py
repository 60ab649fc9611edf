"""Runs a recipe: plan, examples, stages, verification, report."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from rich.markup import escape

from tfopt.atomic.directories import check_target, exclusive
from tfopt.data import EpochCounter, Examples, decide
from tfopt.exporting import verify_together
from tfopt.recipe import Recipe
from tfopt.recipe.kept import Reason, with_kept
from tfopt.recipes import find_recipe
from tfopt.report import Decision, Receipt, RunReport
from tfopt.reporting.terminal import PlanTable
from tfopt.runner.model_check import with_float_inputs
from tfopt.runner.run_report import RunResult, check_reports, environment, print_line, print_score, write_reports
from tfopt.runner.stages import artifacts, rehearse, stages
from tfopt.runner.teacher import teacher_recipe
from tfopt.runner.work import VERIFIED_AT_ONCE, Work, begin, place_augmentation, training_of
from tfopt.terminal import PrintableConsole
from tfopt.training import Plan, plan
from tfopt.training.checkpointing.store import check_mode


def run(recipe: Recipe | str | Path, *, quick: bool = False, console: Console | None = None) -> RunResult:
    """Runs a recipe from training to the report.

    Exports the trained model as float32/. If the recipe shrinks, prunes, clusters or quantizes, also exports the
    results of these stages as shrunk/, pruned/, clustered/ and int8/. A teacher that is a recipe is trained first, and
    exported as teacher/. Verifies each artifact in a fresh process, and writes receipts.json and report.html beside
    them.

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
        for name in artifacts(settings):
            check_target(export_dir / name)
        check_reports(export_dir)
    for phase in (phase for stage in stages(settings) for phase in stage.fits):
        own = training_of(settings, phase)
        if own.checkpoint_dir is not None:  # an error is raised before any stage trains
            check_mode(own.checkpoint_dir, own.resume)
    console.print(f"[bold]{escape(settings.name)}[/bold]  {escape(settings.description)}\n")
    settings, reasons = with_kept(settings)
    decided = plan(settings)
    decided = replace(decided, decisions=told(decided.decisions, reasons))
    if not decided.is_chief:  # this worker trains the same weights; the chief exports them
        return _run(settings, decided, None, Console(quiet=True), reasons)
    with exclusive(export_dir) if export_dir is not None else contextlib.nullcontext():
        return _run(settings, decided, export_dir, console, reasons)


def told(decisions: Sequence[Decision], reasons: Mapping[str, Reason]) -> tuple[Decision, ...]:
    """Returns decisions with other reasons for the settings that have the value of the reason."""
    return tuple(
        replace(each, reason=why.words) if (why := reasons.get(each.setting)) and why.value == each.value else each
        for each in decisions
    )


def _begin(
    settings: Recipe,
    decided: Plan,
    console: Console,
    teacher: Work | None = None,
    reasons: Mapping[str, Reason] | None = None,
) -> tuple[Work, tuple[Decision, ...]]:
    """Returns a run before its first stage, and all decisions. The seed decides the first weights of its model."""
    examples = settings.data.load()
    augmentation, places = place_augmentation(settings, examples, decided)
    decisions = told((*decided.decisions, *decide(examples, settings.data), *places), reasons or {})
    console.print(PlanTable(decisions))
    for note in examples.notes:
        print_line(note, console)
    keras.utils.set_random_seed(settings.training.seed)
    work = begin(settings, decided, examples, augmentation, places, console, teacher)
    console.print(f"\n{work.model.name}: {work.model.count_params():,} parameters, {_sizes(examples)}\n")
    return work, decisions


def _begin_teacher(settings: Recipe, decided: Plan, console: Console) -> Work | None:
    """Returns the run of a teacher that is a recipe, under the plan of the run, but with its own settings."""
    recipe = teacher_recipe(settings)
    if recipe is None:
        return None
    console.print(f"[bold]teacher: {escape(recipe.name)}[/bold]  {escape(recipe.description)}\n")
    own = replace(decided, config=recipe.training, data=recipe.data, decisions=(), epoch=EpochCounter())
    return _begin(recipe, own, console)[0]


def _run(
    settings: Recipe, decided: Plan, export_dir: Path | None, console: Console, reasons: Mapping[str, Reason]
) -> RunResult:
    with _generators_restored():
        teacher = _begin_teacher(settings, decided, console)
        work, decisions = _begin(settings, decided, console, teacher, reasons)
        baseline = None
        try:
            ran = stages(settings)
            if export_dir is not None or settings.quantization is not None:
                with console.status("trying the end of the run on the untrained model"):
                    rehearse(work, settings.quantization, exports=export_dir is not None)
            work.try_teacher()
            for stage in ran:
                exported = stage.run(work)
                if export_dir is not None:
                    work.export(exported, export_dir, stage.artifact, baseline, stage.precision)
                baseline = stage.artifact if stage.is_baseline else baseline
        finally:
            work.monitor.stop()
    receipts = {} if export_dir is None else _verify(work, export_dir)
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
    return RunResult(model=work.model, plan=work.plan, report=report, receipts=receipts, export_dir=export_dir)


def _verify(work: Work, export_dir: Path) -> dict[str, Receipt]:
    names = artifacts(work.recipe)
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


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    """Restores the generators of Python and NumPy at the end, which a run seeds."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
