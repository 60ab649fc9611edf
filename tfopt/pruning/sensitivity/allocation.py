"""Shares for all layers from their curves: what costs the least score for each weight that it removes goes first.

The loss of score of all layers together is taken for the sum of their single losses. Of each curve the convex hull from
below counts, so that its first part is the cheapest. Then the cheapest parts of all curves, taken one after the other,
have the least sum that removes so much.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfopt.errors import ConfigError

HALVINGS = 40

Losses = Mapping[str, Sequence[float]]
Shares = dict[str, float]


@dataclass(frozen=True)
class Part:
    """A straight part of the hull of one curve.

    Attributes:
        price: Loss of score for each weight that is removed.
        name: The layer.
        begin, end: Shares at its ends.
        loss: Loss of score from begin to end.
    """

    price: float
    name: str
    begin: float
    end: float
    loss: float


def cheapest(
    losses: Losses,
    shares: Sequence[float],
    sizes: Mapping[str, float],
    removed: Callable[[Shares], float],
    wanted: float,
    budget: float,
    target: str,
) -> Shares:
    """Returns shares with the least sum of losses for which `removed` is at least `wanted`, or that the budget allows.

    Args:
        losses: The loss of score of each layer at each share.
        shares: The measured shares.
        sizes: How much the whole of each layer is.
        removed: Function from shares to the part of the model that is removed.
        wanted: The part to remove; infinite to spend the whole budget.
        budget: The largest sum of losses.
        target: The target for the error, as text.

    Raises:
        ConfigError: The budget, or the largest measured shares, remove too little.

    Example:
        >>> sizes = {"a": 100, "b": 100}
        >>> cheapest({"a": (0.1,), "b": (0.2,)}, (0.5,), sizes, lambda found: sum(found.values()) / 2, 0.4, 1.0, "")
        {'a': 0.5, 'b': 0.3}
    """
    parts = sorted(
        (part for name, curve in losses.items() for part in hull(name, curve, shares, sizes[name])),
        key=lambda part: (part.price, part.begin),
    )
    found, spent = dict.fromkeys(losses, 0.0), 0.0
    for part in parts:
        affordable = 1.0 if part.loss <= budget - spent else (budget - spent) / part.loss
        whole = found | {part.name: _at(part, affordable)}
        if removed(whole) >= wanted:
            return _last(part, affordable, found, removed, wanted)
        found, spent = whole, spent + affordable * part.loss
        if affordable < 1:
            break
    if wanted == float("inf"):
        return found
    limit = f"budget={budget:g}" if budget < float("inf") else f"the largest measured share {max(shares):g}"
    raise ConfigError(
        f"The target must be reachable. Received: {target}, and {limit} allows no more than {removed(found):.3f} to be "
        "removed. Set a weaker target or a larger budget, or measure larger shares."
    )


def hull(name: str, curve: Sequence[float], shares: Sequence[float], size: float) -> list[Part]:
    """Returns the parts of the convex hull of a curve from below. A loss below zero counts as zero.

    Example:
        >>> [(part.end, part.loss) for part in hull("a", (0.3, 0.2, 0.6), (0.25, 0.5, 0.75), 10)]
        [(0.5, 0.2), (0.75, 0.4)]
    """
    points = [(0.0, 0.0)]
    for point in zip(shares, (max(0.0, loss) for loss in curve), strict=True):
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
            points.pop()
        points.append(point)
    return [
        Part(
            max(0.0, _slope(one, other)) / max(size, 1e-12),
            name,
            one[0],
            other[0],
            round(max(0.0, other[1] - one[1]), 9),
        )
        for one, other in itertools.pairwise(points)
    ]


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _at(part: Part, fraction: float) -> float:
    return round(part.begin + fraction * (part.end - part.begin), 6)


def _last(part: Part, most: float, found: Shares, removed: Callable[[Shares], float], wanted: float) -> Shares:
    """Returns the shares with only so much of a part as is needed."""
    least = 0.0
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if removed(found | {part.name: _at(part, middle)}) >= wanted else (middle, most)
    return found | {part.name: _at(part, most)}
