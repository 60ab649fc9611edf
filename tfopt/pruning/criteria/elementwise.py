"""Criteria that need the weights alone. The lowest scores are pruned first."""

from __future__ import annotations

import numpy as np


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
