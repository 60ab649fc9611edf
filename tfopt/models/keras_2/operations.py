"""Operations of TensorFlow that a Keras 2 graph holds as layers become operations of `keras.ops`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfopt.compat.layers import calls_of, history
from tfopt.errors import UnsupportedLayerError

# Operations of one or two tensors, by TensorFlow's name.
OF_TENSORS: dict[str, Callable[..., Any]] = {
    "__operators__.add": ops.add,
    "__operators__.eq": ops.equal,
    "__operators__.ne": ops.not_equal,
    "compat.v1.floor_div": ops.floor_divide,
    "identity": lambda x: x,
    "math.abs": ops.abs,
    "math.add": ops.add,
    "math.cos": ops.cos,
    "math.divide": ops.divide,
    "math.equal": ops.equal,
    "math.erf": ops.erf,
    "math.exp": ops.exp,
    "math.floor": ops.floor,
    "math.floormod": ops.mod,
    "math.greater": ops.greater,
    "math.greater_equal": ops.greater_equal,
    "math.less": ops.less,
    "math.less_equal": ops.less_equal,
    "math.log": ops.log,
    "math.logical_and": ops.logical_and,
    "math.logical_not": ops.logical_not,
    "math.logical_or": ops.logical_or,
    "math.maximum": ops.maximum,
    "math.minimum": ops.minimum,
    "math.multiply": ops.multiply,
    "math.negative": ops.negative,
    "math.not_equal": ops.not_equal,
    "math.pow": ops.power,
    "math.rsqrt": ops.rsqrt,
    "math.sigmoid": ops.sigmoid,
    "math.sign": ops.sign,
    "math.sin": ops.sin,
    "math.softplus": ops.softplus,
    "math.sqrt": ops.sqrt,
    "math.square": ops.square,
    "math.squared_difference": lambda x, y: ops.square(x - y),
    "math.subtract": ops.subtract,
    "math.tanh": ops.tanh,
    "math.truediv": ops.true_divide,
    "nn.elu": ops.elu,
    "nn.relu": ops.relu,
    "nn.relu6": ops.relu6,
    "nn.selu": ops.selu,
    "ones_like": ops.ones_like,
    "stop_gradient": ops.stop_gradient,
    "zeros_like": ops.zeros_like,
}
TENSORS = {"x", "y", "self", "other", "features", "input"}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "math.reduce_all": ops.all,
    "math.reduce_any": ops.any,
    "math.reduce_logsumexp": ops.logsumexp,
    "math.reduce_max": ops.max,
    "math.reduce_mean": ops.mean,
    "math.reduce_min": ops.min,
    "math.reduce_prod": ops.prod,
    "math.reduce_std": ops.std,
    "math.reduce_sum": ops.sum,
    "math.reduce_variance": ops.var,
}
# The arguments have TensorFlow's names. Arguments at TensorFlow's defaults are left out of the call.
WITH_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "__operators__.getitem": lambda tensor, slice_spec: tensor[_index(slice_spec)],
    "cast": lambda x, dtype: ops.cast(x, tf.as_dtype(dtype).name),
    "clip_by_value": lambda t, clip_value_min, clip_value_max: ops.minimum(
        ops.maximum(t, clip_value_min), clip_value_max
    ),
    "compat.v1.gather": lambda params, indices, axis=0: ops.take(params, indices, axis=_sizes(axis)),
    "compat.v1.pad": lambda tensor, paddings, constant_values=0: ops.pad(
        tensor, _sizes(paddings), constant_values=constant_values
    ),
    "compat.v1.squeeze": lambda input, axis=None: ops.squeeze(input, _sizes(axis)),
    "compat.v1.transpose": lambda a, perm=None: ops.transpose(a, _sizes(perm)),
    "concat": lambda values, axis: ops.concatenate(values, axis=_sizes(axis)),
    "einsum": lambda equation, inputs: ops.einsum(equation, *inputs),
    "expand_dims": lambda input, axis: ops.expand_dims(input, _sizes(axis)),
    "linalg.matmul": lambda a, b, transpose_a=False, transpose_b=False: ops.matmul(
        ops.swapaxes(a, -1, -2) if transpose_a else a, ops.swapaxes(b, -1, -2) if transpose_b else b
    ),
    "math.add_n": lambda inputs: sum(inputs[1:], inputs[0]),
    "math.l2_normalize": lambda x, axis=None, epsilon=1e-12: (
        x * ops.rsqrt(ops.maximum(ops.sum(ops.square(x), axis=_sizes(axis), keepdims=True), epsilon))
    ),
    "nn.gelu": lambda features, approximate=False: ops.gelu(features, approximate=approximate),
    "nn.leaky_relu": lambda features, alpha=0.2: ops.leaky_relu(features, negative_slope=alpha),
    "nn.log_softmax": lambda logits, axis=-1: ops.log_softmax(logits, axis=axis),
    "nn.silu": lambda features: ops.silu(features),
    "nn.softmax": lambda logits, axis=-1: ops.softmax(logits, axis=axis),
    "reshape": lambda tensor, shape: ops.reshape(tensor, _sizes(shape)),
    "split": lambda value, num_or_size_splits, axis=0: ops.split(
        value, _places(_sizes(num_or_size_splits)), axis=_sizes(axis)
    ),
    "stack": lambda values, axis=0: ops.stack(values, axis=axis),
    "tile": lambda input, multiples: ops.tile(input, _sizes(multiples)),
    "unstack": lambda value, num=None, axis=0: ops.unstack(value, num, axis),
    "where": lambda condition, x, y: ops.where(condition, x, y),
}


def is_operation(layer: Any) -> bool:
    """Returns whether a layer of a Keras 2 graph is an operation of TensorFlow, as `x + y` and `tf.reshape(x, ...)`."""
    return type(layer).__name__ in ("TFOpLambda", "SlicingOpLambda")


def convert_operation(layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Computes an operation on Keras 3 tensors, and gives it the name that it has in Keras 2.

    Args:
        layer: The TFOpLambda of Keras 2.
        args: Positional arguments of its call, with Keras 3 tensors.
        kwargs: The arguments by name.
    Raises:
        UnsupportedLayerError: The operation has no counterpart, or not with these arguments.
    """
    outputs = _computed(layer, args, kwargs)
    given = {id(tensor) for tensor in keras.tree.flatten((args, kwargs))}
    last = next((tensor for tensor in keras.tree.flatten(outputs) if id(tensor) not in given), None)
    if last is not None:  # tf.identity makes nothing
        history(last)[0].name = layer.name
    return outputs


def rename_automatic(outputs: Iterable[Any], made: Iterable[Any]) -> None:
    """Gives new names to operations whose automatic names others have: Keras 3 makes some for masks.

    Args:
        outputs: The outputs of the graph.
        made: The tensors that are made on purpose, whose layers and operations keep their names.
    """
    on_purpose = {id(history(tensor)[0]) for tensor in made}
    waiting, found = list(outputs), {}
    seen = set()
    while waiting:
        operation, place, _ = history(waiting.pop())
        if (id(operation), place) not in seen:
            seen.add((id(operation), place))
            found[id(operation)] = operation
            waiting += calls_of(operation)[place].input_tensors
    taken: set[str] = set()
    for operation in sorted(found.values(), key=lambda each: id(each) not in on_purpose):
        while operation.name in taken and not isinstance(operation, keras.Layer):
            operation.name += "_1"
        taken.add(operation.name)


def _computed(layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    signature = inspect.signature(layer.function)
    values = {
        name: value
        for name, value in signature.bind(*args, **kwargs).arguments.items()
        if name != "name" and not _is_equal(value, signature.parameters[name].default)
    }
    try:
        if layer.symbol in OF_TENSORS:
            _check_names(layer, values, TENSORS)
            return OF_TENSORS[layer.symbol](*values.values())
        if layer.symbol in REDUCTIONS:
            tensor, axis, keepdims = values.pop("input_tensor"), values.pop("axis", None), values.pop("keepdims", False)
            _check_names(layer, values, ())
            return REDUCTIONS[layer.symbol](tensor, axis=_sizes(axis), keepdims=keepdims)
        if layer.symbol in WITH_ARGUMENTS:
            operation = WITH_ARGUMENTS[layer.symbol]
            _check_names(layer, values, inspect.signature(operation).parameters)
            return operation(**values)
    except (TypeError, ValueError) as error:
        raise _unsupported(layer, f"{error} Use a layer of Keras in its place.") from error
    raise _unsupported(layer, "Use a layer of Keras in its place.")


def _is_equal(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(value, str | int | float) and type(value) is type(default) and value == default
    )


def _index(item: Any) -> Any:
    """Returns what stands in `x[...]`; Keras 2 keeps a slice as a dict."""
    if isinstance(item, Mapping):
        return slice(*(_sizes(item[name]) for name in ("start", "stop", "step")))
    if isinstance(item, list | tuple):
        return tuple(_index(each) for each in item)
    return item if isinstance(item, EllipsisType) else _sizes(item)


def _sizes(value: Any) -> Any:
    """Returns sizes, axes or places as integers."""
    if isinstance(value, keras.KerasTensor):
        raise ValueError("A size or an index is known only when the model runs.")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_sizes(each) for each in value)
    return None if value is None else int(value)


def _places(splits: int | tuple[int, ...]) -> int | list[int]:
    """Returns where `keras.ops.split` cuts: TensorFlow is given the sizes of the parts."""
    if isinstance(splits, int):
        return splits
    return [sum(splits[: count + 1]) for count in range(len(splits) - 1)]


def _check_names(layer: Any, values: Mapping[str, Any], known: Any) -> None:
    for name in values:
        if name not in known:
            raise _unsupported(layer, f"Its argument {name!r} cannot be converted. Leave it at its default.")


def _unsupported(layer: Any, remedy: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"Each operation must be one that Keras 3 has. Received: {layer.name!r} (tf.{layer.symbol}). {remedy}"
    )
