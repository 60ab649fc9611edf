"""Operations of TensorFlow that a Keras 2 graph holds as layers become operations of `keras.ops`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfopt.errors import UnsupportedLayerError


def is_operation(layer: Any) -> bool:
    """Returns whether a layer of a Keras 2 graph is an operation of TensorFlow, as `x + y` and `tf.reshape(x, ...)`."""
    return type(layer).__name__ in ("TFOpLambda", "SlicingOpLambda")


def convert_operation(layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Computes an operation on Keras 3 tensors.

    Args:
        layer: The TFOpLambda of Keras 2.
        args: Positional arguments of its call, with Keras 3 tensors.
        kwargs: The same by name.
    Raises:
        UnsupportedLayerError: The operation has no counterpart, or not with these arguments.
    """
    if layer.symbol not in OPERATIONS:
        raise _unsupported(layer, "Use a layer of Keras in its place.")
    names = list(inspect.signature(layer.function).parameters)
    values = dict(zip(names, args, strict=False)) | kwargs
    values = {name: value for name, value in values.items() if name != "name" and value is not None}
    operation = OPERATIONS[layer.symbol]
    takes = inspect.signature(operation).parameters
    if unknown := [name for name in values if name not in takes]:
        raise _unsupported(layer, f"It has the argument {unknown[0]!r}, which cannot be converted.")
    try:
        return operation(**values)
    except (TypeError, ValueError) as error:
        raise _unsupported(layer, f"{error} Use a layer of Keras in its place.") from error


def _unary(function: Callable[[Any], Any], argument: str) -> Callable[..., Any]:
    def call(**values: Any) -> Any:
        return function(values[argument])

    return _taking(call, argument)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(x: Any, y: Any) -> Any:
        return function(x, y)

    return call


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return function(input_tensor, axis=axis, keepdims=keepdims)

    return call


def _taking(call: Callable[..., Any], *names: str) -> Callable[..., Any]:
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _get_item(tensor: Any, slice_spec: Any) -> Any:
    spec = tuple(slice_spec) if isinstance(slice_spec, list | tuple) else (slice_spec,)
    return tensor[tuple(_index(item) for item in spec)]


def _index(item: Any) -> Any:
    """Returns one index of `x[...]`; Keras 2 keeps a slice as a dict."""
    if isinstance(item, Mapping):
        return slice(*(_size(item[name]) for name in ("start", "stop", "step")))
    return item if item is None or isinstance(item, EllipsisType) else _size(item)


def _size(value: Any) -> Any:
    if isinstance(value, keras.KerasTensor):
        raise ValueError("A size or an index is known only when the model runs.")
    return None if value is None else int(value)


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _reshape(tensor: Any, shape: Any) -> Any:
    return ops.reshape(tensor, _sizes(shape))


def _cast(x: Any, dtype: Any) -> Any:
    return ops.cast(x, tf.as_dtype(dtype).name)


def _concatenate(values: Any, axis: Any) -> Any:
    return ops.concatenate(values, axis=_size(axis))


def _stack(values: Any, axis: Any = 0) -> Any:
    return ops.stack(values, axis=_size(axis))


def _transpose(a: Any, perm: Any = None) -> Any:
    return ops.transpose(a, None if perm is None else _sizes(perm))


def _expand_dims(input: Any, axis: Any) -> Any:
    return ops.expand_dims(input, _size(axis))


def _squeeze(input: Any, axis: Any = None) -> Any:
    return ops.squeeze(input, axis)


def _clip(t: Any, clip_value_min: Any, clip_value_max: Any) -> Any:
    return ops.clip(t, clip_value_min, clip_value_max)


def _matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    return ops.matmul(a, ops.swapaxes(b, -1, -2) if transpose_b else b)


def _softmax(logits: Any, axis: Any = -1) -> Any:
    return ops.softmax(logits, axis=axis)


def _leaky_relu(features: Any, alpha: float = 0.2) -> Any:
    return ops.leaky_relu(features, negative_slope=alpha)


def _gelu(features: Any, approximate: bool = False) -> Any:
    return ops.gelu(features, approximate=approximate)


def _silu(features: Any, beta: float = 1.0) -> Any:
    return features * ops.sigmoid(features if beta == 1.0 else beta * features)


def _split(value: Any, num_or_size_splits: Any, axis: Any = 0) -> Any:
    if isinstance(num_or_size_splits, list | tuple):
        sizes = _sizes(num_or_size_splits)
        num_or_size_splits = [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)]
    return ops.split(value, num_or_size_splits, axis=_size(axis))


def _where(condition: Any, x: Any, y: Any) -> Any:
    return ops.where(condition, x, y)


def _pad(tensor: Any, paddings: Any) -> Any:
    return ops.pad(tensor, [_sizes(pair) for pair in paddings])


def _tile(input: Any, multiples: Any) -> Any:
    return ops.tile(input, _sizes(multiples))


_BINARY = {
    "__operators__.add": ops.add, "__operators__.eq": ops.equal, "__operators__.ne": ops.not_equal,
    "math.add": ops.add, "math.subtract": ops.subtract, "math.multiply": ops.multiply,
    "math.divide": ops.divide, "math.truediv": ops.true_divide, "math.floordiv": ops.floor_divide,
    "math.pow": ops.power, "math.maximum": ops.maximum, "math.minimum": ops.minimum,
    "math.squared_difference": lambda x, y: ops.square(x - y),
    "math.equal": ops.equal, "math.not_equal": ops.not_equal,
    "math.greater": ops.greater, "math.greater_equal": ops.greater_equal,
    "math.less": ops.less, "math.less_equal": ops.less_equal,
    "math.logical_and": ops.logical_and, "math.logical_or": ops.logical_or,
}  # fmt: skip
_REDUCTIONS = {
    "math.reduce_mean": ops.mean, "math.reduce_sum": ops.sum, "math.reduce_max": ops.max, "math.reduce_min": ops.min,
    "math.reduce_prod": ops.prod, "math.reduce_variance": ops.var, "math.reduce_std": ops.std,
}  # fmt: skip
_UNARY = {
    "math.negative": (ops.negative, "x"), "math.abs": (ops.abs, "x"), "math.square": (ops.square, "x"),
    "math.sqrt": (ops.sqrt, "x"), "math.rsqrt": (ops.rsqrt, "x"), "math.exp": (ops.exp, "x"),
    "math.log": (ops.log, "x"), "math.tanh": (ops.tanh, "x"), "math.sigmoid": (ops.sigmoid, "x"),
    "math.sin": (ops.sin, "x"), "math.cos": (ops.cos, "x"), "math.sign": (ops.sign, "x"),
    "math.softplus": (ops.softplus, "features"), "math.logical_not": (ops.logical_not, "x"),
    "nn.relu": (ops.relu, "features"), "nn.relu6": (ops.relu6, "features"), "nn.elu": (ops.elu, "features"),
    "nn.selu": (ops.selu, "features"), "identity": (lambda x: x, "input"),
    "zeros_like": (ops.zeros_like, "input"), "ones_like": (ops.ones_like, "input"),
}  # fmt: skip
# By TensorFlow's name of the operation. The arguments have TensorFlow's names.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{symbol: _binary(function) for symbol, function in _BINARY.items()},
    **{symbol: _reduction(function) for symbol, function in _REDUCTIONS.items()},
    **{symbol: _unary(function, argument) for symbol, (function, argument) in _UNARY.items()},
    "__operators__.getitem": _get_item,
    "reshape": _reshape,
    "cast": _cast,
    "concat": _concatenate,
    "stack": _stack,
    "split": _split,
    "transpose": _transpose,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "clip_by_value": _clip,
    "linalg.matmul": _matmul,
    "nn.softmax": _softmax,
    "nn.leaky_relu": _leaky_relu,
    "nn.gelu": _gelu,
    "nn.silu": _silu,
    "where": _where,
    "pad": _pad,
    "tile": _tile,
}


def _unsupported(layer: Any, remedy: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"Each operation must be one that Keras 3 has. Received: {layer.name!r} (tf.{layer.symbol}). {remedy}"
    )
