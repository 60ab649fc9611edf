"""Attention: a head is removed as a whole, from queries, keys, values and the product after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import layers

from tfopt.compat.layers import grouped_projections, output_projection
from tfopt.models.text.attention import CausalAttention
from tfopt.pruning.channels.call import LayerCall, Part, Rule, Tensor
from tfopt.pruning.channels.elements import Axis, Fixed, Ids


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
    call.trace.heads.append(heads)
    call.resize("num_heads", heads)
    if config["output_shape"] is None:  # the layer takes the width of the queries
        call.join(out, query.channels)
    else:
        call.resize("output_shape", [out])
    _count_scores(call, query, value, heads, layer.query_dense.kernel.shape[-1] + layer.value_dense.kernel.shape[-1])
    return _outputs(call, query, out)


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
    call.trace.heads.append(heads)
    call.resize("num_query_heads", heads)
    call.resize("num_key_value_heads", shared)
    call.join(out, query.channels)
    _count_scores(call, query, value, heads, 2 * layer.head_dim)
    return _outputs(call, query, out)


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


def _count_scores(call: LayerCall, query: Tensor, value: Tensor, heads: Ids, sizes: int) -> None:
    """Counts the products of queries with keys, and of the scores with values."""
    call.work([*query.sizes[:-1], *value.sizes[1:-1]], sizes, heads)


def _outputs(call: LayerCall, query: Tensor, out: Axis) -> list[tuple[Axis, ...]]:
    first = (*(Fixed(f"{call} attends along it") for _ in query.axes[:-1]), out)
    return [first, *((Fixed(f"{call} attends along it"),) * len(shape) for shape in call.shapes[1:])]


ATTENTION: dict[type, Rule] = {
    layers.MultiHeadAttention: multi_head_attention,
    layers.GroupQueryAttention: group_query_attention,
    CausalAttention: causal_attention,
    layers.Attention: attention,
}
