"""Plain functional and Sequential models, whose graph tells all that they compute, and copies of their layers."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tfopt.compat.layers import functional_class
from tfopt.errors import UnsupportedLayerError


def is_plain(model: Any) -> bool:
    """Returns whether a model is functional or Sequential itself. A subclass may compute something else."""
    return type(model) in (functional_class(), keras.Sequential)


def as_functional(model: Any) -> Any:
    """Returns a functional model of the same layers, if the model is Sequential."""
    return keras.Model(model.inputs, model.outputs) if isinstance(model, keras.Sequential) else model


def inputs_in_order(model: Any, given: Any) -> Any:
    """Returns the inputs in the order of the model, if they are given as a dict and the model takes no dict."""
    if isinstance(given, dict) and not isinstance(model.input, dict):
        return [given[tensor.name] for tensor in model.inputs]
    return given


def plain_copy(layer: Any, /, **changes: Any) -> Any:
    """Returns a new layer, or operation, of the same class and config, apart from `changes`.

    Raises:
        UnsupportedLayerError: The layer's config does not give an equal layer.
    """
    if isinstance(layer, layers.Lambda):  # its config holds the function's bytecode, but no closure or globals
        return layers.Lambda(layer.function, name=layer.name, dtype=layer.dtype_policy, arguments=layer.arguments)
    try:
        return type(layer).from_config({**layer.get_config(), **changes})
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedLayerError(
            f"Layers must be rebuildable from their config. Received: {layer.name!r} ({type(layer).__name__}): "
            f"{str(error).splitlines()[0]} Give the class a get_config that returns its constructor's arguments."
        ) from error
