"""`tfopt.distill`, after which a model learns from a teacher in every `fit`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.replace import forget, unwrap, wrap
from tfopt.compat.trainer import added_loss
from tfopt.distillation.config import DistillationConfig, SoftLoss
from tfopt.distillation.features import CALL, FeatureDistance, Watched, check_pairs
from tfopt.distillation.losses import SIGMOID, SOFTMAX, TeacherLoss, targets_of
from tfopt.distillation.teacher import Teacher, inputs_by_name, read_teacher
from tfopt.errors import ConfigError, unknown_name
from tfopt.graph import FrozenGraph
from tfopt.graph.frozen import output_ops
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.report import Change, PassReport, Skip
from tfopt.settings.validation import check_type

METHOD = "compute_loss"
FITS = {"kl": SIGMOID, "binary": SOFTMAX}  # the last op that makes a loss wrong


def distill(
    student: keras.Model,
    teacher: keras.Model | str | Path | Sequence[Any],
    config: DistillationConfig | None = None,
    *,
    trusted: bool = False,
) -> PassReport:
    """Lets a model learn from a teacher, beside its labels, in every `fit` from now on.

    Compile the student as usual afterwards or before, with `tfopt.compile` or with Keras, and call `fit`. In training,
    its loss is that of `compile` and the distance from the teacher's outputs, by their weights. The teacher computes as
    at inference, once for each batch, after its augmentation, and has no gradients. Sample and class weights and masks
    count for both. `evaluate` and the validation show the loss of the labels. The teacher is in none of the student's
    files, weights and checkpoints.

    Args:
        student: A built Keras 3 model. Its class, layers and weights stay as they are.
        teacher: A built Keras model, a .keras file, an artifact or another SavedModel, or a sequence of these, whose
            probabilities (or values) are averaged. It takes and returns tensors of the student's shapes. It is read
            now: later changes of its weights do not count.
        config: The settings; None means DistillationConfig().
        trusted: Whether the teacher's source is trusted, as in ExportConfig.
    Returns: A report: the outputs that learn from the teacher, and those that do not.
    Raises:
        ConfigError: The teacher is the student, or has other inputs or outputs; or the loss does not fit an output.
        UnsupportedModelError: A model is not built, or the teacher touches files, the network or Python when it runs.
    Example:
        >>> student, teacher = (
        ...     keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)])
        ...     for units in (4, 64)
        ... )
        >>> print(distill(student, teacher, DistillationConfig(temperature=2.0)))
        distill: 1 changed, 0 skipped
          changed  output_0 (kl): from sequential..., temperature 2, weight 0.5

    Reference:
        Hinton, Vinyals & Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531.
    """
    config = DistillationConfig() if config is None else config
    check_type("config", config, DistillationConfig)
    check_keras_3(student)
    check_type("student", student, keras.Model)
    given = list(teacher) if isinstance(teacher, Sequence) and not isinstance(teacher, str) else [teacher]
    if not given or any(each is student for each in given):
        raise ConfigError(
            f"teacher must be another model than the student. Received: {'the student' if given else 'no model'}. "
            "For self-distillation, pass a trained copy: keras.models.clone_model, with the same weights."
        )
    frozen = freeze_unfolded(student, trusted=True)  # it is the caller's own
    kinds = _kinds(config, frozen)
    if config.features and len(given) > 1:
        raise ConfigError(
            f"features need one teacher, whose layers they name. Received: {len(given)} teachers. Leave features out, "
            "or pass one of them."
        )
    if config.features:
        given = [read_teacher(given[0], trusted=trusted)]
        check_pairs(config.features, student, given[0])
    layers = [pair.teacher for pair in config.features]
    teachers = [Teacher(each, frozen, layers, trusted=trusted) for each in given]
    losses = {}
    own = output_ops(frozen)
    for name, kind in kinds.items():
        shape = frozen.outputs[name][1].shape
        if kind == "kl" and shape.rank and shape[-1] == 1:
            raise ConfigError(
                f"loss='kl' needs two classes or more. Received: {name!r} {shape}, whose softmax is 1 always. Set "
                "loss='mse' for a value, or loss='binary' for a single logit."
            )
        for model, op in (("student", own[name]), *((each.name, each.ops[name]) for each in teachers)):
            if FITS.get(kind) == op:
                raise ConfigError(
                    f"loss={kind!r} does not fit outputs that a {op} computes. Received: {name!r} of {model!r}. "
                    f"Set loss={'binary' if kind == 'kl' else 'kl'!r}."
                )
        losses[name] = TeacherLoss(kind, config.temperature, own[name], name)
    made = _Distillation(student, frozen, teachers, losses, config)
    end_distillation(student)
    made.install()
    named = " and ".join(each.name for each in teachers)
    weight, heat = f"weight {config.weight:g}", f"temperature {config.temperature:g}"
    details = {name: [f"from {named}", *([] if kind == "mse" else [heat]), weight] for name, kind in kinds.items()}
    return PassReport(
        name="distill",
        changed=[
            *(Change(name=name, kind=kind, detail=", ".join(details[name])) for name, kind in kinds.items()),
            *(
                Change(name=each.student, kind=each.loss, detail=f"from {each.teacher}, weight {each.weight:g}")
                for each in config.features
            ),
        ],
        skipped=[
            Skip(name=name, kind="output", reason="left out by loss") for name in frozen.outputs if name not in kinds
        ],
    )


def end_distillation(student: keras.Model) -> None:
    """Lets a model learn from its labels alone again.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> end_distillation(model)
    """
    if METHOD in vars(student):
        unwrap(student, METHOD, CALL)


class _Distillation:
    """Computes the loss of a student with its teachers."""

    def __init__(
        self,
        student: keras.Model,
        frozen: FrozenGraph,
        teachers: Sequence[Teacher],
        losses: Mapping[str, TeacherLoss],
        config: DistillationConfig,
    ) -> None:
        self._student, self._frozen, self._teachers = student, frozen, teachers
        self._losses, self._weight, self._pairs = losses, config.weight, config.features
        self._distances = [FeatureDistance(pair.loss, pair.student) for pair in config.features]
        self._watched = Watched(student, [pair.student for pair in self._pairs]) if self._pairs else None

    def install(self) -> None:
        if self._watched is not None:
            self._watched.install()
        wrap(self._student, self._compute_loss, METHOD)
        forget(self._student)

    def _compute_loss(
        self,
        name: str,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        student = self._student

        def of_labels() -> Any:
            own = type(student).compute_loss
            more = {"training": training} if "training" in inspect.signature(own).parameters else {}
            return own(student, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **more)

        if not training or not self._weight:
            return of_labels()
        if x is None:
            raise ConfigError(
                "compute_loss must be given x, for the teacher. Received: x=None, from the train_step of "
                f"{type(student).__name__}. Pass x=x there."
            )
        of_teacher = self._of_teacher(x, y_pred, sample_weight)
        for loss in student.losses:  # regularization does not depend on who teaches
            of_teacher += ops.cast(added_loss(student, loss), of_teacher.dtype)
        if student.loss is None and type(student).compute_loss is keras.Model.compute_loss:
            return of_teacher
        return (1 - self._weight) * of_labels() + self._weight * of_teacher

    def _of_teacher(self, x: Any, y_pred: Any, sample_weight: Any) -> Any:
        inputs = inputs_by_name(x, self._frozen)
        answers = [each.outputs(inputs) for each in self._teachers]
        taught = [outputs for outputs, _ in answers]
        predicted = _by_name(y_pred, self._frozen)
        weights = _by_name(sample_weight, self._frozen)
        total = 0.0
        for name, loss in self._losses.items():
            outputs, kinds = [each[name] for each in taught], [each.ops[name] for each in self._teachers]
            targets = targets_of(outputs, kinds, loss.kind, loss.temperature)
            total += loss(targets, predicted[name], weights.get(name))
        if self._watched is not None:
            of_examples = sample_weight if _is_of_examples(sample_weight) else None
            parts = zip(self._pairs, self._distances, answers[0][1], self._watched.features(), strict=True)
            for pair, distance, other, own in parts:
                own = tf.identity(ops.cast(own, "float32"))  # without its mask, which is that of single places
                total += pair.weight * distance(ops.cast(other, "float32"), own, of_examples)
        return total


def _kinds(config: DistillationConfig, student: FrozenGraph) -> dict[str, SoftLoss]:
    if not isinstance(config.loss, Mapping):
        return dict.fromkeys(student.outputs, config.loss)
    for name in config.loss:
        if name not in student.outputs:
            raise unknown_name("output in loss", name, student.outputs)
    found = {name: kind for name, kind in config.loss.items() if kind is not None}
    if not found:
        raise ConfigError(
            f"loss must name an output that learns from the teacher. Received: loss={dict(config.loss)!r}. The outputs "
            f"are {', '.join(student.outputs)}."
        )
    return found


def _is_of_examples(weights: Any) -> bool:
    return weights is not None and not keras.tree.is_nested(weights) and len(weights.shape) == 1


def _by_name(values: Any, student: FrozenGraph) -> dict[str, Any]:
    """Returns outputs, or their weights, by name: those of a dict, one for all, or in the model's order."""
    if isinstance(values, Mapping) and values.keys() <= student.outputs.keys():
        return dict(values)
    if not keras.tree.is_nested(values):
        return dict.fromkeys(student.outputs, values)
    return dict(zip(student.outputs, keras.tree.flatten(values), strict=False))
