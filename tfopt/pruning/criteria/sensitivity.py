"""Criteria that estimate what the loss loses or gains with a weight, from the gradients of batches of data.

To set a weight w to zero changes the loss by about -w * g, where g is its gradient. The criteria differ in where they
take the absolute value or the square: of each batch, of the mean over the batches, or nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Products:
    """What the gradients of several batches tell about one array of weights.

    Attributes:
        gradient: The mean of the gradients g over the batches, of the shape of the weights.
        squared: The mean of (w * g) ** 2 over the batches, of the same shape.
    """

    gradient: np.ndarray
    squared: np.ndarray


def taylor(weights: np.ndarray, products: Products) -> np.ndarray:
    """Scores a weight by the mean over the batches of the squared change of the loss without it.

    It suits trained models. The gradients of batches that point in opposite directions do not cancel, as they do in the
    mean gradient of a model that has converged.

    Example:
        >>> gradients = np.array([[1.0, 2.0], [-1.0, 2.0]])  # of two batches
        >>> weights = np.array([3.0, 0.5])
        >>> taylor(weights, Products(gradient=gradients.mean(0), squared=((weights * gradients) ** 2).mean(0)))
        array([9., 1.])

    Reference:
        Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019, arXiv:1906.10771.
    """
    return products.squared


def snip(weights: np.ndarray, products: Products) -> np.ndarray:
    """Scores a weight by the absolute change of the mean loss without it. It suits models before their training.

    Example:
        >>> snip(np.array([3.0, -0.5]), Products(gradient=np.array([0.0, 2.0]), squared=np.zeros(2)))
        array([0., 1.])

    Reference:
        Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019, arXiv:1810.02340.
    """
    return np.abs(weights * products.gradient)


def movement(weights: np.ndarray, products: Products) -> np.ndarray:
    """Scores a weight by -w * g, which is positive if descent moves it away from zero. It suits fine-tuning.

    A `PruningSchedule` adds the scores of all its updates.

    Example:
        >>> movement(np.array([3.0, -0.5]), Products(gradient=np.array([1.0, 2.0]), squared=np.zeros(2)))
        array([-3.,  1.])

    Reference:
        Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", NeurIPS 2020, arXiv:2005.07683.
    """
    return -weights * products.gradient
