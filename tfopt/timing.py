"""Times of functions that are compared: taken in turns, with the median, the ratio and the interval that holds it.

Other programs change the machine's speed. Functions that run one after the other, again and again, all meet that
change, so the ratio of two neighbouring turns hardly depends on it. Whoever compares says how many turns are enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The median of values, and the interval that holds the median of many more such values.

    Attributes:
        median: The median.
        least, most: The ends of the interval; the least and the greatest value where there are too few for it.
    """

    median: float
    least: float
    most: float


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Returns the median of values and its interval, which assumes nothing about their distribution.

    Each value is below the true median with probability 1/2. So the number of values below it is binomial, and tells
    how many values at each end can be left out.

    Example:
        >>> estimate([3.0, 1.0, 2.0])
        Estimate(median=2.0, least=1.0, most=3.0)
        >>> estimate(range(1, 16))
        Estimate(median=8, least=4, most=12)
    """
    ordered = sorted(values)
    count = len(values)
    rank = 0
    while sum(math.comb(count, below) for below in range(rank + 1)) / 2**count <= (1 - confidence) / 2:
        rank += 1
    return Estimate(
        median=statistics.median(ordered), least=ordered[max(rank - 1, 0)], most=ordered[count - max(rank, 1)]
    )


def shown_ratio(ratio: Estimate) -> str:
    """Returns a ratio with its interval.

    Example:
        >>> shown_ratio(Estimate(median=1.2, least=1.1, most=1.25))
        '1.20x (1.10 to 1.25)'
    """
    return f"{ratio.median:.2f}x ({ratio.least:.2f} to {ratio.most:.2f})"


def in_turns(
    sides: Sequence[Callable[[], Result]],
    most: int,
    is_enough: Callable[[Sequence[Sequence[Result]]], bool] = lambda turns: False,
) -> list[list[Result]]:
    """Calls functions in turns: A B, B A, A B, ..., so that a drift of the machine's speed favours none of them.

    Args:
        sides: The functions.
        most: The largest number of turns, at least one.
        is_enough: Is given what the functions returned in each turn so far, and returns whether that is enough.
    Returns: For each function, what it returned in each turn.
    Example:
        >>> in_turns([lambda: "a", lambda: "b"], most=9, is_enough=lambda turns: len(turns) == 2)
        [['a', 'a'], ['b', 'b']]
    """
    turns: list[list[Result]] = []
    while not turns or (len(turns) < most and not is_enough(turns)):
        order = 1 if len(turns) % 2 == 0 else -1
        turns.append([side() for side in sides[::order]][::order])
    return [list(each) for each in zip(*turns, strict=True)]


def seconds_of(call: Callable[[], Any]) -> float:
    """Times one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def call_seconds(call: Callable[[], Any], seconds: float, most: float = math.inf) -> list[float]:
    """Times calls for about `seconds` seconds, at least one call and at most `most`. Returns the seconds of each."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while not found or (len(found) < most and time.perf_counter() < until):
        found.append(seconds_of(call))
    return found
