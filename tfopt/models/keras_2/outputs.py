"""The outputs of a Keras 2 model and of its Keras 3 model are compared on random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedModelError, warn
from tfopt.models.copy_check import HALF, HALF_TOLERANCE, Examples, arrays, difference

BATCH = 2
UNKNOWN_SIZE = 32  # of an image or a sequence of any size
# Largest difference, relative to the largest output. A wrong epsilon or padding makes a larger one.
TOLERANCE = 1e-4


def check_outputs(pairs: Sequence[tuple[Any, keras.Layer]]) -> None:
    """Compares the outputs of both models, without changing either.

    Args:
        pairs: Each Keras 2 layer with its Keras 3 layer. The whole model is the last.
    Raises:
        UnsupportedModelError: They differ, or the Keras 3 model cannot compute them.
    """
    old, new = pairs[-1]
    layers = [layer for layer, _ in pairs]
    reason = _not_comparable(old, layers)
    if not reason:
        inputs = _example_inputs(old, layers)
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


def _example_inputs(model: Any, layers: Sequence[Any]) -> Any:
    examples = Examples(layers, UNKNOWN_SIZE, wide=False, known=True, examples=BATCH)
    return tf.nest.map_structure(lambda tensor: examples(tensor.shape, tensor.dtype), model.input)
