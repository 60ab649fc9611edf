"""Private names of Keras layers, models as graphs of layers, and the symbolic tensors between them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from tfopt.compat.checks import imported, private, set_private

ATTACHED: weakref.WeakSet[keras.Layer] = weakref.WeakSet()


def layers_inside(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer with all those inside it: `_flatten_layers`, since `model.layers` has the outermost only."""
    return list(private(layer, "_flatten_layers", takes=("include_self", "recursive"))())


def direct_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer itself holds: `_layers`, since only models have a public `layers`."""
    return list(private(layer, "_layers"))


def attach_layer(model: keras.Model, layer: keras.Layer) -> None:
    """Lets a functional model train a layer outside of its graph: `_layers`, which Keras' files leave out."""
    private(model, "_layers").append(layer)
    ATTACHED.add(layer)


def attached_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that `attach_layer` gave a model, which are none of its own."""
    return [layer for layer in direct_layers(model) if layer in ATTACHED]


def detach_layer(model: keras.Model, layer: keras.Layer) -> None:
    """Takes a layer away that `attach_layer` gave a model."""
    private(model, "_layers").remove(layer)


def added_losses(layer: keras.Layer) -> list[Any]:
    """Returns the list of losses that a layer itself added: `_losses`, since `losses` is a copy with those inside."""
    return private(layer, "_losses")


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own: `_trainable_variables`, since the public list has those of the layers inside."""
    return list(private(layer, "_trainable_variables"))


def own_non_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own: `_non_trainable_variables`, since the public list has those of the layers inside."""
    return list(private(layer, "_non_trainable_variables"))


def takes_training(layer: keras.Layer) -> bool:
    """Returns whether `call` has an argument `training`: `_call_has_training_arg`, which Keras' own steps ask."""
    return bool(private(layer, "_call_has_training_arg"))


def takes_mask(layer: keras.Layer) -> bool:
    """Returns whether `call` has an argument `mask`: `_call_has_mask_arg`, which TimeDistributed asks of its layer."""
    return bool(private(layer, "_call_has_mask_arg"))


def is_given_training(operation: Any) -> bool:
    """Returns whether a graph hands `training` on to it: `_call_context_args` of layers; other operations have none."""
    return isinstance(operation, keras.Layer) and "training" in private(operation, "_call_context_args")


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras keeps with a tensor, or None: `get_keras_mask`; there is no public way."""
    return imported("keras.src.backend", "get_keras_mask", takes=("x",))(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor the mask that the next layer is to find: `set_keras_mask`; there is no public way."""
    imported("keras.src.backend", "set_keras_mask", takes=("x", "mask"))(tensor, mask)


def calls_in_order(graph: keras.Model) -> list[Any]:
    """Returns a functional model's calls in the order of computation, without its inputs: `_nodes_by_depth`."""
    nodes = private(graph, "_nodes_by_depth")
    return [node for depth in sorted(nodes, reverse=True) for node in nodes[depth] if not node.is_input]


def called_in_training(model: keras.Model) -> list[str]:
    """Returns the names of the layers that a functional model, or one inside, calls with training=True of its own.

    Keras records it for layers whose default it is too, as for all that prepare images.
    """
    graphs = [each for each in layers_inside(model) if isinstance(each, functional_class())]
    calls = [call for graph in graphs for call in calls_in_order(graph) if is_given_training(call.operation)]
    given = [call.operation for call in calls if call.arguments.kwargs.get("training") is True]
    return list(dict.fromkeys(each.name for each in given if not _prepares_images(each)))


def _prepares_images(layer: Any) -> bool:
    """Whether a layer of Keras has training=True by default."""
    of_keras = type(layer).__module__.startswith("keras.")
    return of_keras and inspect.signature(layer.call).parameters["training"].default is True


def standardize_inputs(graph: keras.Model, x: Any) -> list[Any]:
    """Returns inputs flat, in the model's order: `_standardize_inputs`, as a functional model does before a call."""
    return list(private(graph, "_standardize_inputs", takes=("inputs",))(x))


def set_dtype(tensor: keras.KerasTensor, dtype: str) -> None:
    """Sets the dtype that a symbolic tensor announces: `_dtype`, since `dtype` has no setter."""
    set_private(tensor, "_dtype", dtype)


def history(tensor: keras.KerasTensor) -> Any:
    """Returns (operation, node index, tensor index) of what made a symbolic tensor: `_keras_history`."""
    return private(tensor, "_keras_history")


def calls_of(operation: Any) -> list[Any]:
    """Returns the nodes of the calls of an operation: `_inbound_nodes`; there is no public list."""
    return list(private(operation, "_inbound_nodes"))


def functional_class() -> type[keras.Model]:
    """Returns the class of `keras.Model(inputs, outputs)`: keras.src.models.functional.Functional, not exported."""
    return imported("keras.src.models.functional", "Functional")


def run_through_graph(graph: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Calls `call(operation, ...)` for each node of a graph: `_run_through_graph`, which runs a functional model."""
    run = private(graph, "_run_through_graph", takes=("inputs", "operation_fn", "call_fn"))
    return run(inputs, call_fn=call)


def no_autocast() -> AbstractContextManager[Any]:
    """Returns a scope in which weights are read as they are: AutocastScope(None) of keras.src; none is public."""
    return imported("keras.src.backend.common.variables", "AutocastScope", takes=("dtype",))(None)


def input_signature(model: keras.Model) -> list[Any]:
    """Returns the specs of what a model was built on: `get_input_signature` of keras.src.export, as its exporter asks.

    Raises:
        ValueError: The model is not built.
    """
    return list(imported("keras.src.export.export_utils", "get_input_signature", takes=("model",))(model))


def output_projection(layer: keras.layers.GroupQueryAttention) -> keras.layers.EinsumDense:
    """Returns the last product of a GroupQueryAttention: `_output_dense`; only MultiHeadAttention has it in public."""
    return private(layer, "_output_dense")


def grouped_projections(layer: keras.layers.GroupQueryAttention) -> list[keras.layers.EinsumDense]:
    """Returns the products for query, key and value of a GroupQueryAttention: `_query_dense` and so on."""
    return [private(layer, "_query_dense"), private(layer, "_key_dense"), private(layer, "_value_dense")]


def operation_name(operation: Any) -> str | None:
    """Returns the class name of an operation of `keras.ops`, which are classes of keras.src.ops; None for others."""
    kind = type(operation)
    return kind.__name__ if kind.__module__.startswith("keras.src.ops.") else None


def is_tf_keras_graph(model: Any) -> bool:
    """Returns whether a tf_keras model is functional or Sequential: `_is_graph_network`, which tfmot asks as well."""
    return bool(private(model, "_is_graph_network"))
