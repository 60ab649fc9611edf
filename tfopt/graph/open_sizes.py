"""Sizes for the axes that a model leaves open, where there is no example of an input."""

from __future__ import annotations

import tensorflow as tf

from tfopt.graph.frozen import FrozenGraph

OPEN_SIZES = (64, 16, 4, 1)  # tried in this order; a position embedding, for example, limits the size


def open_size(graph: FrozenGraph) -> int:
    """Returns the first of OPEN_SIZES with which a graph runs.

    Without an open axis, or if no size works, it is OPEN_SIZES[0]. The batch axis does not count.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> open_size(freeze(keras.Sequential([keras.Input((None, 4)), keras.layers.Conv1D(2, 3)])))
        64
    """
    if any(None in shape[1:] for shape in _shapes(graph).values()):
        for size in OPEN_SIZES:
            try:
                graph.predict(zeros(graph, size))
            except tf.errors.OpError:
                continue
            return size
    return OPEN_SIZES[0]


def zeros(graph: FrozenGraph, size: int) -> dict[str, tf.Tensor]:
    """Returns a batch with one example of zeros, whose open axes have this size."""
    return {
        name: tf.zeros([*(1 for _ in shape[:1]), *(each or size for each in shape[1:])], graph.inputs[name].dtype)
        for name, shape in _shapes(graph).items()
    }


def _shapes(graph: FrozenGraph) -> dict[str, list[int | None]]:
    return {name: [None] if spec.shape.rank is None else spec.shape.as_list() for name, spec in graph.inputs.items()}
