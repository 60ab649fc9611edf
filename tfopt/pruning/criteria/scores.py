"""The criteria by name, and the scores that one of them gives to the weights of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tfopt.errors import ConfigError
from tfopt.pruning.criteria.elementwise import magnitude, random
from tfopt.pruning.criteria.sensitivity import Products, movement, snip, taylor

if TYPE_CHECKING:
    from tfopt.pruning.weights import Weight  # it imports TensorFlow, and settings are read without

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
