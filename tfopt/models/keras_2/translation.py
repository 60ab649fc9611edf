"""What Keras 2 has becomes what Keras 3 has.

A layer: its config is translated, and the class of the same name reads it. An operation of TensorFlow that a Keras 2
graph holds as a layer: it becomes an operation of `keras.ops`.
"""

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

# Arguments that Keras 3 does not take, and without which the layer computes the same.
WITHOUT_EFFECT = frozenset(
    {"batch_input_shape", "build_config", "compile_config", "fused", "implementation", "input_length"}
    | {"query_shape", "key_shape", "value_shape", "rng_type", "vocabulary_size"}
)
# Keras 2 writes these into configs of layers that do not use them.
UNUSED = dict.fromkeys(
    ("SeparableConv1D", "SeparableConv2D"), ("kernel_initializer", "kernel_regularizer", "kernel_constraint")
)
RENAMED = {"LeakyReLU": {"alpha": "negative_slope"}}
BASE_ARGUMENTS = {"name", "trainable", "dtype", "activity_regularizer"}  # of every layer with **kwargs
REMEDIES = {
    "Lambda": "A Lambda holds Python code, which cannot be converted. Use operations of TensorFlow directly on the "
    'tensors, or write a layer class, and pass custom_objects={"Name": its Keras 3 class}.',
    "PruneLowMagnitude": "Call tfmot.sparsity.keras.strip_pruning(model) first, and convert what it returns.",
    **dict.fromkeys(
        ("QuantizeWrapper", "QuantizeWrapperV2", "QuantizeLayer"),
        "Convert the float model, and quantize the Keras 3 model with tfopt.quantize.",
    ),
}


def name_in_keras_3(name: str) -> str:
    """Returns the name of a layer without the `/` that Keras 3 forbids."""
    return name.replace("/", "_")


def convert_layer(layer: Any, convert: Callable[[Any], keras.Layer], custom_objects: Mapping[str, Any]) -> keras.Layer:
    """Returns a Keras 3 layer, without the weights, with the settings of a Keras 2 layer.

    `convert` does this for a layer inside a wrapper. `custom_objects` are classes and functions of Keras 3 by the names
    that they have in Keras 2.
    """
    kind = type(layer).__name__
    own = kind in custom_objects
    if kind in REMEDIES and not own:
        raise _unsupported(layer.name, kind, REMEDIES[kind])
    if not own and (not type(layer).__module__.startswith("tf_keras.") or not hasattr(keras.layers, kind)):
        remedy = f'Pass custom_objects={{"{kind}": a Keras 3 class that takes its config and has the same weights}}.'
        raise _unsupported(layer.name, kind, remedy)
    config = _layer_config(kind, _own_config(layer), layer.name, custom_objects)
    with keras.saving.custom_object_scope(dict(custom_objects)):
        try:
            if kind == "TimeDistributed" and not own:  # the layer inside may be a model, or be shared
                return keras.layers.TimeDistributed(**config | {"layer": convert(layer.layer)})
            return (custom_objects[kind] if own else getattr(keras.layers, kind)).from_config(config)
        except UnsupportedLayerError:
            raise
        except Exception as error:  # Keras raises many kinds for a config that it cannot read
            raise _unsupported(layer.name, kind, f"Keras 3 does not take its config: {error}") from error


def _own_config(layer: Any) -> dict[str, Any]:
    """Returns the config, with the vocabulary that `adapt` may have found, which Keras 2 keeps elsewhere."""
    config = dict(layer.get_config())
    if hasattr(layer, "get_vocabulary"):
        if config.get("output_mode") == "tf_idf":
            remedy = 'The weights of output_mode="tf_idf" are not carried over. Adapt a Keras 3 layer to the data.'
            raise _unsupported(layer.name, type(layer).__name__, remedy)
        words = layer.get_vocabulary(include_special_tokens=False)
        config["vocabulary"] = list(words) or None
    if type(layer).__name__ == "Discretization" and layer.bin_boundaries is not None:
        config |= {"bin_boundaries": list(layer.bin_boundaries), "num_bins": None}
    return config


def _layer_config(kind: str, config: Mapping[str, Any], name: str, custom: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config that the Keras 3 class takes. `name` is that of the layer of the graph, for messages."""
    translated = {}
    for argument, value in config.items():
        if argument in WITHOUT_EFFECT or argument in UNUSED.get(kind, ()):
            continue
        argument = RENAMED.get(kind, {}).get(argument, argument)
        if kind not in custom and argument not in _arguments(kind):
            # It is off, or it is the flag that each layer gets later.
            if value is None or value is False or (argument, value) in (("groups", 1), ("trainable", True)):
                continue
            remedy = f"Keras 3 has no argument {argument!r}, here {value!r}. Build the layer without it."
            raise _unsupported(name, kind, remedy)
        translated[argument] = _value(argument, value, name, custom)
    if "name" in translated:
        translated["name"] = name_in_keras_3(translated["name"])
    if kind == "BatchNormalization" and isinstance(translated.get("axis"), list | tuple):
        if len(translated["axis"]) != 1:
            raise _unsupported(name, kind, f"axis must be one axis. Received: axis={translated['axis']}.")
        translated["axis"] = translated["axis"][0]
    return translated


def _value(argument: str, value: Any, name: str, custom: Mapping[str, Any]) -> Any:
    if argument == "dtype" and isinstance(value, Mapping):  # a policy
        return value["config"]["name"]
    if "activation" in argument and _function_name(value) == "hard_sigmoid":
        if "hard_sigmoid" not in custom:
            remedy = (
                "hard_sigmoid is max(0, min(1, 0.2 x + 0.5)) in Keras 2, and has another slope in Keras 3. "
                'Pass custom_objects={"hard_sigmoid": a function of your own}, registered so that the model can load.'
            )
            raise _unsupported(name, "activation", remedy)
        return custom["hard_sigmoid"]
    if isinstance(value, Mapping) and "class_name" in value and isinstance(value.get("config"), Mapping):
        kind = value["class_name"]
        if not hasattr(keras.layers, kind) and kind not in custom:
            return value  # an initializer, a regularizer or a constraint, which Keras 3 writes in the same way
        config = _layer_config(kind, value["config"], name, custom)
        if kind in custom:
            return {"module": None, "class_name": kind, "config": config, "registered_name": kind}
        return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}
    if isinstance(value, list | tuple):
        return [_value(argument, item, name, custom) for item in value]
    return value


def _function_name(value: Any) -> Any:
    return value.get("config") if isinstance(value, Mapping) else getattr(value, "__name__", value)


def _arguments(kind: str) -> set[str]:
    parameters = inspect.signature(getattr(keras.layers, kind).__init__).parameters
    takes_more = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return {*parameters} | (BASE_ARGUMENTS if takes_more else set())


def _unsupported(name: str, kind: str, remedy: str, what: str = "layer") -> UnsupportedLayerError:
    return UnsupportedLayerError(f"Each {what} must be one that Keras 3 has. Received: {name!r} ({kind}). {remedy}")


# Operations of one or two tensors that keras.ops has by the same name, after TensorFlow's module.
SAME_NAME = (
    "__operators__.add", "math.abs", "math.add", "math.cos", "math.divide", "math.equal", "math.erf", "math.exp",
    "math.floor", "math.greater", "math.greater_equal", "math.less", "math.less_equal", "math.log",
    "math.logical_and", "math.logical_not", "math.logical_or", "math.maximum", "math.minimum", "math.multiply",
    "math.negative", "math.not_equal", "math.rsqrt", "math.sigmoid", "math.sign", "math.sin", "math.softplus",
    "math.sqrt", "math.square", "math.subtract", "math.tanh", "nn.elu", "nn.relu", "nn.relu6", "nn.selu", "ones_like",
    "stop_gradient", "zeros_like",
)  # fmt: skip
OF_TENSORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(ops, name.rpartition(".")[2]) for name in SAME_NAME},
    "__operators__.eq": ops.equal,
    "__operators__.ne": ops.not_equal,
    "compat.v1.floor_div": ops.floor_divide,
    "identity": lambda x: x,
    "math.floormod": ops.mod,
    "math.pow": ops.power,
    "math.squared_difference": lambda x, y: ops.square(x - y),
    "math.truediv": ops.true_divide,
}
TENSORS = {"x", "y", "self", "other", "features", "input"}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"math.reduce_{name}": getattr(ops, name) for name in ("all", "any", "logsumexp", "max", "mean", "min", "prod")},
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
    """Computes an operation, a TFOpLambda, on Keras 3 tensors, and gives it the name that it has in Keras 2."""
    outputs = _computed(layer, args, kwargs)
    given = {id(tensor) for tensor in keras.tree.flatten((args, kwargs))}
    last = next((tensor for tensor in keras.tree.flatten(outputs) if id(tensor) not in given), None)
    if last is not None:  # tf.identity makes nothing
        history(last)[0].name = layer.name
    return outputs


def rename_automatic(outputs: Iterable[Any], made: Iterable[Any]) -> None:
    """Gives new names to operations whose automatic names others have: Keras 3 makes some for masks.

    The layers and operations that `made` the given tensors on purpose keep their names.
    """
    on_purpose = {id(history(tensor)[0]) for tensor in made}
    waiting, found, seen = list(outputs), {}, set()
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
        raise _no_counterpart(layer, f"{error} Use a layer of Keras in its place.") from error
    raise _no_counterpart(layer, "Use a layer of Keras in its place.")


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
            raise _no_counterpart(layer, f"Its argument {name!r} cannot be converted. Leave it at its default.")


def _no_counterpart(layer: Any, remedy: str) -> UnsupportedLayerError:
    return _unsupported(layer.name, f"tf.{layer.symbol}", remedy, "operation")
