"""Criteria: functions that score weights, by their values alone or by gradients of the loss. The lowest are pruned
first.

To set a weight w to zero changes the loss by about -w * g, where g is its gradient. The criteria of gradients estimate
what the loss loses or gains. They differ in where they take the absolute value or the square: of each batch, of the
mean over the batches, or nowhere.

Structured pruning scores whole channels. A criterion then is a function from the weights of a group, [channels,
values], to a score for each channel. A row holds all values of the kernels that disappear with the channel: the filter
that computes it, and the slices of the next kernels that read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

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

    A criterion for which `needs_data` is true needs the means over batches for each weight.

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


def random_channels(weights: Any) -> Any:
    """Scores channels at random, with a fixed seed. A useful criterion must do better than this baseline.

    Example:
        >>> random_channels(np.zeros((2, 3))).shape
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


def taylor_of_channels(products: Any) -> Any:
    """Scores a channel by how much the loss changes without it, to first order, squared: the mean over batches.

    It is given an array [channels, batches] instead of the kernels: for each batch the sum of weight * gradient over
    all weights of the channel.

    Example:
        >>> taylor_of_channels(np.array([[1.0, -3.0], [0.5, 0.5]]))
        array([5.  , 0.25])

    Reference:
        Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019, arXiv:1906.10771.
    """
    return np.square(products).mean(axis=1)


CHANNEL_CRITERIA: dict[str, ChannelCriterion] = {
    "l1": l1,
    "l2": l2,
    "fpgm": fpgm,
    "bn_scale": bn_scale,
    "taylor": taylor_of_channels,
    "random": random_channels,
}
