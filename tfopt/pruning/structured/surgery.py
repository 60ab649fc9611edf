"""Builds a model anew without some of its channels. Weights and pruning masks are carried over."""

from __future__ import annotations

import copy
from typing import Any

import keras
import numpy as np

from tfopt.compat.layers import run_through_graph
from tfopt.compat.tensorflow import strategy_of
from tfopt.errors import UnsupportedLayerError
from tfopt.models.plain_models import as_functional, inputs_in_order, is_plain, plain_copy
from tfopt.pruning.channels.call import Part, Setting
from tfopt.pruning.masks import Mask, attach_mask
from tfopt.pruning.structured.groups import ChannelGroups


def without_channels(model: keras.Model, channels: ChannelGroups, kept: Any) -> keras.Model:
    """Returns a new model of the kept units. Layers, names, inputs and outputs are those of the model.

    Args:
        model: The model that `channels` describes.
        channels: Its groups.
        kept: Boolean for each unit, True where it stays.
    Raises:
        UnsupportedLayerError: A layer cannot be rebuilt from its config.
    """
    # The weights of the new model lie on the devices of the old one.
    strategy = strategy_of(model.variables[0].value) if model.variables else None
    if strategy is None:
        return _Rebuild(channels, kept).model(model)
    with strategy.scope():
        return _Rebuild(channels, kept).model(model)


class _Rebuild:
    def __init__(self, channels: ChannelGroups, kept: Any) -> None:
        self.channels, self.kept = channels, kept
        self._made: dict[int, Any] = {}  # the new operation of each old one, since a layer may be called twice
        self._copied: set[int] = set()

    def model(self, model: Any) -> Any:
        graph = as_functional(model)
        inputs = keras.tree.map_structure(self._input, graph.input)
        outputs = run_through_graph(graph, inputs, self._call)
        if isinstance(model, keras.Sequential):
            made = [self._made[id(layer)] for layer in model.layers]
            return keras.Sequential([*keras.tree.flatten(inputs), *made], name=model.name)
        return keras.Model(inputs, outputs, name=model.name)

    def _input(self, tensor: Any) -> Any:
        """Returns a new input. That of a nested model may have fewer channels."""
        axes = self.channels.trace.tensors[id(tensor)].axes
        shape = [
            self._size(axis) if isinstance(axis, np.ndarray) else size
            for axis, size in zip(axes, tensor.shape, strict=True)
        ]
        return keras.Input(batch_shape=shape, dtype=tensor.dtype, name=tensor.name)

    def _call(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if id(operation) not in self._made:
            self._made[id(operation)] = self.model(operation) if is_plain(operation) else self._resized(operation)
        made = self._made[id(operation)]
        if is_plain(operation):
            return made(inputs_in_order(made, args[0]))
        outputs = made(*args, **kwargs)
        if isinstance(operation, keras.Layer) and id(operation) not in self._copied:
            self._copied.add(id(operation))
            self._carry_over(operation, made)
        return outputs

    def _resized(self, operation: Any) -> Any:
        """Returns a copy of an operation whose config has the new sizes."""
        resized = self.channels.trace.resized.get(id(operation))
        if resized is None:
            return plain_copy(operation)
        config = copy.deepcopy(operation.get_config())
        for path, setting in resized.settings.items():
            place = config
            for name in path[:-1]:
                place.pop("build_config", None)  # of a wrapped layer: it would be built for the old sizes
                place = place[name]
            place[path[-1]] = self._value(setting)
        return plain_copy(operation, **config)

    def _value(self, setting: Setting) -> Any:
        if isinstance(setting, Part):
            return self._size(setting.ids) // setting.divisor
        if isinstance(setting, np.ndarray):
            return self._size(setting)
        return [self._value(each) for each in setting] if isinstance(setting, list | tuple) else setting

    def _size(self, axis: Any) -> int:
        return self.channels.size(axis, self.kept)

    def _carry_over(self, old: Any, new: Any) -> None:
        for one, other in zip(old.variables, new.variables, strict=True):
            values = self._part(one, one.numpy())
            if values.shape != tuple(other.shape):
                raise UnsupportedLayerError(
                    f"A layer that is rebuilt from its config must have the same weights. Received: {old.name!r} "
                    f"({type(old).__name__}) with {one.name} {values.shape}, rebuilt with {tuple(other.shape)}. Give "
                    "the class a get_config that returns its constructor's arguments, or exclude it."
                )
            other.assign(values)
            if isinstance(one.constraint, Mask):
                attach_mask(other).assign(self._part(one, one.constraint.kept.numpy()))
        if isinstance(new, keras.layers.Normalization):
            new.finalize_state()  # it computes with constants made of its variables

    def _part(self, variable: Any, values: Any) -> Any:
        """Returns the kept part of a variable's values."""
        weight = self.channels.trace.weights.get(id(variable))
        for dimension, axis in enumerate(weight.axes if weight else ()):
            if isinstance(axis, np.ndarray):
                values = np.take(values, self.channels.kept_indices(axis, self.kept), axis=dimension)
        return values
