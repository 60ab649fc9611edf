"""The structure of a Keras model: the paths of its layers, and the layers of its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras import layers

from tfopt.compat import layers as compat

# These layers pass their input on, cast to their compute dtype. As the last layer, such a layer hides the layer that
# computes the output, and both must be float32.
PASSES_ON = (
    layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector, layers.Dropout, layers.Identity,
    layers.Cropping1D, layers.Cropping2D, layers.Cropping3D, layers.Activation, layers.Softmax, layers.ReLU,
)  # fmt: skip


def layer_path(model: keras.Model, layer: keras.Layer) -> str:
    """Returns the path of a layer, without the name of the model, which only a Sequential model puts in front."""
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


def output_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that compute the outputs, each once, and the nearest to the output first.

    A subclassed model is called once on symbolic inputs. If that is impossible, since it is not built or its `call`
    needs real tensors, only its own layers that end in a softmax are known.
    """
    outputs = _symbolic_outputs(model)
    if outputs:
        return list({id(layer): layer for output in outputs for layer in _behind(output)}.values())
    return [layer for layer in model.layers if _is_softmax(layer)]


def can_follow_outputs(model: keras.Model) -> bool:
    """Returns whether `output_layers` finds the layers of all outputs, and not only those that end in a softmax."""
    return bool(_symbolic_outputs(model))


def _symbolic_outputs(model: keras.Model) -> list[Any]:
    return keras.tree.flatten(getattr(model, "outputs", None) or []) or _outputs_of_call(model)


def _outputs_of_call(model: keras.Model) -> list[Any]:
    try:
        inputs = keras.tree.map_structure(
            lambda spec: keras.KerasTensor(spec.shape, spec.dtype), compat.input_signature(model)
        )
        with keras.StatelessScope():  # a call may update variables, such as those of random seeds
            outputs = keras.tree.flatten(model.call(*inputs))
    except Exception:  # noqa: BLE001 - code of the user, which may do anything with tensors that have no values
        return []
    return [output for output in outputs if isinstance(output, keras.KerasTensor)]


def _behind(tensor: Any) -> Iterator[keras.Layer]:
    """Walks from a symbolic output to the layers that compute it, through the layers that only pass values on."""
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
    # An operation such as keras.ops.softmax has no dtype policy: it computes in the dtype of its input.
    if not is_layer or isinstance(operation, PASSES_ON):
        for source in compat.calls_of(operation)[node_index].input_tensors:
            yield from _behind(source)


def _is_softmax(layer: keras.Layer) -> bool:
    return isinstance(layer, layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax
