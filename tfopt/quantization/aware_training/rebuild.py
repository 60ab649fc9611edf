"""Rebuilds a functional model layer by layer. Layers can be replaced, and layers can be inserted after them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from tfopt.compat.layers import layers_inside, run_through_graph
from tfopt.errors import UnsupportedModelError
from tfopt.models.copying import as_functional, called_with_state, inputs_in_order, is_plain, new_input, plain_copy
from tfopt.quantization.aware_training.fake_quant import CallCount, WeightRange


@dataclass(frozen=True)
class Place:
    """The source of a tensor: the name of an operation of the model, the number of the call, and of the output."""

    name: str
    call: int = 0
    output: int = 0

    def __str__(self) -> str:
        return self.name + (f"_call{self.call}" if self.call else "") + (f"_output{self.output}" if self.output else "")


def check_rebuildable(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"model must be a Keras model to be trained with fake quantization. Received: {type(model).__name__}. "
            "Pass the functional or Sequential model itself; a SavedModel cannot be trained."
        )
    if not is_plain(model):
        raise UnsupportedModelError(
            "model must be functional or Sequential to be trained with fake quantization: the layers of a subclassed "
            f"model are connected in its own code. Received: {model.name!r} ({type(model).__name__}). "
            "Call its layers on a keras.Input one by one, and pass keras.Model(inputs, outputs); or quantize it after "
            "training, with training=False."
        )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built before it can be quantized. Received: {model.name!r} without weights. "
            "Give it an Input, or call it once on a batch of real shape."
        )


def rebuild(
    model: keras.Model,
    replace: Callable[[Any], Sequence[Any]],
    attach: Callable[[Place, Any], Any] = lambda place, tensor: None,
    pairs: list[tuple[Any, Any]] | None = None,
) -> keras.Model:
    """Returns a functional model of new layers that computes the same as `model`. Nested models are flattened.

    `replace` returns the new layers in place of a layer, in order. They get its state when they are built. `attach`
    returns the layer to insert after a tensor, or None. `pairs` gets each layer with the last of its new layers.
    """
    new: dict[Any, Sequence[Any]] = {}  # the keys are the objects, because an id can be reused
    copied: set[int] = set()
    calls: Counter[str] = Counter()
    names: set[str] = set()

    def attached(name: str, tensors: Any) -> Any:
        number = calls[name]
        calls[name] += 1
        flat = keras.tree.flatten(tensors)
        for index, tensor in enumerate(flat):
            layer = attach(Place(name, number, index), tensor)
            flat[index] = tensor if layer is None else layer(tensor)
        return keras.tree.pack_sequence_as(tensors, flat)

    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operation, keras.Model) and is_plain(operation):
            inner = as_functional(operation)
            return run_through_graph(inner, inputs_in_order(inner, args[0]), call)
        if not isinstance(operation, layers.Layer):
            if operation not in new:
                name = _free_name(operation.name, names)
                new[operation] = [operation if name == operation.name else plain_copy(operation)]
                new[operation][0].name = name
            (made,) = new[operation]
            return attached(made.name, made(*args, **kwargs))
        if operation not in new:
            new[operation] = replace(operation)
            for layer in new[operation]:
                layer.name = _free_name(layer.name, names)
            if pairs is not None:
                pairs.append((operation, new[operation][-1]))
        made = new[operation]

        def run() -> Any:
            outputs: Any = None
            for number, layer in enumerate(made):
                outputs = attached(layer.name, layer(outputs) if number else layer(*args, **kwargs))
            return outputs

        return called_with_state(
            operation, made, run, copied, into=lambda: [each for layer in made for each in _without_ranges(layer)]
        )

    functional = as_functional(model)
    inputs = keras.tree.map_structure(new_input, functional.input)
    entering = keras.tree.map_structure(lambda x: attached(x.name, x), inputs)
    outputs = run_through_graph(functional, entering, call)
    return keras.Model(inputs, outputs, name=model.name)


def _without_ranges(layer: Any) -> list[Any]:
    parts = (part for part in layers_inside(layer) if isinstance(part, WeightRange | CallCount))
    ranges = {id(variable) for part in parts for variable in part.variables}
    return [variable for variable in layer.variables if id(variable) not in ranges]


def _free_name(name: str, names: set[str]) -> str:
    """Returns a name like this one that is not taken, and takes it. Two nested models may have layers of one name."""
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
    free = next(each for each in candidates if each not in names)
    names.add(free)
    return free


SEPARABLE = {
    layers.SeparableConv1D: (layers.DepthwiseConv1D, layers.Conv1D),
    layers.SeparableConv2D: (layers.DepthwiseConv2D, layers.Conv2D),
}
CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.DepthwiseConv1D, layers.DepthwiseConv2D)
FUSED = (keras.activations.linear, keras.activations.relu, keras.activations.relu6)


def split_layer(layer: Any) -> Sequence[Any]:
    """Returns layers that together compute the same. Each tensor that needs a range is the output of one of them."""
    if type(layer) in SEPARABLE and layer.padding != "causal":  # DepthwiseConv1D has no causal padding
        return _split_separable(layer)
    if type(layer) in CONVOLUTIONS and layer.activation not in FUSED:
        activation = layers.Activation(
            layer.activation,
            activity_regularizer=layer.activity_regularizer,
            name=f"{layer.name}_activation",
            dtype=layer.dtype_policy,
        )
        return plain_copy(layer, activation=None, activity_regularizer=None), activation
    return (plain_copy(layer),)


def _split_separable(layer: Any) -> Sequence[Any]:
    """Returns the two convolutions of a separable convolution, and its activation if no kernel fuses it."""
    depthwise, pointwise = SEPARABLE[type(layer)]
    common = {"dtype": layer.dtype_policy, "data_format": layer.data_format, "trainable": layer.trainable}
    first = depthwise(
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        depth_multiplier=layer.depth_multiplier,
        dilation_rate=layer.dilation_rate,
        use_bias=False,
        depthwise_regularizer=layer.depthwise_regularizer,
        depthwise_constraint=layer.depthwise_constraint,
        name=f"{layer.name}_depthwise",
        **common,
    )
    second = pointwise(
        layer.filters,
        1,
        use_bias=layer.use_bias,
        activation=layer.activation,
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        bias_regularizer=layer.bias_regularizer,
        bias_constraint=layer.bias_constraint,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        **common,
    )
    return first, *split_layer(second)
