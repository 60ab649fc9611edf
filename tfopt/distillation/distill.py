"""`tfopt.distill`, after which a model learns from a teacher in every `fit`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfopt.compat.kinds import check_keras_3
from tfopt.compat.replace import forget, unwrap, wrap
from tfopt.compat.trainer import added_loss
from tfopt.data.augment.augmentation import LABELS, OF_TEACHER
from tfopt.distillation.cached_teacher import FILE, CachedTeacher, RecordedTeacher
from tfopt.distillation.config import DistillationConfig, SoftLoss
from tfopt.distillation.features import (
    CALL,
    Projection,
    RelationDistance,
    Watched,
    attach,
    check_pairs,
    detach,
    leave_out_of_files,
    make_distance,
    make_projection,
)
from tfopt.distillation.losses import SIGMOID, SOFTMAX, TeacherLoss, targets_of
from tfopt.distillation.teacher import Teacher, inputs_by_name, read_teacher
from tfopt.errors import ConfigError, unknown_name
from tfopt.graph import FrozenGraph
from tfopt.graph.output_ops import output_ops
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.report import Change, PassReport, Skip
from tfopt.settings.validation import check_type

METHOD, METRICS = "compute_loss", "compute_metrics"
FITS = {"kl": SIGMOID, "binary": SOFTMAX}  # the last op that makes a loss wrong


def distill(
    student: keras.Model,
    teacher: keras.Model | str | Path | CachedTeacher | Sequence[Any],
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
            probabilities (or values) are averaged; or what `tfopt.cache_teacher` returned. It takes and returns tensors
            of the student's shapes. It is read now: later changes of its weights do not count.
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
    if not given:
        raise ConfigError("teacher must be a model or several. Received: an empty sequence. Pass at least one.")
    if any(each is student for each in given):
        raise ConfigError(
            "teacher must be another model than the student. Received: the student. "
            "For self-distillation, pass a trained copy: keras.models.clone_model, with the same weights."
        )
    frozen = freeze_unfolded(student, trusted=True)  # it is the caller's own
    kinds = _kinds(config, student, frozen)
    _check_cached(given, config, kinds)
    _check_order(student, given)
    _check_weight(config.weight)
    if config.features and len(given) > 1:
        raise ConfigError(
            f"features need one teacher, whose layers they name. Received: {len(given)} teachers. Leave features out, "
            "or pass one of them."
        )
    if config.features:
        given = [read_teacher(given[0], trusted=trusted)]
        check_pairs(config.features, student, given[0])
    layers = [pair.teacher for pair in config.features]
    teachers = [
        RecordedTeacher(each, frozen)
        if isinstance(each, CachedTeacher)
        else Teacher(each, frozen, layers, trusted=trusted)
        for each in given
    ]
    projections = [make_projection(pair, student, given[0]) for pair in config.features]
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
    made = _Distillation(student, frozen, teachers, losses, config, projections)
    end_distillation(student)
    made.install()
    named = " and ".join(each.name for each in teachers)
    weight, heat = f"weight {_shown(config.weight)}", f"temperature {config.temperature:g}"
    details = {name: [f"from {named}", *([] if kind == "mse" else [heat]), weight] for name, kind in kinds.items()}
    return PassReport(
        name="distill",
        changed=[
            *(Change(name=name, kind=kind, detail=", ".join(details[name])) for name, kind in kinds.items()),
            *(
                Change(name=each.student, kind=each.loss, detail=f"from {each.teacher}, weight {_shown(each.weight)}")
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
        unwrap(student, METHOD, METRICS, CALL)
        detach(student)


class _Distillation:
    """Computes the loss of a student with its teachers."""

    def __init__(
        self,
        student: keras.Model,
        frozen: FrozenGraph,
        teachers: Sequence[Teacher | RecordedTeacher],
        losses: Mapping[str, TeacherLoss],
        config: DistillationConfig,
        projections: Sequence[Projection | None],
    ) -> None:
        self._student, self._frozen, self._teachers = student, frozen, teachers
        self._losses, self._weight, self._pairs = losses, config.weight, config.features
        self._distances, self._projections = [make_distance(pair) for pair in config.features], projections
        self._watched = Watched(student, [pair.student for pair in self._pairs]) if self._pairs else None

    def install(self) -> None:
        if self._watched is not None:
            self._watched.install()
        attach(self._student, [each for each in self._projections if each is not None])
        wrap(self._student, self._compute_loss, METHOD)
        of_whole_batch = [each for each in self._distances if isinstance(each, RelationDistance)]
        vars(self._student)[METHOD].of_whole_batch = of_whole_batch  # a step that divides batches refuses them
        if self._is_recorded:
            wrap(self._student, self._compute_metrics, METRICS)
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
        y, rows = _separated(y)

        def of_labels() -> Any:
            own = type(student).compute_loss
            more = {"training": training} if "training" in inspect.signature(own).parameters else {}
            return own(student, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **more)

        # A model without a loss of its own has that of its teacher to evaluate with.
        alone = student.loss is None and type(student).compute_loss is keras.Model.compute_loss
        if self._weight == 0 or not (training or alone):
            return of_labels()
        if x is None and not self._is_recorded:
            raise ConfigError(
                "compute_loss must be given x, for the teacher. Received: x=None, from the train_step of "
                f"{type(student).__name__}. Pass x=x there."
            )
        if self._has_projections:  # the optimizer may be newer than the distillation
            leave_out_of_files(student.optimizer, [each for each in self._projections if each is not None])
        of_teacher = self._of_teacher(x, rows, y_pred, sample_weight)
        for loss in student.losses:  # regularization does not depend on who teaches
            of_teacher += ops.cast(added_loss(student, loss), of_teacher.dtype)
        if alone:
            return of_teacher
        weight = self._now(self._weight)
        return (1 - weight) * of_labels() + weight * of_teacher

    def _compute_metrics(self, name: str, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return type(self._student).compute_metrics(self._student, x, _separated(y)[0], y_pred, sample_weight)

    @property
    def _is_recorded(self) -> bool:
        return isinstance(self._teachers[0], RecordedTeacher)

    @property
    def _has_projections(self) -> bool:
        return any(each is not None for each in self._projections)

    def _now(self, weight: float | Callable[[Any], Any]) -> Any:
        """Returns a weight at the present step, which the optimizer counts and a checkpoint holds."""
        if not callable(weight):
            return weight
        return ops.cast(weight(ops.convert_to_tensor(self._student.optimizer.iterations)), "float32")

    def _answers(self, x: Any, rows: Any) -> list[tuple[dict[str, Any], list[Any]]]:
        """Returns the outputs of each teacher by the student's names, and those of its layers."""
        if not self._is_recorded:
            inputs = inputs_by_name(x, self._frozen)
            return [each.outputs(inputs) for each in self._teachers if isinstance(each, Teacher)]
        if rows is None:
            raise ConfigError(
                "The batches must bring the outputs of a cached teacher along. Received: batches without them. Make "
                "them of the examples of the cached teacher: plan.pipeline(cached.examples)."
            )
        return [(each.recorded(rows), []) for each in self._teachers if isinstance(each, RecordedTeacher)]

    def _of_teacher(self, x: Any, rows: Any, y_pred: Any, sample_weight: Any) -> Any:
        answers = self._answers(x, rows)
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
            watched = zip(answers[0][1], self._watched.features(), strict=True)
            parts = zip(self._pairs, self._distances, self._projections, watched, strict=True)
            for pair, distance, projection, (other, own) in parts:
                own = tf.identity(ops.cast(own, "float32"))  # without its mask, which is that of single places
                own = own if projection is None else projection(own)
                total += self._now(pair.weight) * distance(ops.cast(other, "float32"), own, of_examples)
        return total


def _kinds(config: DistillationConfig, model: keras.Model, student: FrozenGraph) -> dict[str, SoftLoss]:
    if not isinstance(config.loss, Mapping):
        return dict.fromkeys(student.outputs, config.loss)
    own = _output_names(model)
    of_keras = dict(zip(own, student.outputs, strict=True)) if len(own) == len(student.outputs) else {}
    for name in config.loss:
        if name not in student.outputs and name not in of_keras:
            raise unknown_name("output in loss", name, [*student.outputs, *of_keras])
    found = {
        name if name in student.outputs else of_keras[name]: kind
        for name, kind in config.loss.items()
        if kind is not None
    }
    if not found:
        raise ConfigError(
            f"loss must name an output that learns from the teacher. Received: loss={dict(config.loss)!r}. The outputs "
            f"are {', '.join(student.outputs)}."
        )
    return found


def _output_names(model: Any) -> list[str]:
    """Returns the names of a model's outputs in Keras, in their order; none of a subclassed model."""
    return list(getattr(model, "output_names", None) or ())


def _check_order(student: keras.Model, given: Sequence[Any]) -> None:
    """Refuses lists of the same outputs in another order, which would be paired by their places."""
    own = _output_names(student)
    for each in given:
        other = _output_names(each) if isinstance(each, keras.Model) else []
        by_place = not any(isinstance(getattr(model, "output", None), Mapping) for model in (student, each))
        if by_place and other != own and sorted(other) == sorted(own):
            raise ConfigError(
                "The outputs of student and teacher must be in the same order, or in dicts. Received: "
                f"{own} of {student.name!r}, {other} of {each.name!r}. Make one of them again with its outputs in the "
                "order of the other."
            )


def _check_weight(weight: float | Callable[[Any], Any]) -> None:
    """Refuses a function of the step that cannot be in the step's graph, or starts outside of 0 to 1."""
    if not callable(weight):
        return
    try:
        first = float(tf.function(weight, autograph=False)(tf.constant(0)))
    except Exception as error:  # of the user's own function
        raise ConfigError(
            "weight must be a function that TensorFlow can trace. Received: "
            f"{_shown(weight)}, which raises {type(error).__name__}. The step is a tensor: compare it with tf.where."
        ) from error
    if not 0 <= first <= 1:
        raise ConfigError(
            f"weight must be from 0 to 1 at each step. Received: {first:g} at step 0, from {_shown(weight)}. Divide it "
            "by its largest value."
        )


def _check_cached(given: Sequence[Any], config: DistillationConfig, kinds: Mapping[str, SoftLoss]) -> None:
    for each in given:
        if isinstance(each, (str, Path)) and Path(each, FILE).is_file():
            raise ConfigError(
                f"teacher must be what tfopt.cache_teacher returned, not its directory. Received: {str(each)!r}. Call "
                "tfopt.cache_teacher with the teacher, its examples and that directory: it computes nothing again."
            )
    cached = [each for each in given if isinstance(each, CachedTeacher)]
    if not cached:
        return
    received = ""
    if len(given) > 1:
        received = f"{len(given)} teachers. Cache the outputs of a keras.Model that averages them"
    elif config.features:
        received = "features, whose layers it does not hold. Leave them out, or distill with the teacher itself"
    elif cached[0].top_k is not None and set(kinds.values()) != {"kl"}:
        received = f"top_k={cached[0].top_k} with loss={config.loss!r}, which needs all outputs. Cache with top_k=None"
    if received:
        raise ConfigError(f"A cached teacher must teach alone, its outputs only. Received: {received}.")


def _separated(y: Any) -> tuple[Any, Any]:
    """Returns the labels, and the outputs of a cached teacher that came with them, or None."""
    if isinstance(y, Mapping) and y.keys() == {LABELS, OF_TEACHER}:
        return y[LABELS], y[OF_TEACHER]
    return y, None


def _shown(weight: Any) -> str:
    return f"{getattr(weight, '__name__', type(weight).__name__)} of the step" if callable(weight) else f"{weight:g}"


def _is_of_examples(weights: Any) -> bool:
    return weights is not None and not keras.tree.is_nested(weights) and len(weights.shape) == 1


def _by_name(values: Any, student: FrozenGraph) -> dict[str, Any]:
    """Returns outputs, or their weights, by name: those of a dict, one for all, or in the model's order."""
    if isinstance(values, Mapping) and values.keys() <= student.outputs.keys():
        return dict(values)
    if not keras.tree.is_nested(values):
        return dict.fromkeys(student.outputs, values)
    return dict(zip(student.outputs, keras.tree.flatten(values), strict=False))
