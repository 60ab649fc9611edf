"""Criteria: functions that score weights, by their values alone or by gradients of the loss. The lowest are pruned
first.

To set a weight w to zero changes the loss by about -w * g, where g is its gradient. The criteria of gradients estimate
what the loss loses or gains. They differ in where they take the absolute value or the square: of each batch, of the
mean over the batches, or nowhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tfopt.errors import ConfigError

if TYPE_CHECKING:
    from tfopt.pruning.weights import Weight  # it imports TensorFlow, and settings are read without


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


# A function from weights, or from weights and their mean gradients, to scores. The named ones that need gradients get
# all the means of `Products` in place of the mean gradient.
Criterion: TypeAlias = Callable[..., np.ndarray]

CRITERIA: dict[str, Criterion] = {
    "magnitude": magnitude,
    "random": random,
    "taylor": taylor,
    "snip": snip,
    "movement": movement,
}


def needs_data(criterion: str | Criterion) -> bool:
    """Returns whether a criterion has a second argument, the gradients, which come from batches of data.

    Example:
        >>> needs_data("magnitude"), needs_data("taylor"), needs_data(lambda weights, gradients: gradients**2)
        (False, True, True)
    """
    try:
        arguments = inspect.signature(_function(criterion)).parameters.values()
    except ValueError:  # functions written in C, such as np.square
        return False
    return sum(each.kind in _POSITIONAL and each.default is each.empty for each in arguments) >= 2


def score_weights(
    weights: Sequence[Weight], criterion: str | Criterion, products: Sequence[Products] | None = None
) -> list[np.ndarray]:
    """Returns an array of scores for each weight, of its shape.

    Args:
        weights: Weights to score.
        criterion: Name of a criterion, or a function.
        products: Means over batches for each weight; needed by a criterion for which `needs_data` is true.

    Raises:
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: The criterion did not return one score per weight.
    """
    function = _function(criterion)
    if not needs_data(criterion):
        return [_checked(weight, function(weight.read())) for weight in weights]
    assert products is not None  # the callers compute them for such a criterion
    named = function in CRITERIA.values()
    return [
        _checked(weight, function(weight.read(), means if named else means.gradient))
        for weight, means in zip(weights, products, strict=True)
    ]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _function(criterion: str | Criterion) -> Criterion:
    return CRITERIA[criterion] if isinstance(criterion, str) else criterion


def _checked(weight: Weight, scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores)
    if scores.shape != tuple(weight.variable.shape) or np.isnan(scores).any():
        raise ConfigError(
            f"criterion must return one score per weight. Received: shape {scores.shape}, "
            f"{np.isnan(scores).sum()} of them NaN, for the {weight}. "
            "Return an array of the shape of the weights."
        )
    return scores
