"""The knee of a curve of speeds: the smallest batch that is hardly slower than the fastest.

Every turn times each batch size once, so the ratio of two sizes within a turn hardly depends on what else the machine
does. Their median decides. The lower end of their interval would not: on a machine where speeds vary, it is below 95%
for sizes that are as fast as the best, and the knee would be found too high.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tfopt.timing import Estimate, estimate

SHARE = 0.95
FEWEST = 6  # turns: the interval of fewer is all of them, and says little


def ratios(rates: Mapping[int, Sequence[float]]) -> dict[int, Estimate]:
    """Returns the speed of each batch size as a share of the fastest one, with its interval.

    Args:
        rates: The speed of each size in each turn. Sizes that were left out of later turns have fewer.
    Example:
        >>> ratios({8: [50.0, 55.0], 16: [100.0, 100.0]})[8]
        Estimate(median=0.525, least=0.5, most=0.55)
    """
    longest = max(map(len, rates.values()))  # the others had no more turns because they are slower
    best = max(
        (size for size, found in rates.items() if len(found) == longest),
        key=lambda size: statistics.median(rates[size]),
    )
    return {
        size: estimate([one / other for one, other in zip(found, rates[best], strict=False)])
        for size, found in rates.items()
    }


def knee(rates: Mapping[int, Sequence[float]]) -> int:
    """Returns the smallest batch size whose speed is within 5% of the best.

    Example:
        >>> knee({8: [50.0, 55.0], 16: [97.0, 96.0], 32: [100.0, 100.0]})
        16
    """
    return min(size for size, found in ratios(rates).items() if found.median >= SHARE)


def contenders(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Returns the batch sizes that more turns may show to be within 5% of the best.

    Example:
        >>> contenders({8: [50.0] * 6, 16: [90.0, 99.0] * 3, 32: [100.0] * 6})
        [16, 32]
    """
    return [size for size, found in ratios(rates).items() if found.most >= SHARE]


def undecided(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Returns the batch sizes, other than the knee, that more turns may show to be the knee.

    Example:
        >>> undecided({8: [50.0] * 6, 16: [90.0, 99.0] * 3, 32: [100.0] * 6})
        [16]
    """
    found, chosen = ratios(rates), knee(rates)
    certain = min(size for size, each in found.items() if each.least >= SHARE)  # the fastest is, at least
    return [size for size, each in found.items() if size <= certain and size != chosen and each.most >= SHARE]


def is_decided(rates: Mapping[int, Sequence[float]]) -> bool:
    """Returns whether more turns would hardly change the knee.

    Example:
        >>> is_decided({8: [50.0] * 6, 16: [100.0] * 6}), is_decided({8: [90.0, 99.0] * 3, 16: [100.0] * 6})
        (True, False)
    """
    return max(map(len, rates.values())) >= FEWEST and not undecided(rates)
