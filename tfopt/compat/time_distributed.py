"""TimeDistributed with one call of the wrapped layer for all steps, inside a scope.

Keras calls the wrapped layer once for each step, so a graph has as many copies of it as there are steps; with an open
number of steps it vectorizes the call. Here time is folded into the batch: (batch, time, ...) is (batch * time, ...),
and the wrapped layer is called once. That computes the same only if everything inside treats examples one by one:

- Keras' own layers do so in inference, and networks of them. A layer or function of one's own, a Lambda, a stateful
  layer, one that works along the batch axis, and one whose loss depends on its outputs are not known to do so.
- In training, batch statistics, random numbers and updates of weights differ. A frozen BatchNormalization has none.

Anything else stays with Keras. The results are equal up to rounding.

A network on large images leaves the caches and pays for fresh memory if it computes all steps at once (224x224, 8
steps, batch 4: twice the time). So its largest tensor decides how many steps are computed together, and whether any.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfopt.compat.checks import private
from tfopt.compat.layers import (
    calls_in_order,
    calls_of,
    functional_class,
    layers_inside,
    operation_name,
    own_non_trainable_variables,
    takes_mask,
    takes_training,
)
from tfopt.compat.replace import replaced

ARGUMENTS = ("inputs", "training", "mask")
BYTES_TOGETHER = 8 * 2**20  # of the largest tensor inside a network
FEWEST_STEPS = 8  # fewer gain nothing
OPEN_BATCH, OPEN_BATCH_IN_TRAINING = 8, 32
KERAS_LAYERS = "keras.src.layers."
PREPROCESSING = "keras.src.layers.preprocessing."  # some of them look at the whole batch
KNOWN_PREPROCESSING = (layers.Rescaling, layers.Normalization, layers.Resizing, layers.CenterCrop)
ELEMENTWISE = {"Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Relu", "Relu6", "Silu"}


@contextlib.contextmanager
def folded_time() -> Iterator[None]:
    """While a model is called or traced, lets TimeDistributed call its layer once for all steps where that is equal.

    It replaces `call` of keras.layers.TimeDistributed. Inside another such scope, the outer one goes on.

    Example:
        >>> layer = keras.layers.TimeDistributed(keras.layers.Dense(4))
        >>> layer.build((None, 8, 3))
        >>> def products():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 3)))
        ...     return [operation.type for operation in call.graph.get_operations()].count("MatMul")
        >>> with folded_time():
        ...     products()
        1
        >>> products()
        8
    """
    kind = layers.TimeDistributed
    if isinstance(vars(kind).get("call"), functools.partialmethod):
        yield
        return
    original = private(kind, "call", takes=ARGUMENTS)
    with replaced(kind, call=functools.partialmethod(_call, original)):
        yield


def _call(layer: Any, original: Callable[..., Any], inputs: Any, training: Any = None, mask: Any = None) -> Any:
    as_keras = functools.partial(original, layer, inputs, training=training, mask=mask)
    wrapped = layer.layer
    if not isinstance(inputs, tf.Tensor) or inputs.shape.rank is None or 0 in inputs.shape or not _fits(inputs, mask):
        return as_keras()
    inside = layers_inside(wrapped)
    if not all(_is_independent(each, learns=training is not False) for each in inside):
        return as_keras()
    if mask is not None and mask.shape.rank == 2 and any(map(_uses_mask, inside)):  # one value for each example
        return as_keras()
    steps, together = inputs.shape[1], _steps_together(inside, inputs, learns=training is not False)
    if together < min(steps or 1, FEWEST_STEPS):
        return as_keras()
    parts = []
    for first in range(0, steps or 1, together):
        part = slice(first, first + together) if steps and together < steps else slice(None)
        options: dict[str, Any] = {"training": training} if takes_training(wrapped) else {}
        if mask is not None and takes_mask(wrapped):
            options["mask"] = _folded(mask[:, part])
        some = inputs[:, part]
        outputs = wrapped.call(_folded(some), **options)
        if not isinstance(outputs, tf.Tensor) or not outputs.shape.rank:
            return as_keras()
        parts.append(_reshaped(outputs, [*_sizes(some)[:2], *_sizes(outputs)[1:]]))
    return parts[0] if len(parts) == 1 else tf.concat(parts, 1)


def _steps_together(inside: list[Any], inputs: Any, *, learns: bool) -> int:
    """Returns how many steps a network should compute at once, all of them if it is a single layer.

    The outputs of a single layer are needed all at once anyway.
    """
    batch = inputs.shape[0] or (OPEN_BATCH_IN_TRAINING if learns else OPEN_BATCH)
    tensors = [tensor for layer in inside[1:] for call in calls_of(layer) for tensor in call.output_tensors]
    if inputs.shape[1] is None or not tensors:  # Keras vectorizes an open number of steps, which takes as much memory
        return inputs.shape[1] or 1
    if any(None in tensor.shape[1:] for tensor in tensors):
        return 0
    largest = batch * max(math.prod(tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size for tensor in tensors)
    return min(inputs.shape[1], BYTES_TOGETHER // max(largest, 1))


def _fits(inputs: Any, mask: Any) -> bool:
    """Returns whether a mask, if there is one, is for these batches and steps. Keras says what is wrong."""
    if mask is None:
        return True
    known = isinstance(mask, tf.Tensor) and mask.shape.rank is not None and mask.shape.rank > 1
    return known and mask.shape[:2].is_compatible_with(inputs.shape[:2])


def _sizes(tensor: Any) -> list[Any]:
    """Returns the sizes of all axes: numbers, or tensors where they are open."""
    return [tf.shape(tensor)[axis] if size is None else size for axis, size in enumerate(tensor.shape)]


def _folded(tensor: Any) -> Any:
    return _reshaped(tensor, [None, *_sizes(tensor)[2:]])


def _reshaped(tensor: Any, sizes: list[Any]) -> Any:
    """Returns a tensor with other sizes, of which one may be None: what is left. The batch is open more often."""
    if isinstance(sizes[0], tf.Tensor) and not any(isinstance(size, tf.Tensor) for size in sizes[1:]):
        sizes = [None, *sizes[1:]]
    return tf.reshape(tensor, [-1 if size is None else size for size in sizes])


def _uses_mask(layer: Any) -> bool:
    """Returns whether outputs depend on a mask. Networks hand it on, and inference of BatchNormalization does not."""
    return takes_mask(layer) and not (_is_network(layer) or type(layer) is layers.BatchNormalization)


def _is_network(layer: Any) -> bool:
    return type(layer) in (keras.Sequential, functional_class())


def _is_independent(layer: Any, *, learns: bool) -> bool:
    """Returns whether a layer, without those inside it, computes and changes the same for examples together or apart.

    Args:
        layer: Any layer.
        learns: Whether it may be called with `training=True`.
    """
    if _is_network(layer):
        return type(layer) is keras.Sequential or all(map(_keeps_examples_apart, calls_in_order(layer)))
    kind = type(layer)
    if not kind.__module__.startswith(KERAS_LAYERS) or kind is layers.Lambda or "call" in vars(layer):
        return False
    if kind.__module__.startswith(PREPROCESSING) and kind not in KNOWN_PREPROCESSING:
        return False
    if getattr(layer, "stateful", False) or layer.activity_regularizer is not None or layer.quantization_mode:
        return False
    if not all(map(_is_own_activation, (value for name, value in vars(layer).items() if name.endswith("activation")))):
        return False
    return not _works_along_batch(layer) and not (learns and _learns_from_batch(layer))


def _keeps_examples_apart(call: Any) -> bool:
    """Returns whether a call in a functional model is one of a layer, or of an operation on each element by itself."""
    given = keras.tree.flatten([call.arguments.args, call.arguments.kwargs])
    tensors = [each for each in given if isinstance(each, keras.KerasTensor)]
    if any(isinstance(each, (tf.Tensor, tf.Variable, keras.Variable, np.ndarray)) for each in given):
        return False  # an array may have a batch axis too
    if isinstance(call.operation, keras.Layer):
        return True
    return operation_name(call.operation) in ELEMENTWISE and len({len(each.shape) for each in tensors}) == 1


def _is_own_activation(activation: Any) -> bool:
    if activation is None or isinstance(activation, keras.Layer):  # which is one of those inside
        return True
    return getattr(activation, "__module__", "").startswith("keras.src.activations.")


def _works_along_batch(layer: Any) -> bool:
    """Returns whether the first axis may be one that a layer works along. Negative axes count from an unknown rank."""
    axes = keras.tree.flatten([getattr(layer, name, None) for name in ("axis", "axes")])
    if any(isinstance(axis, int) and axis < 1 and axis != -1 for axis in axes):
        return True
    if type(layer) is not layers.EinsumDense:
        return False
    operands, result = layer.equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs[0] != result[:1] or inputs[0] in kernel


def _learns_from_batch(layer: Any) -> bool:
    """Returns whether training computes statistics of the batch, draws random numbers or updates weights."""
    if type(layer) is layers.BatchNormalization and not layer.trainable:
        return False
    rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]  # of recurrent layers
    draws = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()) and rates != [0, 0]
    return draws or bool(own_non_trainable_variables(layer))
