"""Operations that move, join, cut or sum up values: their axes are those of the inputs in another order or number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from keras import layers

from tfopt.models.layers import ClassToken
from tfopt.pruning.channels.call import Axis, Fixed, LayerCall, Rule, Tensor

NOT_FOLLOWED = "cuts or mixes this axis in a way that tfopt does not follow"


def windows(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Pooling, padding, cropping and resizing: the channels pass, and the other axes keep all their elements."""
    if getattr(call.operation, "data_format", "channels_last") not in (None, "channels_last"):
        return call.fix_all("has its channels first, and tfopt follows channels_last only")
    x = call.x
    return [(x.axes[0], *call.fix_axes(x.axes[1:-1], "works along this axis"), x.channels)]


def global_pooling(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    (out,) = windows(call)
    return [out if call.operation.keepdims else (out[0], out[-1])]


def flatten(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    if call.operation.data_format != "channels_last":
        return call.fix_all("has its channels first, and tfopt follows channels_last only")
    return [reshaped(call, call.x, call.shapes[0])]


def reshape(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    out = reshaped(call, call.x, call.shapes[0])
    is_layer = isinstance(call.operation, layers.Layer)
    given = list(call.operation.target_shape if is_layer else call.operation.newshape)
    axes = out[1:] if is_layer else out
    value = [
        axis if isinstance(axis, np.ndarray) and size != -1 else size for size, axis in zip(given, axes, strict=True)
    ]
    call.resize("target_shape" if is_layer else "newshape", value)
    return [out]


def reshaped(call: LayerCall, x: Tensor, shape: Sequence[int | None]) -> tuple[Axis, ...]:
    """Returns the axes of a tensor in another shape.

    Dimensions are matched in the smallest blocks of equal size, from the last one: [height, width, channels] to
    [pixels, channels] has the blocks (channels) and (height, width).
    """
    out: list[Axis] = []
    left, right = len(x.shape), len(shape)
    while left or right:
        begin, end = _block(x.shape[:left], shape[:right])
        out[:0] = _reshaped_block(call, x.shape[begin:left], x.axes[begin:left], shape[end:right])
        left, right = begin, end
    return tuple(out)


def _block(one: Sequence[int | None], other: Sequence[int | None]) -> tuple[int, int]:
    """Returns where the last blocks of equal size begin in two shapes. An open size matches an open size alone."""
    begin, end = len(one), len(other)
    if begin and end and one[-1] is None and other[-1] is None:
        return begin - 1, end - 1
    size = other_size = 1
    while begin or end:
        if begin and (size <= other_size or not end):
            begin, last = begin - 1, one[begin - 1]
            if last is None:
                return 0, 0
            size *= last
        elif end:
            end, last = end - 1, other[end - 1]
            if last is None:
                return 0, 0
            other_size *= last
        if size == other_size and (begin < len(one)) and (end < len(other) or size == 1):
            break
    return begin, end


def _reshaped_block(
    call: LayerCall, sizes: Sequence[int | None], axes: Sequence[Axis], shape: Sequence[int | None]
) -> list[Axis]:
    followed = [number for number, axis in enumerate(axes) if isinstance(axis, np.ndarray)]
    if not followed:
        reason = next((axis.reason for axis in axes if isinstance(axis, Fixed)), f"{call} sets its size")
        return [Fixed(reason) for _ in shape]
    if len(followed) > 1 or None in (*sizes, *shape):
        if len(sizes) == len(shape) == 1:
            return list(axes)
        call.fix_axes(axes, NOT_FOLLOWED)
        return [Fixed(f"{call} {NOT_FOLLOWED}") for _ in shape]
    (number,) = followed
    ids = axes[number]
    assert isinstance(ids, np.ndarray)
    spread = ids.reshape([-1 if each == number else 1 for each in range(len(sizes))])
    full = np.broadcast_to(spread, [size or 0 for size in sizes]).reshape([size or 0 for size in shape])
    # Of several new axes the first one keeps the elements: [heads * channels] becomes [heads, channels].
    target = next((each for each, size in enumerate(shape) if size != 1), 0)
    rows = np.moveaxis(full, target, 0).reshape(full.shape[target], -1)
    call.tie(rows)
    if rows.shape[1] > 1 and rows[0, 0] != rows[0, -1]:
        call.trace.heads.append(rows[:, 0])
    return [rows[:, 0] if each == target else Fixed(f"{call} {NOT_FOLLOWED}") for each in range(len(shape))]


def permute(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    x = call.x
    return [(x.axes[0], *(x.axes[number] for number in call.operation.dims))]


def transpose(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    axes = call.operation.axes
    return [tuple(call.x.axes[number] for number in axes) if axes else call.x.axes[::-1]]


def swapaxes(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    out = list(call.x.axes)
    one, other = call.operation.axis1, call.operation.axis2
    out[one], out[other] = out[other], out[one]
    return [tuple(out)]


def concatenate(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    tensors = call.tensors
    rank = len(tensors[0].shape)
    along = call.operation.axis % rank
    out: list[Axis] = []
    for number in range(rank):
        axes = [tensor.axes[number] for tensor in tensors]
        if number == along:
            out.append(_joined_end_to_end(call, axes, [tensor.shape[number] for tensor in tensors]))
            continue
        out.append(call.same(axes))
    return [tuple(out)]


def _joined_end_to_end(call: LayerCall, axes: Sequence[Axis], sizes: Sequence[int | None]) -> Axis:
    if all(isinstance(axis, Fixed) for axis in axes):
        return axes[0]
    if None in sizes:
        call.fix_axes(axes, NOT_FOLLOWED)
        return Fixed(f"{call} {NOT_FOLLOWED}")
    parts = []
    for axis, size in zip(axes, sizes, strict=True):
        if isinstance(axis, Fixed):  # its elements get numbers, since it becomes a part of an axis with numbers
            fixed, axis = axis, call.trace.elements.new(size or 0)
            call.join(axis, fixed)
        parts.append(axis)
    return np.concatenate(parts)


def split(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    x, axis = call.x, call.operation.axis % len(call.x.shape)
    followed = x.axes[axis]
    if isinstance(followed, np.ndarray):
        # The numbers of the config would have to change with the sizes of all parts.
        call.fix(followed, NOT_FOLLOWED)
        followed = Fixed(f"{call} {NOT_FOLLOWED}")
    return [(*x.axes[:axis], followed, *x.axes[axis + 1 :]) for _ in call.shapes]


def expand_dims(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    axis = call.operation.axis
    out: list[Axis] = list(call.x.axes)
    for number in sorted(each % len(call.shapes[0]) for each in ([axis] if isinstance(axis, int) else axis)):
        out.insert(number, Fixed(f"{call} adds it"))
    return [tuple(out)]


def squeeze(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    return [reshaped(call, call.x, call.shapes[0])]


def reduce(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Sums, means and the like. An axis that disappears keeps all its elements: a mean depends on their number."""
    x, axis = call.x, call.operation.axis
    rank = len(x.shape)
    over = set(range(rank)) if axis is None else {each % rank for each in np.atleast_1d(axis).tolist()}
    axes = [
        call.fix(each, "computes with all values of the axis") if number in over else each
        for number, each in enumerate(x.axes)
    ]
    return [tuple(each for number, each in enumerate(axes) if call.operation.keepdims or number not in over)]


def get_item(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    """Parts of axes that are taken whole pass; all others keep all their elements."""
    args, named = call.arguments
    key = args[1] if len(args) > 1 else named["key"]
    keys = key if isinstance(key, tuple) else (key,)
    x = call.x
    if any(not isinstance(each, int | slice | type(None) | type(...)) for each in keys):
        return call.fix_all(NOT_FOLLOWED)
    taken = sum(each is not None and each is not ... for each in keys)
    if ... in keys:
        at = keys.index(...)
        keys = (*keys[:at], *[slice(None)] * (len(x.shape) - taken), *keys[at + 1 :])
    keys = (*keys, *[slice(None)] * (len(x.shape) - sum(each is not None for each in keys)))
    out: list[Axis] = []
    axes = iter(x.axes)
    for each in keys:
        if each is None:
            out.append(Fixed(f"{call} adds it"))
            continue
        axis = next(axes)
        whole = isinstance(each, slice) and each in (slice(None), slice(0, None))
        if not whole:
            axis = call.fix(axis, NOT_FOLLOWED)
        if isinstance(each, slice):
            out.append(axis)
    return [tuple(out)]


def repeat_vector(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    return [(call.x.axes[0], Fixed(f"{call} adds it"), call.x.channels)]


def class_token(call: LayerCall) -> Sequence[tuple[Axis, ...]]:
    x = call.x
    call.follow(call.operation.token, x.channels)
    return [(x.axes[0], call.fix(x.axes[1], NOT_FOLLOWED), x.channels)]


SHAPES: dict[type, Rule] = {
    **dict.fromkeys(
        [
            getattr(layers, f"{kind}{rank}D")
            for kind in ("AveragePooling", "MaxPooling", "UpSampling", "ZeroPadding", "Cropping")
            for rank in (1, 2, 3)
        ]
        + [layers.Resizing, layers.CenterCrop],
        windows,
    ),
    **dict.fromkeys(
        [getattr(layers, f"Global{kind}Pooling{rank}D") for kind in ("Average", "Max") for rank in (1, 2, 3)],
        global_pooling,
    ),
    layers.Flatten: flatten,
    layers.Reshape: reshape,
    layers.Permute: permute,
    layers.Concatenate: concatenate,
    layers.RepeatVector: repeat_vector,
    ClassToken: class_token,
}

SHAPE_OPERATIONS: dict[str, Rule] = {
    "Reshape": reshape,
    "Transpose": transpose,
    "Swapaxes": swapaxes,
    "Concatenate": concatenate,
    "Split": split,
    "ExpandDims": expand_dims,
    "Squeeze": squeeze,
    "GetItem": get_item,
    **dict.fromkeys(["Mean", "Sum", "Max", "Min", "Prod", "Var", "Std"], reduce),
}
