"""Shares for all layers from their curves: every layer is pruned until it alone would cost the same loss of score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfopt.errors import ConfigError

HALVINGS = 40

Losses = Mapping[str, Sequence[float]]
Shares = dict[str, float]


def drops_below(losses: Losses, shares: Sequence[float], most: float) -> Shares:
    """Returns the largest share of each layer at which the loss is at most `most`, also at every smaller share.

    Example:
        >>> drops_below({"a": (0.0, 0.2)}, (0.5, 0.9), 0.1)
        {'a': 0.7}
    """
    found = {}
    for name, curve in losses.items():
        rising = np.maximum.accumulate([0.0, *curve])
        at = [0.0, *shares]
        above = np.flatnonzero(rising > most)
        if not above.size:
            found[name] = float(at[-1])
            continue
        end = above[0]
        part = (most - rising[end - 1]) / (rising[end] - rising[end - 1])
        found[name] = round(float(at[end - 1] + part * (at[end] - at[end - 1])), 6)
    return found


def meet(
    losses: Losses,
    shares: Sequence[float],
    removed: Callable[[Shares], float],
    wanted: float,
    budget: float,
    target: str,
) -> Shares:
    """Returns shares with the smallest loss of a single layer for which `removed` is at least `wanted`.

    Raises:
        ConfigError: The shares at the budget, or the largest that were measured, remove too little.
    """
    worst = min(budget, max((max(curve) for curve in losses.values()), default=0.0))
    high = drops_below(losses, shares, max(worst, 0.0))
    if removed(high) < wanted:
        limit = f"budget={budget:g}" if budget <= worst else f"the largest measured share {max(shares):g}"
        raise ConfigError(
            f"The target must be reachable. Received: {target}, and {limit} allows no more than {removed(high):.3f} "
            "to be removed. Set a weaker target or a larger budget, or measure larger shares."
        )
    low = drops_below(losses, shares, 0.0)
    if removed(low) >= wanted:  # even shares that cost nothing are more than is needed
        return _between(dict.fromkeys(low, 0.0), low, removed, wanted)
    least, most = 0.0, max(worst, 0.0)
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        tried = drops_below(losses, shares, middle)
        if removed(tried) >= wanted:
            most, high = middle, tried
        else:
            least, low = middle, tried
    return _between(low, high, removed, wanted)  # where a curve is flat, its share jumps


def _between(low: Shares, high: Shares, removed: Callable[[Shares], float], wanted: float) -> Shares:
    """Returns shares on the line from `low`, which removes too little, to `high`, which removes enough."""

    def at(part: float) -> Shares:
        return {name: round(share + part * (high[name] - share), 6) for name, share in low.items()}

    least, most = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if removed(at(middle)) >= wanted else (middle, most)
    return at(most)
