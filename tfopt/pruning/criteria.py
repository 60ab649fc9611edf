"""Importance of weights: functions from an array of weights to scores of its shape. The lowest are pruned first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Criterion: TypeAlias = Callable[[np.ndarray], np.ndarray]


def magnitude(weights: np.ndarray) -> np.ndarray:
    """Scores a weight by its absolute value.

    Example:
        >>> magnitude(np.array([-3.0, 0.5]))
        array([3. , 0.5])

    Reference:
        Han et al., "Learning both Weights and Connections for Efficient Neural Networks", arXiv:1506.02626.
    """
    return np.abs(weights)


def random(weights: np.ndarray) -> np.ndarray:
    """Scores weights at random. A useful criterion must do better than this baseline.

    The seed is fixed, so that the workers of a distributed fit choose the same masks, and a second run too.

    Example:
        >>> random(np.zeros((2, 3))).shape
        (2, 3)
    """
    return np.random.default_rng(0).random(weights.shape)


CRITERIA: dict[str, Criterion] = {"magnitude": magnitude, "random": random}
