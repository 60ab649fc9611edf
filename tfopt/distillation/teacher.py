"""A teacher: a model of any kind, frozen. It computes as at inference, and nothing of it can be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from tfopt.data.examples import Examples
from tfopt.distillation.features import graph_of, output_of
from tfopt.errors import ConfigError
from tfopt.graph import FrozenGraph
from tfopt.graph.frozen import signature_name
from tfopt.graph.keras_file import load_keras
from tfopt.graph.output_ops import output_ops
from tfopt.graph.unfolded import freeze_unfolded

FEATURE = "feature_of_teacher_"


class Teacher:
    """A frozen model that computes the outputs which a student learns from.

    Args:
        model: The model.
        student: The student, frozen.
        layers: Layers of a Keras model whose outputs are wanted too.

    Attributes:
        name: The model's name.
        ops: The op that computes each of the student's outputs in the teacher, by the student's name.
    """

    def __init__(self, model: Any, student: FrozenGraph, layers: Sequence[str] = (), *, trusted: bool) -> None:
        self._features = [f"{FEATURE}{place}" for place in range(len(layers))]
        if layers:
            model = graph_of(model, "teacher")
            features = [output_of(model, name, "teacher") for name in layers]
            model = _with_features(model, dict(zip(self._features, features, strict=True)))
        graph = model if isinstance(model, FrozenGraph) else freeze_unfolded(model, trusted=trusted)
        self.name = graph.name
        plain = replace(
            graph, outputs={name: each for name, each in graph.outputs.items() if name not in self._features}
        )
        self._inputs = matched(student, graph.inputs, graph.name, "inputs")
        self._outputs = matched(student, _specs(plain, "outputs"), graph.name, "outputs")
        found = output_ops(plain)
        self.ops = {own: found[name] for own, name in self._outputs.items()}
        self._dtypes = {name: spec.dtype for name, spec in graph.inputs.items()}
        self._function = graph.as_function()

    def outputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Returns its outputs by the student's names, and those of its layers, for the student's inputs by name."""
        given = {name: tf.cast(inputs[own], self._dtypes[name]) for own, name in self._inputs.items()}
        outputs = self._function(**given)
        found = {own: outputs[name] for own, name in self._outputs.items()}
        return found, [keras.ops.stop_gradient(outputs[name]) for name in self._features]


def read_teacher(model: Any, *, trusted: bool) -> Any:
    """Returns a teacher, whose layers may be named, from a .keras file; others as they are."""
    if isinstance(model, (str, Path)) and Path(model).suffix == ".keras":
        return load_keras(Path(model), trusted=trusted)
    return model


def _with_features(model: keras.Model, features: Mapping[str, Any]) -> keras.Model:
    """Returns the model with further outputs. Its own keep the names that a frozen model gives them."""
    own = model.output
    if not isinstance(own, Mapping):
        own = {f"output_{place}": tensor for place, tensor in enumerate(keras.tree.flatten(own))}
    return keras.Model(model.input, {**own, **features}, name=model.name)


def inputs_by_name(x: Any, student: FrozenGraph) -> dict[str, Any]:
    """Returns the inputs of a batch by name: those of a dict, or in the model's order."""
    named = {signature_name(str(key)): value for key, value in x.items()} if isinstance(x, Mapping) else {}
    in_order = (
        named
        if student.inputs.keys() <= named.keys()
        else dict(zip(student.inputs, keras.tree.flatten(x), strict=False))
    )
    return {name: _of_rank(in_order[name], spec.shape) for name, spec in student.inputs.items()}


def _of_rank(value: Any, shape: tf.TensorShape) -> Any:
    """Returns an input with or without a last axis of size 1, which Keras adds and leaves out as the model needs it."""
    if shape.rank and value.shape.rank == shape.rank - 1 and shape[-1] == 1:
        return tf.expand_dims(value, -1)
    if shape.rank and value.shape.rank == shape.rank + 1 and value.shape[-1] == 1:
        return tf.squeeze(value, -1)
    return value


def check_inputs(examples: Examples, model: FrozenGraph, role: str, argument: str = "examples") -> None:
    """Raises ConfigError unless examples, by the name of the argument, have the inputs of a model, by its role."""
    batch = examples.decoded("train").batch(1).element_spec[0]
    given: Mapping[str, Any] = {}
    if len(tf.nest.flatten(batch)) >= len(model.inputs):
        by_name = tf.function(lambda inputs: inputs_by_name(inputs, model), autograph=False)
        given = by_name.get_concrete_function(batch).structured_outputs
    for name, spec in model.inputs.items():
        if name not in given or not spec.shape.is_compatible_with(given[name].shape):
            found = "none" if name not in given else str(tuple(given[name].shape[1:]))
            raise ConfigError(
                f"{argument} must have the inputs of the {role}. Received: {found} for {name!r} of {model.name!r}, "
                f"which takes {tuple(spec.shape[1:])}. Wrap the {role} in a keras.Model that takes what the examples "
                "have."
            )


def matched(
    student: FrozenGraph, others: Mapping[str, tf.TensorSpec], teacher: str, kind: Literal["inputs", "outputs"]
) -> dict[str, str]:
    """Returns the teacher's name of each input or output of the student: the same name, or else the same place.

    Args:
        student: The student, frozen.
        others: Specs of the teacher's inputs or outputs, by name.
        teacher: The name of the teacher.
        kind: Which of them.

    Raises:
        ConfigError: Their numbers differ, or a shape or dtype does.
    """
    own = _specs(student, kind)
    if len(own) != len(others):
        raise ConfigError(
            f"teacher must have as many {kind} as the student. Received: {teacher!r} with {len(others)} "
            f"({', '.join(others)}), and {student.name!r} with {len(own)} ({', '.join(own)})."
        )
    names = dict(zip(own, own if own.keys() == others.keys() else others, strict=True))
    for name, other in names.items():
        one, two = own[name], others[other]
        floats = one.dtype.is_floating and two.dtype.is_floating
        if not one.shape.is_compatible_with(two.shape) or (one.dtype != two.dtype and not floats):
            raise ConfigError(
                f"teacher must have {kind} of the shapes and dtypes of the student's. Received: {other!r} of "
                f"{teacher!r}, {two.dtype.name} {two.shape}, for {name!r} of {student.name!r}, {one.dtype.name} "
                f"{one.shape}. Wrap the teacher in a keras.Model that takes and returns what the student does."
            )
    return names


def _specs(graph: FrozenGraph, kind: str) -> dict[str, tf.TensorSpec]:
    return dict(graph.inputs) if kind == "inputs" else {name: spec for name, (_, spec) in graph.outputs.items()}
