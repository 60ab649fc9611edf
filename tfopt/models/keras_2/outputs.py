"""The outputs of a Keras 2 model and of its Keras 3 model are compared on random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedModelError, warn

BATCH = 2
UNKNOWN_SIZE = 32  # of an image or a sequence of any size
# Largest difference, relative to the largest output. A wrong epsilon or padding makes a larger one.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
HALF_TOLERANCE = 3e-2


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
        inputs = _random_inputs(old, layers)
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
    in_half = any(getattr(layer, "compute_dtype", "") in ("float16", "bfloat16") for layer in layers)
    for name, reference, output in outputs:
        difference = _difference(reference.numpy(), keras.ops.convert_to_numpy(output), in_half=in_half)
        if difference:
            raise UnsupportedModelError(
                f"The outputs of both models must be equal. Received: the output {name!r} of {old.name!r}, with "
                f"{difference} on random inputs. Please report this with the model."
            )


def _difference(expected: Any, received: Any, *, in_half: bool) -> str:
    """Returns how two outputs differ, or an empty string."""
    if expected.shape != received.shape:
        return f"the shape {expected.shape} in Keras 2 and {received.shape} in Keras 3"
    if expected.dtype == object:  # words
        return "" if np.array_equal(expected, received) else "other words"
    tolerance = HALF_TOLERANCE if in_half else TOLERANCE.get(expected.dtype.name, 0)
    expected, received = expected.astype("float64"), received.astype("float64")
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
    if np.allclose(received, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"differences of up to {np.nanmax(np.abs(expected - received)):.3g}"


def _not_comparable(model: Any, layers: Sequence[Any]) -> str:
    """Returns why the outputs cannot be compared, or an empty string."""
    for tensor in model.inputs:
        dtype = tf.as_dtype(tensor.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            return f"it has an input of dtype {dtype.name}"
        if "Sparse" in type(tensor).__name__:
            return "it has a sparse input"
    for layer in layers:
        if getattr(layer, "stateful", False) is True and hasattr(layer, "reset_states"):
            return f"the layer {layer.name!r} is stateful, and a call would change its state"
    return ""


def _random_inputs(model: Any, layers: Sequence[Any]) -> Any:
    generator = np.random.default_rng(0)
    # Indices must be in range for every embedding.
    limit = min((layer.input_dim for layer in layers if type(layer).__name__ == "Embedding"), default=2)

    def random(tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [tensor.shape[0] or BATCH, *(size or UNKNOWN_SIZE for size in tensor.shape[1:])]
        if dtype.is_floating:
            return tf.constant(generator.random(shape), dtype)
        return tf.cast(generator.integers(0, 2 if dtype.is_bool else limit, shape), dtype)

    return tf.nest.map_structure(random, model.input)
