"""Cuts the graph of a functional model into stages of about equal bytes, and moves their variables to the devices.

The nodes (calls of layers) are in the order in which Keras runs them. A stage is a sequence of neighbours in that
order. A cut must not separate two nodes that share a variable, since a variable is on one device. The best of the
remaining cuts makes the largest stage as small as possible. It is found exactly: let b(k, j) be the bytes of the
largest stage if the first j nodes make k stages; then b(k, j) = min over i < j of max(b(k - 1, i), bytes of nodes i to
j).

The variables of a stage are on its device. A keras.Variable holds a tf.Variable, which cannot change its device. To
move it, a new tf.Variable is made on the other device. Keras makes slots of optimizers on the default device and
computes updates there, even for variables on another device, so slots are moved too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat import optimizers
from tfopt.compat.layers import calls_in_order, functional_class
from tfopt.errors import ConfigError, UnsupportedModelError, unknown_name
from tfopt.report import Record
from tfopt.report.formatting import memory_size

# A trainable parameter, its gradient and the two slots of Adam.
COPIES_OF_A_TRAINABLE = 4


@dataclass(frozen=True, kw_only=True)
class Placement(Record):
    """The device of one stage of a pipeline, and the bytes that it will hold."""

    device: str
    layers: Sequence[str]  # the names of its layers and operations, in the order in which they run
    parameter_bytes: int  # of its variables, without gradients and optimizer slots
    # Of its layers' outputs for one batch, all micro-batches together. An unknown dimension but the batch counts as 1.
    activation_bytes: int

    def __str__(self) -> str:
        names = self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} to {self.layers[-1]}"
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        parameters, activations = memory_size(self.parameter_bytes), memory_size(self.activation_bytes)
        return f"{self.device}  parameters {parameters}, activations {activations}  {names} ({count})"


def placement(device: str, part: Sequence[Any], batch_size: int) -> Placement:
    """Returns what a device will hold of the nodes of its stage."""
    return Placement(
        device=device,
        layers=tuple(dict.fromkeys(node.operation.name for node in part)),
        parameter_bytes=parameter_bytes(variables_of(part)),
        activation_bytes=activation_bytes(part, batch_size),
    )


def functional_form(model: keras.Model) -> keras.Model:
    """Returns the model as a graph of layers. For a Sequential model, it returns a graph of the same layers.

    Raises:
        UnsupportedModelError: The model is not a graph of layers, or is not built.
    """
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise UnsupportedModelError(
                f"A pipeline needs a built model. Received: model={model.name!r}, which has not seen an input shape. "
                "Begin it with keras.Input(shape), or call model.build(shape)."
            )
        return keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    graph_class = functional_class()
    if not isinstance(model, graph_class) or type(model).call is not graph_class.call:
        raise UnsupportedModelError(
            "A pipeline needs a functional or Sequential model, because it cuts the graph of layers. Received: "
            f"model={model.name!r} of class {type(model).__name__} with its own call(). Express it with the "
            "functional API, keras.Model(inputs, outputs), or use strategy='mirrored'."
        )
    return model


def cut(nodes: Sequence[Any], count: int, cuts: Sequence[str] | None, batch_size: int) -> list[list[Any]]:
    """Returns the nodes of each stage: they begin at the layers in `cuts`, or None balances the bytes.

    Raises:
        ConfigError: The cuts are wrong, or the graph cannot be cut into so many stages.
    """
    tied = _tied(nodes)
    starts = _balanced(nodes, count, tied, batch_size) if cuts is None else _named(nodes, count, tied, cuts)
    return [list(nodes[start:end]) for start, end in pairwise([*starts, len(nodes)])]


def variables_of(nodes: Sequence[Any]) -> list[keras.Variable]:
    """Returns each variable of the nodes' layers once, random seeds included."""
    every = [variable for node in nodes for variable in getattr(node.operation, "variables", ())]
    return list({id(variable): variable for variable in every}.values())


def parameter_bytes(variables: Sequence[keras.Variable]) -> int:
    return sum(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size for variable in variables)


def activation_bytes(nodes: Sequence[Any], batch_size: int) -> int:
    """Returns the bytes of the nodes' outputs for a batch, including those inside nested models."""
    total = 0
    for node in nodes:
        if isinstance(node.operation, functional_class()):
            total += activation_bytes(calls_in_order(functional_form(node.operation)), batch_size)
            continue
        for output in node.outputs:
            sizes = [size or 1 for size in output.shape[1:]]
            total += batch_size * int(np.prod(sizes)) * tf.as_dtype(output.dtype).size
    return total


def move(variable: keras.Variable, device: str) -> None:
    """Moves a variable to a device. The keras.Variable stays the same object, with a new tf.Variable inside.

    Example:
        >>> weight = keras.Variable([1.0, 2.0])
        >>> move(weight, "CPU:0")
        >>> weight.numpy().tolist(), weight.value.device[-5:]
        ([1.0, 2.0], 'CPU:0')
    """
    now, then = (tf.DeviceSpec.from_string(name) for name in (optimizers.value_of(variable).device, device))
    if (now.device_type, now.device_index) != (then.device_type, then.device_index):
        with tf.device(device):
            optimizers.make_anew(variable)


def place_slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Builds an optimizer if it is not built yet, and moves its slots to the devices of their variables.

    Raises:
        UnsupportedModelError: The optimizer has a slot of which the variable is unknown.
    """
    if not optimizer.built:
        with tf.device("CPU:0"):  # in host memory until they are moved: the first GPU could not hold all of them
            optimizer.build(variables)
    for each in dict.fromkeys([optimizer, optimizers.inner_optimizer(optimizer)]):
        _place_own_slots(each)


@contextmanager
def updates_in_place(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within the scope, the optimizer computes the update and weight decay of a variable on that variable's device."""
    with ExitStack() as hooks:
        for each in dict.fromkeys([optimizer, optimizers.inner_optimizer(optimizer)]):
            hooks.enter_context(optimizers.update_hooks(each, _update_in_place, _decay_in_place))
        yield


def _tied(nodes: Sequence[Any]) -> dict[int, str]:
    """Returns the places where no stage may begin, each with the layer whose calls it would separate."""
    first: dict[int, int] = {}
    tied: dict[int, str] = {}
    for place, node in enumerate(nodes):
        for variable in variables_of([node]):
            since = first.setdefault(id(variable), place)
            tied.update(dict.fromkeys(range(since + 1, place + 1), node.operation.name))
    return tied


def _named(nodes: Sequence[Any], count: int, tied: dict[int, str], cuts: Sequence[str]) -> list[int]:
    if isinstance(cuts, str) or len(cuts) != count - 1:
        raise ConfigError(
            f"pipeline_cuts must name one layer fewer than there are devices, the first of each later stage. "
            f"Received: pipeline_cuts={cuts!r} for {count} devices."
        )
    place_of: dict[str, int] = {}
    for place, node in enumerate(nodes):
        place_of.setdefault(node.operation.name, place)
    for name in cuts:
        if name not in place_of:
            raise unknown_name("layer in pipeline_cuts", str(name), place_of)
        if place_of[name] in tied:
            raise ConfigError(
                f"pipeline_cuts must not separate the calls of layer {tied[place_of[name]]!r}, whose variables are on "
                f"one device. Received: pipeline_cuts={list(cuts)!r}. Cut before its first call or after its last."
            )
    starts = [0, *(place_of[name] for name in cuts)]
    if any(one >= other for one, other in pairwise(starts)):
        order = [node.operation.name for node in nodes]
        raise ConfigError(
            f"pipeline_cuts must be in the order of the graph, and leave the first stage a layer. "
            f"Received: pipeline_cuts={list(cuts)!r}. The order is {order!r}."
        )
    return starts


def _balanced(nodes: Sequence[Any], count: int, tied: dict[int, str], batch_size: int) -> list[int]:
    starts = [place for place in range(len(nodes)) if place not in tied]
    if len(starts) < count:
        raise ConfigError(
            "pipeline_devices must not name more devices than the model has possible stages. "
            f"Received: {count} devices for {len(starts)} (layers that share variables stay together). "
            f"Give at most {len(starts)} device{'s' * (len(starts) > 1)}."
        )
    ends = [0, *np.cumsum([_cost(nodes[start:end], batch_size) for start, end in pairwise([*starts, len(nodes)])])]
    until = np.array(ends, dtype=np.float64)
    best = np.where(np.arange(len(until)) == 0, 0.0, np.inf)
    choices = []
    for _ in range(count):
        # Row j, column i: the largest stage if the last stage holds the blocks i to j. A stage must not be empty.
        worst = np.maximum(best[None, :], until[:, None] - until[None, :])
        worst[np.triu_indices(len(until))] = np.inf
        choices.append(worst.argmin(axis=1))
        best = worst.min(axis=1)
    blocks = [len(starts)]
    for choice in reversed(choices):
        blocks.insert(0, int(choice[blocks[0]]))
    return [starts[block] for block in blocks[:-1]]


def _cost(nodes: Sequence[Any], batch_size: int) -> int:
    variables = variables_of(nodes)
    trainable = [variable for variable in variables if variable.trainable]
    extra = (COPIES_OF_A_TRAINABLE - 1) * parameter_bytes(trainable)
    return parameter_bytes(variables) + extra + activation_bytes(nodes, batch_size)


def _update_in_place(update_step: Any) -> Any:
    def placed(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update_step(gradient, variable, learning_rate)

    return placed


def _decay_in_place(apply_weight_decay: Any) -> Any:
    def placed(variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            with tf.device(variable.value.device):
                apply_weight_decay([variable])

    return placed


def _place_own_slots(optimizer: Any) -> None:
    """Moves an optimizer's own slots. Keras keeps them in lists with the length and order of its variables."""
    variables = optimizers.trained_variables(optimizer)
    placed = set()
    for slots in vars(optimizer).values():
        if slots is variables or not isinstance(slots, list) or len(slots) != len(variables):
            continue
        for slot, variable in zip(slots, variables, strict=True):
            # Adafactor has whole numbers in place of the slots that it does not use.
            if isinstance(slot, keras.Variable) and tf.as_dtype(slot.dtype).is_floating:
                move(slot, variable.value.device)
                placed.add(id(slot))
    astray = [slot.path for slot in optimizers.own_variables(optimizer) if slot.ndim > 0 and id(slot) not in placed]
    if astray:
        raise UnsupportedModelError(
            "Every slot of the optimizer must belong to one variable, to be moved to its device. Received: "
            f"optimizer={type(optimizer).__name__} with {astray}. Use one of Keras' own, such as Adam or SGD."
        )
    # The optimizer finds a variable's slots by the identity of its tf.Variable, which `move` replaced.
    optimizers.find_slots_anew(optimizer)
