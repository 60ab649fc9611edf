"""Recurrent layers and the wrappers around layers: a unit is removed from all its gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import layers

from tfopt.pruning.channels.call import LayerCall, Rule, Tensor
from tfopt.pruning.channels.elements import Axis, Fixed, Ids
from tfopt.pruning.channels.elementwise import activated

GATES: dict[type, int] = {layers.LSTM: 4, layers.GRU: 3, layers.SimpleRNN: 1}


def recurrent(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """A kernel [channels, gates * units], a recurrent kernel [units, gates * units], and biases [gates * units]."""
    layer, cell = call.operation, call.operation.cell
    units = _units(call, layer)
    call.follow(cell.kernel, call.x.channels, at=0)
    steps = call.x.sizes[:2]
    call.work(steps, call.weight(cell.kernel, 0), call.weight(cell.kernel, 1))
    call.work(steps, units, call.weight(cell.recurrent_kernel, 1))
    states = _states(call)
    for tensor in call.tensors[1:]:
        if tensor not in states:
            call.fix_axes(tensor.axes, "is masked by it")
    for state in states:
        call.join(state.channels if isinstance(state, Tensor) else Fixed(f"{call} starts from a constant"), units)
    call.fix(call.x.axes[1], "reads it step by step")
    call.resize("units", units)
    out: Axis = units
    for name in ("activation", "recurrent_activation"):
        out = activated(call, out, getattr(cell, name, None))
    steps_axis = (Fixed(f"{call} reads it step by step"),) if layer.return_sequences else ()
    return [(call.x.axes[0], *steps_axis, out), *((call.x.axes[0], out) for _ in call.shapes[1:])]


def _states(call: LayerCall) -> list[Any]:
    """Returns the initial states that a recurrent layer is given. Other tensors after the first one are masks."""
    args, named = call.arguments
    given = keras.tree.flatten(named.get("initial_state", args[1] if len(args) > 1 else None))
    return [state for state in given if state is not None]


def _units(call: LayerCall, layer: Any) -> Ids:
    """Returns the units of a recurrent layer, after coupling them in all its weights."""
    cell = layer.cell
    gates = GATES[type(layer)]
    units = call.weight(cell.recurrent_kernel, 0)
    for variable in (cell.kernel, cell.recurrent_kernel, cell.bias):
        call.follow(variable, np.tile(units, gates), at=-1)
    return units


def bidirectional(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Both directions keep the same units, so that their outputs can be added."""
    layer = call.operation
    directions = (layer.forward_layer, layer.backward_layer)
    if any(type(inner) not in GATES for inner in directions) or layer.return_state or _states(call):
        return call.fix_all("is followed with LSTM, GRU and SimpleRNN layers without states only")
    owner = call.owner or layer
    outputs: list[tuple[Axis, ...]] = []
    for name, inner in zip(("layer", "backward_layer"), directions, strict=True):
        (out,) = recurrent(replace(call, operation=inner, owner=owner, prefix=(*call.prefix, name, "config")))
        outputs.append(out)
    one, other = (out[-1] for out in outputs)
    call.join(one, other)
    if layer.merge_mode is None:
        return outputs
    if layer.merge_mode == "concat":
        if isinstance(one, Fixed) or isinstance(other, Fixed):
            return [(*outputs[0][:-1], one if isinstance(one, Fixed) else other)]
        return [(*outputs[0][:-1], np.concatenate([one, other]))]
    return [outputs[0]]


def time_distributed(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """The layer inside sees each step as an example of the batch."""
    inner, x = call.operation.layer, call.x
    if type(inner) not in call.trace.rules:
        return call.fix_all(f"contains a {type(inner).__name__}, which tfopt does not follow")
    step = Tensor((x.shape[0], *x.shape[2:]), (x.axes[0], *x.axes[2:]), _steps_in_batch(x.sizes))
    (out,) = call.trace.rules[type(inner)](
        replace(
            call,
            operation=inner,
            owner=call.owner or call.operation,
            prefix=(*call.prefix, "layer", "config"),
            arguments=((step,), {}),
            shapes=[(shape[0], *shape[2:]) for shape in call.shapes],
            sizes=[_steps_in_batch(sizes) for sizes in call.sizes],
        )
    )
    return [(out[0], call.fix(x.axes[1], "reads it step by step"), *out[1:])]


def _steps_in_batch(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (sizes[0] * sizes[1], *sizes[2:])


RECURRENT: dict[type, Rule] = {
    **dict.fromkeys(GATES, recurrent),
    layers.Bidirectional: bidirectional,
    layers.TimeDistributed: time_distributed,
}
