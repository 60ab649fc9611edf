"""What a student learns from layers inside of a teacher: pairs of layers, and the distance of their outputs.

The student runs once for each batch, however many of its layers are watched: in training and evaluation its `call` is
that of the same graph with the layers' outputs beside its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfopt.compat.layers import attach_layer, detach_layer, direct_layers, functional_class
from tfopt.compat.optimizers import inner_optimizer
from tfopt.compat.replace import wrap
from tfopt.compat.trainer import built_under
from tfopt.distillation.config import FeatureLoss, FeaturePair
from tfopt.errors import ConfigError, UnsupportedModelError, unknown_name

CALL = "call"


class FeatureDistance(keras.losses.Loss):
    """The distance of a layer's outputs from those of the teacher's layer, for each example.

    Args:
        kind: "mse" and "cosine" compare the outputs. "attention" compares where they are large: the mean of their
            squares over the channels, normalised over all places (Zagoruyko & Komodakis, "Paying More Attention to
            Attention", ICLR 2017, arXiv:1612.03928).
    """

    def __init__(self, kind: FeatureLoss, name: str) -> None:
        super().__init__(name=f"{name}_from_teacher")
        self.kind = kind

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the distances [batch] of outputs [batch, ..., channels]."""
        if self.kind == "attention":
            y_true, y_pred = _attention(y_true), _attention(y_pred)
        if self.kind == "cosine":
            similarity = ops.sum(_unit(y_true) * _unit(y_pred), axis=-1)
            return 1 - _mean_of_each(similarity)
        return _mean_of_each(ops.square(y_true - y_pred))


class RelationDistance(keras.losses.Loss):
    """The distance between the similarities of the examples of a batch, in the student and in the teacher.

    The similarities of an example are the products of its outputs with those of each example, as a vector of length 1.
    Only examples of one batch are compared, so it is a function of the whole batch.

    Reference:
        Tung & Mori, "Similarity-Preserving Knowledge Distillation", ICCV 2019, arXiv:1907.09682.
    """

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the distances [batch] of outputs [batch, ...], whose shapes may differ."""
        return ops.mean(ops.square(_similarities(y_true) - _similarities(y_pred)), axis=-1)


def make_distance(pair: FeaturePair) -> keras.losses.Loss:
    """Returns the distance of a pair of layers."""
    if pair.loss == "relations":
        return RelationDistance(name=f"{pair.student}_from_teacher")
    return FeatureDistance(pair.loss, pair.student)


def check_pairs(pairs: Sequence[FeaturePair], student: Any, teacher: Any) -> None:
    """Refuses pairs of layers that do not exist, or whose outputs cannot be compared."""
    graph, teacher = graph_of(student, "student"), graph_of(teacher, "teacher")
    if any(pair.projection for pair in pairs) and getattr(getattr(student, "optimizer", None), "built", False):
        raise ConfigError(
            "projection adds weights, so distill must come before the optimizer has its variables. Received: "
            f"{student.name!r}, which has been trained. Compile it again, without a fit, and distill."
        )
    for pair in pairs:
        own, other = output_of(graph, pair.student, "student"), output_of(teacher, pair.teacher, "teacher")
        one, two = tuple(own.shape)[1:], tuple(other.shape)[1:]
        if pair.projection and graph is not student:
            raise ConfigError(
                "projection needs a functional student: a Sequential would make it a layer of its own. Received: "
                f"{student.name!r}. Pass keras.Model(student.inputs, student.outputs), which has the same layers."
            )
        maps = pair.loss == "attention"
        any_width = maps or pair.projection
        fits = one[:-1] == two[:-1] and len(one) > maps if any_width else one == two
        if pair.loss == "relations" or fits:
            continue
        rule = "outputs of equal height and width (or length)" if any_width else "outputs of equal shapes"
        remedy = ""
        if not any_width and one[:-1] == two[:-1]:
            remedy = " loss='attention' takes other widths too." if len(one) > 1 else ""
            remedy += " projection=True trains a map between the widths."
        raise ConfigError(
            f"The layers of a pair must have {rule} with loss={pair.loss!r}. Received: {pair.student!r} {one} and "
            f"{pair.teacher!r} {two}. Choose other layers.{remedy}"
        )


def graph_of(model: Any, role: str) -> keras.Model:
    """Returns a model as a graph of its layers, which runs as the model does.

    Raises:
        UnsupportedModelError: It is no such model, or computes in a `call` of its own.
    """
    if isinstance(model, keras.Sequential) and model.built:
        return keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    graph_class = functional_class()
    if not isinstance(model, graph_class) or type(model).call is not graph_class.call:
        raise UnsupportedModelError(
            "A model whose layers are named in features must be functional or Sequential, and built, as a Keras model "
            f"or a .keras file. Received: the {role}, {type(model).__name__}. Leave features out."
        )
    return model


def output_of(model: keras.Model, layer: str, role: str) -> Any:
    """Returns the symbolic output of a layer of a graph."""
    names = [each.name for each in model.layers]
    if layer not in names:
        raise unknown_name(f"layer of the {role}", layer, names)
    if isinstance(model.get_layer(layer), keras.Model):
        raise ConfigError(
            f"A layer in features must not be a model. Received: {layer!r} of the {role}. Name another layer."
        )
    found = model.get_layer(layer).output
    if isinstance(found, list | tuple | dict):
        raise ConfigError(
            f"A layer in features must have one output. Received: {layer!r} of the {role} with {len(found)} of them."
        )
    return found


class Projection(keras.layers.Dense):
    """A linear map of a student's channels to those of the teacher. It trains with the student while it is attached."""


def make_projection(pair: FeaturePair, student: keras.Model, teacher: keras.Model) -> Projection | None:
    """Returns the map that a pair trains, or None."""
    if not pair.projection:
        return None
    width = output_of(graph_of(teacher, "teacher"), pair.teacher, "teacher").shape[-1]
    strategy = built_under(student)
    with strategy.scope() if strategy else contextlib.nullcontext():
        made = Projection(width, name=f"{pair.student}_to_teacher", dtype="float32")
        made.build(output_of(student, pair.student, "student").shape)
    return made


def attach(student: keras.Model, projections: Sequence[Projection]) -> None:
    """Lets a student train projections. Its files have the layers of its graph alone."""
    for each in projections:
        attach_layer(student, each)


def leave_out_of_files(optimizer: Any, projections: Sequence[Projection]) -> None:
    """Lets the files of an optimizer leave out what it keeps for projections, as those of the student leave these out.

    The student that is loaded has none, and Keras drops the state of an optimizer with another number of variables.
    """
    own = tuple(f"{variable.path.replace('/', '_')}_" for each in projections for variable in each.trainable_variables)

    def save(optimizer: Any, name: str, store: Any) -> None:
        kept = [variable for variable in optimizer.variables if not variable.name.startswith(own)]
        for number, variable in enumerate(kept):
            store[str(number)] = variable.numpy()

    for each in {id(each): each for each in (optimizer, inner_optimizer(optimizer))}.values():
        wrap(each, functools.partial(save, each), "save_own_variables")


def detach(student: keras.Model) -> None:
    """Takes all projections from a student."""
    for each in direct_layers(student):
        if isinstance(each, Projection):
            detach_layer(student, each)


class Watched:
    """A functional model that also keeps the outputs of some of its layers when it is called."""

    def __init__(self, model: keras.Model, layers: Sequence[str]) -> None:
        graph = graph_of(model, "student")
        outputs = [output_of(graph, name, "student") for name in layers]
        self._graph = keras.Model(graph.input, {"outputs": graph.output, "features": outputs})
        self._kept = threading.local()  # a strategy traces each replica in its own thread
        self._model = model

    def install(self) -> None:
        wrap(self._model, self._call, CALL)

    def _call(self, name: str, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        found = self._graph.call(inputs, training=training, mask=mask)
        self._kept.features = found["features"]
        return found["outputs"]

    def features(self) -> list[Any]:
        """Returns the outputs of the layers in the last call of this thread."""
        if not hasattr(self._kept, "features"):
            raise ConfigError(
                "features need a step that calls the whole model. Received: a pipeline over devices, or a train_step "
                "of the model's own. Leave features out."
            )
        found: list[Any] = self._kept.features
        return found


def _similarities(outputs: Any) -> Any:
    flat = ops.reshape(outputs, (ops.shape(outputs)[0], -1))
    return _unit(ops.matmul(flat, ops.transpose(flat)))


def _attention(outputs: Any) -> Any:
    places = ops.mean(ops.square(outputs), axis=-1)
    return _unit(ops.reshape(places, (ops.shape(places)[0], -1)))


def _unit(values: Any) -> Any:
    """Returns vectors of length 1. ops.normalize has no gradient at 0 under XLA."""
    return values * ops.rsqrt(ops.maximum(ops.sum(ops.square(values), axis=-1, keepdims=True), 1e-12))


def _mean_of_each(values: Any) -> Any:
    return ops.mean(values, axis=tuple(range(1, len(values.shape))))
