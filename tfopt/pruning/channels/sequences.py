"""Layers along a sequence: attention, recurrent layers, and the wrappers around layers.

A head of an attention is removed as a whole, from queries, keys, values and the product after them; a unit of a
recurrent layer from all its gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import layers

from tfopt.compat.layers import grouped_projections, output_projection
from tfopt.models.text.attention import CausalAttention
from tfopt.pruning.channels.call import Axis, Fixed, Ids, LayerCall, Part, Rule, Tensor
from tfopt.pruning.channels.elementwise import activated


def multi_head_attention(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    layer = call.operation
    query, value, key = _inputs(call)
    config = layer.get_config()
    if config["use_gate"]:
        return call.fix_all("has a gate, which tfopt does not follow")
    if len(layer.output_dense.kernel.shape) > 3:
        return call.fix_all("has an output of several dimensions, which tfopt does not follow")
    heads = call.weight(layer.query_dense.kernel, 1)
    for projection, x in ((layer.query_dense, query), (layer.key_dense, key), (layer.value_dense, value)):
        _project(call, projection, x, heads)
    out = _project_back(call, layer.output_dense, query, heads)
    call.resize("num_heads", heads)
    if config["output_shape"] is None:  # the layer takes the width of the queries
        call.join(out, query.channels)
    else:
        call.resize("output_shape", [out])
    sizes = layer.query_dense.kernel.shape[-1] + layer.value_dense.kernel.shape[-1]
    return _outputs(call, query, value, heads, sizes, out)


def group_query_attention(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Several heads of the queries share one head of keys and values. Such a group is removed as a whole."""
    layer = call.operation
    query, value, key = _inputs(call)
    if layer.use_gate:
        return call.fix_all("has a gate, which tfopt does not follow")
    to_query, to_key, to_value = grouped_projections(layer)
    heads, shared = call.weight(to_query.kernel, 1), call.weight(to_key.kernel, 1)
    rows = heads.reshape(layer.num_key_value_heads, -1)
    call.tie(rows)
    call.join(rows[:, 0], shared)
    _project(call, to_query, query, heads)
    _project(call, to_key, key, shared)
    _project(call, to_value, value, shared)
    out = _project_back(call, output_projection(layer), query, heads)
    call.resize("num_query_heads", heads)
    call.resize("num_key_value_heads", shared)
    call.join(out, query.channels)
    return _outputs(call, query, value, heads, 2 * layer.head_dim, out)


def causal_attention(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """The products are Dense layers around it: a head is a row of their outputs."""
    layer = call.operation
    query, key, value = call.tensors[:3]
    width = query.shape[-1] or 0
    each = width // layer.heads
    for x in (query, key):
        call.join(x.channels, value.channels)
    ids = next((x.channels for x in (value, query, key) if isinstance(x.channels, np.ndarray)), None)
    if ids is None:
        return [query.axes]
    call.tie(ids.reshape(layer.heads, each))
    call.trace.heads.append(ids)
    call.resize("heads", Part(ids, each))
    call.work([*query.sizes[:-1], key.sizes[1], 2], ids)
    return [(*query.axes[:-1], ids)]


def attention(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Keras' layers without weights of their own: `Attention` adds values, whose channels pass."""
    if call.operation.use_scale or call.operation.score_mode != "dot" or len(call.shapes) > 1:
        return call.fix_all("is followed only as plain dot-product attention")
    args, named = call.arguments
    query, value, *others = args[0] if args else named["inputs"]
    key = others[0] if others else value
    call.join(query.channels, key.channels)
    call.fix(query.axes[1], "keeps the positions")
    call.fix(value.axes[1], "keeps the positions")
    for x in (key, value):
        call.work([*query.sizes[:-1], x.sizes[1]], x.channels if isinstance(x.channels, np.ndarray) else x.sizes[-1])
    return [(*query.axes[:-1], value.channels)]


def _inputs(call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, value and key; their other axes keep all their elements."""
    args, named = call.arguments
    names = ("query", "value", "key")
    given = {**dict(zip(names, args, strict=False)), **{name: x for name, x in named.items() if name in names}}
    if given.get("key") is None:
        given["key"] = given["value"]
    for x in call.tensors:
        call.fix_axes(x.axes[:-1], "attends along it")
    return given["query"], given["value"], given["key"]


def _project(call: LayerCall, projection: Any, x: Tensor, heads: Ids) -> None:
    """A kernel [channels, heads, size of a head] with a bias [heads, size of a head]."""
    call.follow(projection.kernel, x.channels, at=0)
    call.follow(projection.kernel, heads, at=1)
    call.follow(projection.bias, heads, at=0)
    call.work(x.sizes[:-1], call.weight(projection.kernel, 0), heads, projection.kernel.shape[-1])


def _project_back(call: LayerCall, projection: Any, query: Tensor, heads: Ids) -> Ids:
    """A kernel [heads, size of a head, channels] with a bias [channels]. Returns the channels."""
    out = call.weight(projection.kernel, -1)
    call.follow(projection.kernel, heads, at=0)
    call.follow(projection.bias, out)
    call.work(query.sizes[:-1], heads, projection.kernel.shape[1], out)
    return out


def _outputs(
    call: LayerCall, query: Tensor, value: Tensor, heads: Ids, sizes: int, out: Axis
) -> list[tuple[Axis, ...]]:
    """Counts the products of queries with keys, and of the scores with values, and returns the axes of the outputs."""
    call.trace.heads.append(heads)
    call.work([*query.sizes[:-1], *value.sizes[1:-1]], sizes, heads)
    fixed = Fixed(f"{call} attends along it")
    return [(*(fixed for _ in query.axes[:-1]), out), *((fixed,) * len(shape) for shape in call.shapes[1:])]


GATES: dict[type, int] = {layers.LSTM: 4, layers.GRU: 3, layers.SimpleRNN: 1}


def recurrent(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """A kernel [channels, gates * units], a recurrent kernel [units, gates * units], and biases [gates * units]."""
    layer, cell = call.operation, call.operation.cell
    units = call.weight(cell.recurrent_kernel, 0)
    for variable in (cell.kernel, cell.recurrent_kernel, cell.bias):
        call.follow(variable, np.tile(units, GATES[type(layer)]), at=-1)
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


SEQUENCES: dict[type, Rule] = {
    layers.MultiHeadAttention: multi_head_attention,
    layers.GroupQueryAttention: group_query_attention,
    CausalAttention: causal_attention,
    layers.Attention: attention,
    **dict.fromkeys(GATES, recurrent),
    layers.Bidirectional: bidirectional,
    layers.TimeDistributed: time_distributed,
}
