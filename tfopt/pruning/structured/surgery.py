"""Builds a model anew without some of its channels. Weights and pruning masks are carried over."""

from __future__ import annotations

import copy
from typing import Any

import keras
import numpy as np

from tfopt.models.copying import Rebuild, on_devices_of
from tfopt.models.plain_models import plain_copy
from tfopt.pruning.channels.call import Part, Setting
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
    return on_devices_of(model, _Smaller(channels, kept).model, model)


class _Smaller(Rebuild):
    def __init__(self, channels: ChannelGroups, kept: Any) -> None:
        super().__init__()
        self.channels, self.kept = channels, kept

    def input_shape(self, tensor: Any) -> list[int | None]:
        """Returns the shape of a new input. That of a nested model may have fewer channels."""
        axes = self.channels.trace.tensors[id(tensor)].axes
        return [
            self._size(axis) if isinstance(axis, np.ndarray) else size
            for axis, size in zip(axes, tensor.shape, strict=True)
        ]

    def operation(self, operation: Any) -> Any:
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

    def part(self, variable: Any, values: Any) -> Any:
        """Returns the kept part of a variable's values."""
        weight = self.channels.trace.weights.get(id(variable))
        for dimension, axis in enumerate(weight.axes if weight else ()):
            if isinstance(axis, np.ndarray):
                values = np.take(values, self.channels.kept_indices(axis, self.kept), axis=dimension)
        return values

    def _value(self, setting: Setting) -> Any:
        if isinstance(setting, Part):
            return self._size(setting.ids) // setting.divisor
        if isinstance(setting, np.ndarray):
            return self._size(setting)
        return [self._value(each) for each in setting] if isinstance(setting, list | tuple) else setting

    def _size(self, axis: Any) -> int:
        return self.channels.size(axis, self.kept)
