"""The masks of layers that merge several tensors, which Keras 2 and Keras 3 combine in different ways."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfopt.compat.layers import mask_of, set_mask

MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate")


def combine_masks(layer: keras.Layer, inputs: Any, output: Any) -> None:
    """Gives the output of a merge the mask of Keras 2: a step counts if it counts in all inputs that have a mask.

    In Keras 3 a step counts if it counts in any input, and one input without a mask takes the mask away. A mask is part
    of the graph, so the layers behind get this one also in calls and after loading.

    Args:
        layer: The Keras 3 layer.
        inputs: The symbolic tensors it was called on.
        output: What it returned.
    """
    if type(layer).__name__ not in MERGES or not isinstance(inputs, list | tuple):
        return
    if isinstance(layer, keras.layers.Concatenate) and layer.axis not in (-1, len(output.shape) - 1):
        return  # then the masks are concatenated, in both
    masks = {id(mask_of(tensor)): mask_of(tensor) for tensor in inputs if mask_of(tensor) is not None}
    if masks:
        set_mask(output, functools.reduce(keras.ops.logical_and, masks.values()))
