"""Runs one stage forward and backward, and divides a batch into micro-batches.

The key of a tensor between stages is the id of the symbolic tensor in the model's graph that it is a value of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.layers import added_losses, is_given_training, layers_inside, mask_of, set_mask
from tfopt.training.pipeline_parallel.stages import variables_of

Values = dict[int, Any]


class StageCall(keras.layers.Layer):
    """Calls the layers of one stage. It is a layer so that Keras clears the losses that they added in the call before.

    It `takes` tensors from the model's inputs and from earlier stages, and `gives` those that later stages or the
    model's outputs need.
    """

    def __init__(self, nodes: Sequence[Any], inputs: set[int], needed: set[int], *, name: str) -> None:
        super().__init__(name=name, dtype="float32", autocast=False)
        made = {id(tensor) for node in nodes for tensor in node.outputs}
        used = [id(tensor) for node in nodes for tensor in node.input_tensors]
        self.takes = list(dict.fromkeys(key for key in used if key not in made))
        self.gives = [id(tensor) for node in nodes for tensor in node.outputs if id(tensor) in needed]
        self.constant = inputs  # no gradient flows into the model's own inputs
        self.nodes = list(nodes)
        self.stage_layers = [node.operation for node in nodes if isinstance(node.operation, keras.layers.Layer)]
        self.supports_masking = True  # the layers inside pass masks on by themselves
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        return variables_of(self.nodes)

    def call(self, tensors: list[Any], training: bool | None = None) -> list[Any]:
        values = dict(zip(self.takes, tensors, strict=True))
        for node in self.nodes:
            args, options = node.arguments.fill_in(values)
            # As in Keras: the model's `training` replaces the value that a layer was called with in the graph.
            if training is not None and is_given_training(node.operation):
                options["training"] = training
            outputs = keras.tree.flatten(node.operation(*args, **options))
            values.update(zip(map(id, node.outputs), outputs, strict=True))
        return [values[key] for key in self.gives]

    def added_losses(self) -> list[Any]:
        """Returns the losses that the layers added in the last call: activity regularizers and `add_loss`."""
        return [loss for layer in layers_inside(self) for loss in added_losses(layer)]

    def set_added_losses(self, losses: Sequence[Any]) -> None:
        """Gives the layers the losses again that they added in an earlier call of this stage."""
        left = iter(losses)
        for layer in layers_inside(self):
            own = added_losses(layer)  # as many as in every call
            own[:] = [next(left) for _ in own]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        return None

    def run(self, values: Values, training: bool) -> Values:
        """Returns the tensors that later stages need, computed on the current device."""
        outputs = self([entering(values[key]) for key in self.takes], training=training)
        return dict(zip(self.gives, outputs, strict=True))

    def run_recorded(self, values: Values) -> Pass:
        """Runs in training, and records what the backward pass needs."""
        inputs = {key: entering(values[key]) for key in self.takes}
        sources = {key: tensor for key, tensor in inputs.items() if key not in self.constant and differentiable(tensor)}
        with tf.GradientTape() as tape:
            tape.watch(list(sources.values()))
            outputs = self(list(inputs.values()), training=True)
        return Pass(
            tape=tape,
            sources={**sources, **{id(variable): variable for variable in self.trainable_variables}},
            gives=dict(zip(self.gives, outputs, strict=True)),
            added_losses=self.added_losses(),
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forward pass of a micro-batch through one stage."""

    tape: tf.GradientTape
    sources: Values  # what needs gradients: inputs from earlier stages, and the stage's trainable variables
    gives: Values
    added_losses: Sequence[Any]

    def backward(self, gradients: Sums) -> None:
        """Computes the gradients of inputs and variables from those of outputs and added losses, on this device."""
        results = {**self.gives, **{id(loss): loss for loss in self.added_losses}}
        known = {key: gradients[key] for key in results if key in gradients}
        if known and self.sources:
            found = self.tape.gradient(
                [results[key] for key in known], list(self.sources.values()), output_gradients=list(known.values())
            )
            gradients.add(self.sources, found)


class Sums(dict[int, Any]):
    """Sums of gradients by key. A gradient of None adds nothing."""

    def add(self, keys: Iterable[int], gradients: Iterable[Any]) -> None:
        for key, gradient in zip(keys, gradients, strict=True):
            before = self.get(key)
            if isinstance(before, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
                values = tf.concat([before.values, gradient.values], 0)
                indices = tf.concat([before.indices, gradient.indices], 0)
                # As in the gradient of a whole batch, a row may occur twice.
                self[key] = tf.IndexedSlices(values, indices, before.dense_shape)
            elif before is not None and gradient is not None:
                self[key] = tf.convert_to_tensor(before) + tf.convert_to_tensor(gradient)
            elif gradient is not None:
                self[key] = gradient


def entering(tensor: Any) -> Any:
    """Returns a copy on the current device.

    All readers on the device share one transfer. The copy is also a separate tensor for gradients, even if a layer such
    as Dropout(0) returned its input.
    """
    if tensor is None:
        return None
    copy = tf.identity(tensor)
    mask = mask_of(tensor)
    if mask is not None:
        set_mask(copy, mask)
    return copy


def differentiable(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and (tensor.dtype.is_floating or tensor.dtype.is_complex)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A part of a batch: the examples from `begin` to `end`. Only the first `size` of them count in the loss."""

    begin: Any
    end: Any
    size: Any
    share: Any  # `size` divided by the size of the batch

    def of(self, batch: Any) -> Any:
        """Returns this part of every tensor in a structure. None stays None."""
        return keras.tree.map_structure(lambda t: t if t is None else t[self.begin : self.end], batch)


def micro_batches_of(x: Any, count: int) -> list[MicroBatch]:
    """Divides a batch into parts whose sizes differ by at most one. The size may be known only when the step runs.

    Example:
        >>> [(part.begin, part.end) for part in micro_batches_of(tf.zeros((7, 2)), 3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    tensor = next(tensor for tensor in keras.tree.flatten(x) if tensor is not None)
    total = tensor.shape[0]
    if total is not None:
        count = min(count, total)
        edges = [part * total // count for part in range(count + 1)]
        return [
            MicroBatch(begin=begin, end=end, size=end - begin, share=(end - begin) / total)
            for begin, end in pairwise(edges)
        ]
    total = tf.shape(tensor)[0]
    parts = []
    for part in range(count):
        begin, end = part * total // count, (part + 1) * total // count
        # The mean over no examples is not a number. So an empty part gets one example, with a share of zero.
        first = tf.minimum(begin, total - 1)
        parts.append(
            MicroBatch(
                begin=first,
                end=tf.maximum(end, first + 1),
                size=end - begin,
                share=tf.cast(end - begin, "float32") / tf.cast(total, "float32"),
            )
        )
    return parts
