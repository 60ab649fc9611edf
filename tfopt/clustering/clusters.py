"""Clusters: weights that share a value, and how they share it in training.

After each update of the optimizer, a constraint sets the weights of a cluster to their mean. This is the projection on
the weights that share values. For plain gradient descent the shared value moves by the mean of its weights' updates:
the gradient of a shared value is the sum of the gradients of its weights (Han et al., 2016), and the mean is this sum
with a step that does not grow with the size of the cluster. So the learning rate of the model stays right, and every
optimizer can be used. Like a pruning mask, the constraint works with XLA, several steps per call, loss scaling and
tf.distribute, and leaves no trace in the layer's config.

The mean is computed as m + mean(w - m), with the largest weight m of the cluster. Where all weights of a cluster are
equal, this is their value, bit for bit. So the constraint changes nothing when it is applied twice, and a cluster of
zeros, which a mask holds, stays exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfopt.pruning.masks import Mask, attach_mask, beside


class Clusters(keras.constraints.Constraint):
    """A constraint that sets the weights of each cluster to one value.

    Attributes:
        variable: The `keras.Variable` with the weights.
        count: The largest number of clusters, of each channel if there are `channel_axes`.
        channel_axes: The axes of the weights along which each place has clusters of its own. Empty for a whole layer.
        inner: The earlier constraint of the variable, for example a mask, which is applied first.
        index: The number of each weight's cluster within its channel: a `keras.Variable` with a byte per weight.

    A mask that comes later would take weights out of their cluster: pruning refuses variables with `shares_values`.

    Example:
        >>> kernel = keras.Variable([1.0, 3.0, 0.0, 8.0])
        >>> attach_clusters(kernel, np.array([1, 1, 0, 2]), count=3)
        >>> kernel.constraint(kernel).numpy().tolist()
        [2.0, 2.0, 0.0, 8.0]
    """

    shares_values = True

    def __init__(self, variable: Any, count: int, channel_axes: Sequence[int] = (), inner: Any = None) -> None:
        self.variable = variable
        self.count = count
        self.channel_axes = tuple(channel_axes)
        self.inner = inner
        self.index = beside(variable, "zeros", variable.shape, "uint8", "clusters")

    def __call__(self, w: Any) -> Any:
        if self.inner is not None:
            w = self.inner(w)
        values = ops.reshape(ops.cast(w, "float32"), (-1,))
        first, total = self._first_of_channels()
        places = ops.reshape(ops.cast(self.index, "int32") + first, (-1,))
        shared = ops.take(means(values, places, total), places)
        return ops.cast(ops.reshape(shared, self.variable.shape), self.variable.dtype)

    def enforce(self) -> None:
        """Sets each cluster to one value. Needed after code other than the optimizer has written the weights."""
        self.variable.assign(self(self.variable))

    def carry_over(self, variable: Any, part: Callable[[Any], Any]) -> None:
        """Gives a copy of the variable the part of these clusters that it keeps. A config does not contain them."""
        index = part(self.index.numpy())
        attach_clusters(variable, index, self.count, self.channel_axes)

    def _first_of_channels(self) -> tuple[np.ndarray, int]:
        """Returns the number of each channel's first cluster among all, and how many clusters there are."""
        shape = [size if axis in self.channel_axes else 1 for axis, size in enumerate(self.variable.shape)]
        channels = math.prod(shape)
        return self.count * np.arange(channels, dtype=np.int32).reshape(shape), self.count * channels


def means(values: Any, places: Any, total: int) -> Any:
    """Returns the mean of the float32 values of each of `total` clusters; `places` has the cluster of each value.

    In float32, a sum of ones stops at 2**24, and a sum of so many differences soon before. So both are in float64.

    Example:
        >>> means(np.float32([1, 3, 8]), np.array([1, 1, 0]), total=2).numpy().tolist()
        [8.0, 2.0]
    """
    largest = ops.segment_max(values, places, total)
    below = ops.cast(values - ops.take(largest, places), "float64")
    sizes = ops.segment_sum(ops.ones_like(below), places, total)
    return largest + ops.cast(ops.segment_sum(below, places, total) / ops.maximum(sizes, 1), "float32")


def attach_clusters(variable: Any, index: np.ndarray, count: int, channel_axes: Sequence[int] = ()) -> None:
    """Lets the weights of a variable share values from now on, in place of earlier clusters.

    The arguments are the attributes of `Clusters`. Weights that are zero, which are a cluster of their own, get a mask.
    """
    variable.constraint = _without_clusters(variable.constraint)
    kept = variable.numpy() != 0
    if not kept.all() or isinstance(variable.constraint, Mask):
        attach_mask(variable).assign(kept)
    clusters = Clusters(variable, count, channel_axes, inner=variable.constraint)
    clusters.index.assign(index)
    variable.constraint = clusters


def _without_clusters(constraint: Any) -> Any:
    if isinstance(constraint, Clusters):
        return _without_clusters(constraint.inner)
    if isinstance(constraint, Mask):
        constraint.inner = _without_clusters(constraint.inner)
    return constraint
