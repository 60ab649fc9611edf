"""The weights and the trainable flags of Keras 2 layers go to their Keras 3 layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfopt.errors import UnsupportedLayerError
from tfopt.models.copying import finalize


def copy_weights(pairs: Sequence[tuple[Any, keras.Layer]]) -> None:
    """Copies all weights, after a check of all shapes. Both versions list the weights of a layer in the same order.

    Args:
        pairs: Each Keras 2 layer with its Keras 3 layer. Inner layers come before the wrappers and models around them.
    Raises:
        UnsupportedLayerError: A layer has other weights than its Keras 2 layer.
    """
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

    Args:
        pairs: Each Keras 2 layer with its Keras 3 layer. Inner layers come first; the whole model is the last.
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
