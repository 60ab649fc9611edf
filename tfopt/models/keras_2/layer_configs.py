"""A Keras 2 layer becomes a Keras 3 layer: its config is translated, and the class of the same name reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfopt.errors import UnsupportedLayerError

# Arguments that Keras 3 does not take, and without which the layer computes the same.
WITHOUT_EFFECT = frozenset(
    {"batch_input_shape", "build_config", "compile_config", "fused", "implementation", "input_length"}
    | {"query_shape", "key_shape", "value_shape", "rng_type", "vocabulary_size"}
)
# Keras 2 writes these into configs of layers that do not use them.
UNUSED = {
    "SeparableConv1D": {"kernel_initializer", "kernel_regularizer", "kernel_constraint"},
    "SeparableConv2D": {"kernel_initializer", "kernel_regularizer", "kernel_constraint"},
}
RENAMED = {"LeakyReLU": {"alpha": "negative_slope"}}
BASE_ARGUMENTS = {"name", "trainable", "dtype", "activity_regularizer"}  # of every layer with **kwargs
REMEDIES = {
    "Lambda": "A Lambda holds Python code, which cannot be converted. Use operations of TensorFlow directly on the "
    'tensors, or write a layer class, and pass custom_objects={"Name": its Keras 3 class}.',
    "PruneLowMagnitude": "Call tfmot.sparsity.keras.strip_pruning(model) first, and convert what it returns.",
    "QuantizeWrapper": "Convert the float model, and quantize the Keras 3 model with tfopt.quantize.",
    "QuantizeWrapperV2": "Convert the float model, and quantize the Keras 3 model with tfopt.quantize.",
    "QuantizeLayer": "Convert the float model, and quantize the Keras 3 model with tfopt.quantize.",
}


def name_in_keras_3(name: str) -> str:
    """Returns the name of a layer without the `/` that Keras 3 forbids.

    Example:
        >>> name_in_keras_3("block1/conv")
        'block1_conv'
    """
    return name.replace("/", "_")


def convert_layer(layer: Any, convert: Callable[[Any], keras.Layer], custom_objects: Mapping[str, Any]) -> keras.Layer:
    """Returns a Keras 3 layer, without the weights, with the settings of a Keras 2 layer.

    Args:
        layer: The Keras 2 layer.
        convert: Returns the Keras 3 layer of a layer inside a wrapper.
        custom_objects: Keras 3 classes and functions by the names they have in Keras 2.
    Raises:
        UnsupportedLayerError: Keras 3 has no such layer or argument.
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


def _unsupported(name: str, kind: str, remedy: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(f"Each layer must be one that Keras 3 has. Received: {name!r} ({kind}). {remedy}")
