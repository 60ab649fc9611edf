"""Diagnosis of a recipe: trains it for some steps, and can change its settings and measure again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from tfopt.diagnosis.diagnose import DoctorHook, report
from tfopt.distillation.config import PARENT
from tfopt.recipe import Recipe
from tfopt.recipe.changes import with_changes
from tfopt.recipe.tables import nested
from tfopt.report import DiagnosisReport
from tfopt.runner.recipe_run import run
from tfopt.runner.teacher import teacher_recipe
from tfopt.scripts.hook import hooked

# Epochs within which the steps to watch should be done. Causes such as a missing cache show from the second on.
EPOCHS = 8


def diagnose_recipe(recipe: Recipe, *, steps: int = 100, trace_dir: str | None = None) -> DiagnosisReport:
    """Trains a recipe for some steps without compressing or exporting anything, and says what holds it back.

    With a directory, TensorFlow's profiler records a trace of some steps there. A teacher that the run would train is
    left out; one on disk runs in the steps.

    Raises:
        ConfigError: The recipe or its plan is wrong.
        TrainingError: The training is too short to measure.
    """
    training = replace(recipe.training, epochs=EPOCHS, checkpoint_dir=None)
    off: dict[str, Any] = dict.fromkeys(("shrink", "pruning", "clustering", "quantization", "export_dir"))
    if recipe.distillation is not None and (recipe.distillation.teacher == PARENT or teacher_recipe(recipe)):
        off["distillation"] = None  # such a teacher would be trained first
    watched = replace(recipe, **off, training=training, forms={})  # a form may need what is off
    doctor = DoctorHook(steps, stops=True)
    with hooked(doctor):
        run(watched, console=Console(quiet=True))
    return report(doctor.observation, recipe.name, trace_dir)


def apply_advice(recipe: Recipe, found: DiagnosisReport) -> tuple[Recipe, dict[str, Any]]:
    """Returns a recipe with the settings of the diagnoses, and these settings.

    Advice that changes what the model learns, such as another batch size, is not applied.
    """
    changes: dict[str, Any] = {}
    for each in found.diagnoses:
        if not each.changes_training:
            changes |= each.settings
    return with_changes(recipe, nested(changes.items())), changes
