"""The structure of a Keras model: the paths of its layers, the layers inside a layer, the layers behind its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras import layers

from tfopt.compat import layers as compat

# These hand on what they are given, but cast it to their own compute dtype: as the last layer they hide the one that
# computes the output, and both have to be float32.
HANDS_ON = (
    layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector, layers.Dropout, layers.Identity,
    layers.Cropping1D, layers.Cropping2D, layers.Cropping3D, layers.Activation, layers.Softmax, layers.ReLU,
)  # fmt: skip


def layer_path(model: keras.Model, layer: keras.Layer) -> str:
    """Names of the layers it is in, without the model's own, which only a Sequential model puts in front."""
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


def layers_inside(layer: keras.Layer) -> list[keras.Layer]:
    """A layer with those inside it, such as the one a TimeDistributed wraps."""
    return compat.layers_inside(layer)


def output_layers(model: keras.Model) -> list[keras.Layer]:
    """The layers that compute the outputs, first the one nearest to the output, each once."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if outputs:
        return list({id(layer): layer for output in outputs for layer in _behind(output)}.values())
    return [layer for layer in model.layers if _is_softmax(layer)]


def _behind(tensor: Any) -> Iterator[keras.Layer]:
    """Walks from a symbolic output to the layers that compute it, through what only hands values on."""
    operation, node_index, tensor_index = compat.history(tensor)
    if isinstance(operation, layers.InputLayer):
        return
    if isinstance(operation, keras.Model):  # a model used as a layer
        inner = keras.tree.flatten(getattr(operation, "outputs", None) or [])
        yield from _behind(inner[tensor_index]) if inner else output_layers(operation)
        return
    is_layer = isinstance(operation, keras.Layer)
    if is_layer:
        yield operation
    # An operation such as keras.ops.softmax has no policy of its own: it computes in the dtype it is given.
    if not is_layer or isinstance(operation, HANDS_ON):
        for source in compat.calls_of(operation)[node_index].input_tensors:
            yield from _behind(source)


def _is_softmax(layer: keras.Layer) -> bool:
    return isinstance(layer, layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax
