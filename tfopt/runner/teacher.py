"""The teacher of a run: a recipe of its own, a model on disk, or the parent, which the first stage has trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import keras

from tfopt.data import Examples
from tfopt.distillation import CachedTeacher, cache_teacher, distill, end_distillation
from tfopt.distillation.cached_teacher import OtherTeacherError, check_examples
from tfopt.distillation.config import PARENT, TeacherConfig
from tfopt.errors import ConfigError, unknown_name
from tfopt.graph import FrozenGraph
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.recipe import Recipe
from tfopt.recipes import FORMER_NAMES, RECIPES, find_recipe
from tfopt.report import PassReport


def teacher_recipe(settings: Recipe) -> Recipe | None:
    """Returns the recipe of a recipe's teacher; None without a teacher, or if it is the parent or a file.

    It has settings of its own, but the seed and the checkpoints of the run.

    Raises:
        ConfigError: There is no such recipe or file; or the recipe has no such form, or a teacher of its own.
    Example:
        >>> recipe = Recipe(name="mine", distillation=TeacherConfig(teacher="resnet_cifar"))
        >>> teacher_recipe(recipe).model.builder
        'resnet_cifar'
    """
    config, own = settings.distillation, settings.training
    if config is None or config.teacher == PARENT:
        return None
    if not config.teacher.endswith(".toml") and config.teacher not in {*RECIPES, *FORMER_NAMES}:
        if not Path(config.teacher).exists():
            raise unknown_name("recipe, file or directory of a teacher", config.teacher, (PARENT, *RECIPES))
        return None
    found = find_recipe(config.teacher)
    if config.teacher_form is not None:
        found = found.quick() if config.teacher_form == "quick" else found.form(config.teacher_form)
    if found.distillation is not None:
        raise ConfigError(
            f"teacher must be a recipe that learns from its labels alone. Received: teacher={config.teacher!r}, which "
            f"has the teacher {found.distillation.teacher!r}. Name that one, or the file of a trained model."
        )
    of_run = {each: getattr(own, each) for each in ("seed", "checkpoint_dir", "checkpoint_every", "resume")}
    return replace(found, training=replace(found.training, **of_run), forms={})


class Lessons:
    """What the fits of a run learn from a teacher.

    Args:
        config: The settings; None is a run without a teacher.
        examples: The training examples, whose outputs may be cached.
        note: Records the report of a pass.
    """

    def __init__(self, config: TeacherConfig | None, examples: Examples, note: Callable[[PassReport], None]) -> None:
        self._config, self._examples, self._note = config, examples, note
        self._teacher: FrozenGraph | CachedTeacher | str | None = None
        self._told: PassReport | None = None

    @property
    def from_parent(self) -> bool:
        return self._config is not None and self._config.teacher == PARENT

    def rehearse(self, student: keras.Model, untrained: keras.Model | None) -> None:
        """Raises before any training what the teacher would raise. `untrained` is one that the run will train."""
        config = self._config
        if config is None:
            return
        if config.teacher_cache is not None:
            check_examples(self._examples)
        distill(student, config.teacher if untrained is None else freeze_unfolded(untrained), config.distillation())
        end_distillation(student)
        if untrained is None:
            self._teacher = self._kept(config, config.teacher)

    def learn_from(self, model: keras.Model) -> None:
        """Makes a model that the run has trained the teacher of the next fits, as it is now."""
        if self._config is not None:
            self._teacher = self._kept(self._config, freeze_unfolded(model))

    @contextmanager
    def taught(self, student: keras.Model) -> Iterator[Examples]:
        """Lets a model learn from the teacher, if there is one yet, and gives the examples of the fit."""
        teacher, examples = self._teacher, self._examples
        if self._config is not None and teacher is not None:
            report = distill(student, teacher, self._config.distillation())
            if report != self._told:  # of an earlier fit
                self._note(report)
                self._told = report
            examples = teacher.examples if isinstance(teacher, CachedTeacher) else examples
        try:
            yield examples
        finally:
            end_distillation(student)

    def _kept(self, config: TeacherConfig, teacher: FrozenGraph | str) -> FrozenGraph | CachedTeacher | str:
        """Returns the teacher, or its outputs on disk if the recipe wants them there.

        Those of an earlier teacher are replaced if the run has trained a new one.
        """
        directory = config.teacher_cache
        if directory is None:
            return teacher
        try:
            cached = cache_teacher(teacher, self._examples, directory)
        except OtherTeacherError:
            if isinstance(teacher, str):
                raise
            cached = cache_teacher(teacher, self._examples, directory, overwrite=True)
        self._note(cached.report)
        return cached
