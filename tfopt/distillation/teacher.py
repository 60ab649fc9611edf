"""A teacher: a model of any kind, frozen. It computes as at inference, and nothing of it can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.graph import FrozenGraph
from tfopt.graph.frozen import output_ops
from tfopt.graph.unfolded import freeze_unfolded


class Teacher:
    """A frozen model that computes the outputs which a student learns from.

    Attributes:
        name: The model's name.
        ops: The op that computes each of the student's outputs in the teacher, by the student's name.
    """

    def __init__(self, model: Any, student: FrozenGraph, *, trusted: bool) -> None:
        graph = freeze_unfolded(model, trusted=trusted)
        self.name = graph.name
        self._inputs = _matched(student, graph, "inputs")
        self._outputs = _matched(student, graph, "outputs")
        found = output_ops(graph)
        self.ops = {own: found[name] for own, name in self._outputs.items()}
        self._dtypes = {name: spec.dtype for name, spec in graph.inputs.items()}
        self._function = graph.as_function()

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its outputs by the student's names, for the inputs by the student's names."""
        given = {name: tf.cast(inputs[own], self._dtypes[name]) for own, name in self._inputs.items()}
        outputs = self._function(**given)
        return {own: outputs[name] for own, name in self._outputs.items()}


def inputs_by_name(x: Any, student: FrozenGraph) -> dict[str, Any]:
    """Returns the inputs of a batch by name: those of a dict, or in the model's order."""
    if isinstance(x, Mapping) and student.inputs.keys() <= x.keys():
        return {name: x[name] for name in student.inputs}
    return dict(zip(student.inputs, keras.tree.flatten(x), strict=False))


def _matched(student: FrozenGraph, teacher: FrozenGraph, kind: str) -> dict[str, str]:
    """Returns the teacher's name of each input or output of the student: the same name, or else the same place.

    Raises:
        ConfigError: Their numbers differ, or a shape or dtype does.
    """
    own, others = _specs(student, kind), _specs(teacher, kind)
    if len(own) != len(others):
        raise ConfigError(
            f"teacher must have as many {kind} as the student. Received: {teacher.name!r} with {len(others)} "
            f"({', '.join(others)}), and {student.name!r} with {len(own)} ({', '.join(own)})."
        )
    names = dict(zip(own, own if own.keys() == others.keys() else others, strict=True))
    for name, other in names.items():
        one, two = own[name], others[other]
        floats = one.dtype.is_floating and two.dtype.is_floating
        if not one.shape.is_compatible_with(two.shape) or (one.dtype != two.dtype and not floats):
            raise ConfigError(
                f"teacher must have {kind} of the shapes and dtypes of the student's. Received: {other!r} of "
                f"{teacher.name!r}, {two.dtype.name} {two.shape}, for {name!r} of {student.name!r}, {one.dtype.name} "
                f"{one.shape}. Wrap the teacher in a keras.Model that takes and returns what the student does."
            )
    return names


def _specs(graph: FrozenGraph, kind: str) -> dict[str, tf.TensorSpec]:
    return dict(graph.inputs) if kind == "inputs" else {name: spec for name, (_, spec) in graph.outputs.items()}
