"""A functional or Sequential Keras 2 (`tf_keras`) model becomes a Keras 3 model.

Keras 3 cannot read all configs of Keras 2, and reads some in another sense. So each layer is made anew from its
translated config, and the calls of the Keras 2 graph are repeated with the new layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.kinds import is_tf_keras
from tfopt.compat.layers import calls_in_order, is_tf_keras_graph, mask_of, set_mask
from tfopt.errors import UnsupportedLayerError, UnsupportedModelError, warn
from tfopt.models.copy_check import HALF, HALF_TOLERANCE, Examples, arrays, difference
from tfopt.models.copying import finalize
from tfopt.models.keras_2 import translation

RECURRENT = ("RNN", "LSTM", "GRU", "SimpleRNN", "Bidirectional", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")


def from_tf_keras(model: Any, *, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """Makes a Keras 3 model with the graph, the weights and the outputs of a Keras 2 (`tf_keras`) model.

    The model may contain shared layers, models inside models, and several inputs and outputs. Layers keep their names
    (`/`, which Keras 3 forbids, becomes `_`) and their trainable flags. Operations of TensorFlow between layers become
    operations of `keras.ops`. Exact zeros of pruned weights stay. The outputs of both models are then compared on
    random inputs. The given model stays as it is.

    What `compile` set is not carried over: the Keras 3 model is not compiled. Nor are the states of stateful layers.

    Args:
        model: A built functional or Sequential model of `tf_keras`.
        custom_objects: Keras 3 classes for the layers of your own, by the names of the Keras 2 classes, and functions
            by their names. A Keras 3 class must take the config of its Keras 2 class and have the same weights.
    Returns:
        The Keras 3 model, not compiled.
    Raises:
        UnsupportedLayerError: Keras 3 has no such layer, operation or argument, or its weights have other shapes.
        UnsupportedModelError: The model is not a functional or Sequential `tf_keras` model, is not built, or its
            outputs differ from those of the Keras 3 model.
    Example:
        >>> import tf_keras
        >>> old = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3, name="head")])
        >>> new = from_tf_keras(old)
        >>> [layer.name for layer in new.layers], new.count_params()
        (['head'], 15)
    """
    _check(model)
    conversion = _Conversion(dict(custom_objects or {}))
    converted: keras.Model = conversion.model(model)
    pairs = list(conversion.pairs.values())  # inner layers come before the wrappers and models around them
    copy_weights(pairs)
    copy_trainable_flags(pairs)
    check_outputs(pairs)
    return converted


class _Conversion:
    """The layers converted so far: a layer that is used twice, also in several models, is made once.

    `pairs` has the old and the new layer by the identity of the old one. Inner layers come before their models.
    """

    def __init__(self, custom_objects: dict[str, Any]) -> None:
        self.custom_objects = custom_objects
        self.pairs: dict[int, tuple[Any, keras.Layer]] = {}

    def layer(self, layer: Any) -> keras.Layer:
        """Returns the Keras 3 layer of a layer or of a model inside."""
        if id(layer) not in self.pairs:
            # A model that is a class of the user's own may be replaced as a whole.
            if _is_graph(layer) and type(layer).__name__ not in self.custom_objects:
                return self.model(layer)
            self.pairs[id(layer)] = (layer, translation.convert_layer(layer, self.layer, self.custom_objects))
        return self.pairs[id(layer)][1]

    def model(self, model: Any) -> Any:
        """Returns the Keras 3 model of a functional or Sequential model."""
        name = translation.name_in_keras_3(model.name)
        inputs = [_input(model, place) for place in range(len(model.inputs))]
        try:
            if _is_sequential(model):
                made = keras.Sequential([*inputs, *(self.layer(layer) for layer in model.layers)], name=name)
            else:
                tensors = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
                for node in calls_in_order(model):
                    outputs = keras.tree.flatten(self._call(node, tensors))
                    tensors |= {id(old): new for old, new in zip(tf.nest.flatten(node.outputs), outputs, strict=True)}
                ends = _mapped(model.output, tensors)
                translation.rename_automatic(keras.tree.flatten(ends), tensors.values())
                made = keras.Model(_mapped(model.input, tensors), ends, name=name)
        except (TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"Keras 3 must be able to build the graph. Received: {model.name!r}: {error} "
                "Change this in the Keras 2 model."
            ) from error
        self.pairs[id(model)] = (model, made)
        return made

    def _call(self, node: Any, tensors: Mapping[int, Any]) -> Any:
        """Repeats a call of Keras 2 with the layer of Keras 3."""
        if translation.is_operation(node.layer):
            args, kwargs = _mapped((list(node.call_args), dict(node.call_kwargs)), tensors)
            return translation.convert_operation(node.layer, args, kwargs)
        # The order of the arguments has changed, so all but the first are given by name.
        names = list(inspect.signature(node.layer.call).parameters)
        named = dict(zip(names[1:], node.call_args[1:], strict=False)) | dict(node.call_kwargs)
        first = node.call_args[0] if node.call_args else named.pop(names[0])
        first, named = _mapped((first, named), tensors)
        if type(node.layer).__name__ in RECURRENT and isinstance(first, list | tuple):
            # Keras 2 notes the initial states of a recurrent layer as further inputs.
            first, named["initial_state"] = first[0], list(first[1:])
        layer = self.layer(node.layer)
        try:
            outputs = layer(first, **{name: value for name, value in named.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise UnsupportedLayerError(
                f"Each call must be one that Keras 3 takes. Received: {node.layer.name!r} "
                f"({type(node.layer).__name__}): {error} Change this call in the Keras 2 model."
            ) from error
        combine_masks(layer, first, outputs)
        return outputs


def _is_graph(layer: Any) -> bool:
    """Returns whether a layer is a functional or Sequential model that runs its graph as Keras 2 does."""
    is_graph = hasattr(layer, "inputs") and is_tf_keras_graph(layer)
    return is_graph and type(layer).call.__module__.startswith("tf_keras.")


def _is_sequential(model: Any) -> bool:
    return any(base.__name__ == "Sequential" for base in type(model).__mro__)


def _input(model: Any, place: int) -> Any:
    tensor = model.inputs[place]
    if "Ragged" in type(tensor).__name__:
        raise UnsupportedLayerError(
            f"Inputs must not be ragged. Received: the input {model.input_names[place]!r} of {model.name!r}. "
            "Use padded batches and a mask."
        )
    # A Sequential without an Input has taken the batch size of its first call.
    taken = _is_sequential(model) and not model.stateful
    return keras.Input(
        batch_shape=(None if taken else tensor.shape[0], *tensor.shape[1:]),
        dtype=tf.as_dtype(tensor.dtype).name,
        sparse="Sparse" in type(tensor).__name__,
        name=translation.name_in_keras_3(model.input_names[place]),
    )


def _mapped(structure: Any, tensors: Mapping[int, Any]) -> Any:
    """Returns the structure with Keras 3 tensors in place of those of Keras 2, and NumPy arrays for constants."""

    def new(leaf: Any) -> Any:
        if id(leaf) in tensors:
            return tensors[id(leaf)]
        return leaf.numpy() if hasattr(leaf, "numpy") else leaf

    return tf.nest.map_structure(new, structure)


def _check(model: Any) -> None:
    kind = type(model)
    if not is_tf_keras(model):
        raise UnsupportedModelError(
            f"model must be a model of tf_keras (Keras 2). Received: {kind.__module__}.{kind.__name__}. "
            "A model of Keras 3 needs no conversion."
        )
    if not hasattr(model, "layers"):
        raise UnsupportedModelError(
            f"model must be a model, not a layer. Received: {kind.__name__} {model.name!r}. "
            "Put it into a tf_keras.Sequential with an Input."
        )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Give it an Input layer."
        )
    if not _is_graph(model):
        raise UnsupportedModelError(
            f"model must be functional or Sequential. Received: the subclassed {kind.__name__}. "
            "Write its class in Keras 3, and copy the weights with set_weights."
        )


MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate")


def combine_masks(layer: keras.Layer, inputs: Any, output: Any) -> None:
    """Gives the output of a merge the mask of Keras 2: a step counts if it counts in all inputs that have a mask.

    In Keras 3 a step counts if it counts in any input, and one input without a mask takes the mask away. A mask is part
    of the graph, so the layers behind get this one also in calls and after loading.
    """
    if type(layer).__name__ not in MERGES or not isinstance(inputs, list | tuple):
        return
    if isinstance(layer, keras.layers.Concatenate) and layer.axis not in (-1, len(output.shape) - 1):
        return  # then the masks are concatenated, in both
    masks = {id(mask_of(tensor)): mask_of(tensor) for tensor in inputs if mask_of(tensor) is not None}
    if masks:
        set_mask(output, functools.reduce(keras.ops.logical_and, masks.values()))


def copy_weights(pairs: Sequence[tuple[Any, keras.Layer]]) -> None:
    """Copies all weights, after a check of all shapes. Both versions list the weights of a layer in the same order."""
    copied: set[int] = set()
    copies: list[tuple[Any, Any]] = []
    for old, new in pairs:
        # An outer layer lists those of its inner layers too, which are copied by themselves.
        old_weights = [weight for weight in old.weights if id(weight) not in copied and _is_array(weight)]
        new_weights = [weight for weight in new.weights if id(weight) not in copied]
        old_shapes = [tuple(weight.shape) for weight in old_weights]
        new_shapes = [tuple(weight.shape) for weight in new_weights]
        if old_shapes != new_shapes:
            raise UnsupportedLayerError(
                f"A Keras 3 layer must have the weights of its Keras 2 layer. Received: {old.name!r} "
                f"({type(old).__name__}) with the shapes {old_shapes} in Keras 2 and {new_shapes} in Keras 3. "
                "Pass a class with the same weights in custom_objects."
            )
        copied |= {id(weight) for weight in (*old_weights, *new_weights)}
        copies += zip(old_weights, new_weights, strict=True)
    for old_weight, new_weight in copies:
        new_weight.assign(old_weight.numpy())
    for _, new in pairs:
        finalize(new)


def _is_array(weight: Any) -> bool:
    """Returns False for a vocabulary and for the summary of a Discretization, which lie in the new config."""
    return hasattr(weight, "shape") and None not in weight.shape


def copy_trainable_flags(pairs: Sequence[tuple[Any, keras.Layer]]) -> None:
    """Lets Keras 3 train what Keras 2 trains.

    In Keras 2, a layer with trainable=True is not trained if a model around it has trainable=False; in Keras 3 it is.
    So in a frozen model all layers are frozen. A layer that is also used outside of it is trained.
    """
    flags: dict[int, bool] = {}
    _note_flags(pairs[-1][0], True, flags)
    # A flag also sets those of all layers inside, so the outer ones come first.
    for old, new in reversed(pairs):
        if new.trainable != flags[id(old)]:
            new.trainable = flags[id(old)]


def _note_flags(old: Any, outer: bool, flags: dict[int, bool]) -> None:
    trained = outer and bool(old.trainable)
    flags[id(old)] = flags.get(id(old), False) or trained
    inner = old.layers if hasattr(old, "layers") else [old.layer] if hasattr(old, "layer") else []
    for layer in inner:
        _note_flags(layer, trained, flags)


BATCH = 2
UNKNOWN_SIZE = 32  # of an image or a sequence of any size
# Largest difference, relative to the largest output. A wrong epsilon or padding makes a larger one.
TOLERANCE = 1e-4


def check_outputs(pairs: Sequence[tuple[Any, keras.Layer]]) -> None:
    """Raises UnsupportedModelError if the outputs of both models differ. Changes neither."""
    old, new = pairs[-1]
    layers = [layer for layer, _ in pairs]
    reason = _not_comparable(old, layers)
    if not reason:
        examples = Examples(layers, UNKNOWN_SIZE, wide=False, known=True, examples=BATCH)
        inputs = tf.nest.map_structure(lambda tensor: examples(tensor.shape, tensor.dtype), old.input)
        try:
            expected = old(inputs, training=False)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            reason = f"the Keras 2 model does not take random inputs ({str(error).splitlines()[0]})"
    if reason:
        warn(
            f"from_tf_keras did not compare the outputs of {old.name!r}: {reason}. The weights are equal. Compare the "
            "outputs of both models on your data."
        )
        return
    try:
        received = new(inputs, training=False)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"The Keras 3 model must take what the Keras 2 model takes. Received: {old.name!r}: {error} "
            "Please report this with the model."
        ) from error
    outputs = zip(old.output_names, tf.nest.flatten(expected), keras.tree.flatten(received), strict=True)
    half = any(getattr(layer, "compute_dtype", "") in HALF for layer in layers)
    for name, reference, output in outputs:
        found = difference(arrays(reference), arrays(output), HALF_TOLERANCE if half else TOLERANCE, least=1.0)
        if found:
            raise UnsupportedModelError(
                f"The outputs of both models must be equal. Received: the output {name!r} of {old.name!r}, with "
                f"{found} on random inputs. Please report this with the model."
            )


def _not_comparable(model: Any, layers: Sequence[Any]) -> str:
    """Returns why the outputs cannot be compared, or an empty string."""
    for tensor in model.inputs:
        dtype = tf.as_dtype(tensor.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype == tf.string):
            return f"it has an input of dtype {dtype.name}"
        if "Sparse" in type(tensor).__name__:
            return "it has a sparse input"
    for layer in layers:
        if getattr(layer, "stateful", False) is True and hasattr(layer, "reset_states"):
            return f"the layer {layer.name!r} is stateful, and a call would change its state"
    return ""
