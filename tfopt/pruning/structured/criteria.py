"""Importance of channels: functions from the weights of a group, [channels, values], to a score for each channel.

A row holds all values of the kernels that disappear with the channel: the filter that computes it, and the slices of
the next kernels that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

ChannelCriterion: TypeAlias = Callable[[Any], Any]


def l1(weights: Any) -> Any:
    """Scores a channel by the sum of its absolute weights.

    Example:
        >>> l1(np.array([[1.0, -2.0], [0.5, 0.0]]))
        array([3. , 0.5])

    Reference:
        Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017, arXiv:1608.08710.
    """
    return np.abs(weights).sum(axis=1)


def l2(weights: Any) -> Any:
    """Scores a channel by the Euclidean norm of its weights.

    Example:
        >>> l2(np.array([[3.0, -4.0], [0.5, 0.0]]))
        array([5. , 0.5])

    Reference:
        Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023, arXiv:2301.12900.
    """
    return np.sqrt(np.square(weights).sum(axis=1))


def fpgm(weights: Any) -> Any:
    """Scores a channel by the sum of its distances to the others. One amid the others can be replaced by them.

    Example:
        >>> fpgm(np.array([[0.0], [1.0], [3.0]]))
        array([4., 3., 5.])

    Reference:
        He et al., "Filter Pruning via Geometric Median", CVPR 2019, arXiv:1811.00250.
    """
    squares = np.square(weights).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * weights @ weights.T
    return np.sqrt(np.maximum(distances, 0)).sum(axis=1)


def random(weights: Any) -> Any:
    """Scores channels at random, with a fixed seed. A useful criterion must do better than this baseline.

    Example:
        >>> random(np.zeros((2, 3))).shape
        (2,)
    """
    return np.random.default_rng(0).random(len(weights))


def bn_scale(scales: Any) -> Any:
    """Scores a channel by the scales of its batch normalizations. It is given these instead of the kernels.

    Example:
        >>> bn_scale(np.array([[-2.0], [0.5]]))
        array([2. , 0.5])

    Reference:
        Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", ICCV 2017, arXiv:1708.06519.
    """
    return np.abs(scales).sum(axis=1)


def taylor(products: Any) -> Any:
    """Scores a channel by how much the loss changes without it, to first order, squared: the mean over batches.

    It is given an array [channels, batches] instead of the kernels: for each batch the sum of weight * gradient over
    all weights of the channel.

    Example:
        >>> taylor(np.array([[1.0, -3.0], [0.5, 0.5]]))
        array([5.  , 0.25])

    Reference:
        Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019, arXiv:1906.10771.
    """
    return np.square(products).mean(axis=1)


CRITERIA: dict[str, ChannelCriterion] = {
    "l1": l1,
    "l2": l2,
    "fpgm": fpgm,
    "bn_scale": bn_scale,
    "taylor": taylor,
    "random": random,
}
