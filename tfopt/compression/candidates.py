"""Candidates: how many channels each group loses for a share of the multiply-adds, and which are worth a training.

What was measured decides, by rules that are functions of plain figures: `interval` and `farthest` choose the next one,
`why_leave_out` says which need no training, and `why_give_up` which training need not go on.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import json_in
from tfopt.compression.front import show_figure
from tfopt.data import Examples
from tfopt.errors import UnsupportedModelError
from tfopt.pruning import StructuredPruningConfig
from tfopt.pruning.sensitivity import sensitivity
from tfopt.pruning.sensitivity_curves import Sensitivity
from tfopt.pruning.structured.shrink import find_groups
from tfopt.timing import seconds_of

Amounts = Literal["sensitive", "even"]
PARTS = (1 / 3, 2 / 3, 1.0)  # of the largest share that a group may lose, at which its sensitivity is measured
BATCH, BATCHES = 64, 4
HALVINGS = 20
NEAR = 0.02  # shares of the multiply-adds this near to each other, as a ratio, are the same model
MOST_LEFT = 0.98  # of the multiply-adds; what leaves more is the same model
MARGIN = 1.25  # a prediction must exceed a bound by this factor to leave a candidate out
TOO_SMALL = 0.8  # of a share at which too much of the score was lost
WARM_UP = 1 / 3  # of a training, which is not given up before
FEWEST = 2  # other trainings with which one must be compared


def most_ratios(model: keras.Model, config: StructuredPruningConfig) -> dict[str, float]:
    """Returns the largest share of its channels that each group of a model may lose, at least one unit less than all.

    Raises:
        UnsupportedModelError: The model is subclassed or not built.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32, name="a"), keras.layers.Dense(2)])
        >>> most_ratios(model, StructuredPruningConfig(max_ratio=0.75))
        {'a': 0.75}
    """
    _, groups, _ = find_groups(model, config.with_ratios({}))
    sizes = {group.name: len(group.units) for group in groups}
    return {name: min(config.max_ratio, (size - 1) / size) for name, size in sizes.items()}


def measure_sensitivity(
    model: keras.Model, examples: Examples, config: StructuredPruningConfig, groups: int, seconds: float, file: Path
) -> Sensitivity:
    """Measures the loss with each group alone made smaller, on a few batches, fewer where time is short.

    Their number is kept in a file, so that a search that goes on measures the same.
    """
    batches = list(examples.batches("validation", BATCH).take(BATCHES).as_numpy_iterator())

    def evaluate() -> Any:
        return model.evaluate(*batches[0][:2], verbose=0)

    count = _count_in(file)
    if count is None:
        evaluate()  # traces
        affordable = int(seconds / (seconds_of(evaluate) * (groups * len(PARTS) + 1)))
        count = min(max(affordable, 1), len(batches))
        write_text(file, json.dumps({"batches": count}))
    shares = tuple(config.max_ratio * part for part in PARTS)
    return sensitivity(model, batches[:count], config.with_ratios({}), shares=shares, score="loss")


def _count_in(file: Path) -> int | None:
    """Returns the number of batches in a file; None if there is none, or it is damaged: then it is measured anew."""
    found = json_in(file.read_bytes()) if file.is_file() else None
    count = found.get("batches") if isinstance(found, dict) else None
    return count if type(count) is int and count >= 1 else None


@dataclass(frozen=True)
class Allocation:
    """Divides what leaves among the groups of a model.

    Attributes:
        found: The sensitivity of each group.
        most: The largest share of its channels that each group may lose.
    """

    found: Sensitivity
    most: Mapping[str, float]

    def share(self, ratios: Mapping[str, float]) -> float:
        """Returns the share of the multiply-adds that are left."""
        assert self.found.cost is not None  # it is of channels
        return self.found.cost(ratios)

    @property
    def least(self) -> float:
        """The smallest share of the multiply-adds that may be left."""
        return self.share(self.most)

    def ratios(self, share: float, amounts: Amounts) -> dict[str, float]:
        """Returns the ratio of each group: less where it hurts, or the same for all."""
        if amounts == "sensitive":
            chosen = self.found.allocate(target_flops=max(share, self.least + 1e-6)).ratios
            return {name: round(min(chosen[name], most), 6) for name, most in self.most.items()}
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share(self._even(middle)) <= share else (middle, high)
        return self._even(high)

    def _even(self, ratio: float) -> dict[str, float]:
        return {name: round(min(ratio, most), 6) for name, most in self.most.items()}


def possible_shares(allocation: Allocation, model: keras.Model, config: StructuredPruningConfig) -> tuple[float, float]:
    """Returns the smallest and the largest share of the multiply-adds that a search may try.

    Raises:
        UnsupportedModelError: Next to nothing can be removed.
    """
    least = round(allocation.least + 5e-4, 3)
    if least < MOST_LEFT:
        return least, MOST_LEFT
    raise UnsupportedModelError(
        f"model must have channels that can be removed. Received: {model.name!r}, which keeps {least:.1%} of its "
        f"multiply-adds at the least, with round_to={config.round_to} and max_ratio={config.max_ratio:g}. Set a "
        "smaller round_to, or export it in int8."
    )


def predicted(share: float, measured: Iterable[tuple[float, float]]) -> float:
    """Returns a figure at a share of the multiply-adds, on straight lines between the measured shares.

    Example:
        >>> predicted(0.5, [(1.0, 8.0), (0.0, 2.0)])
        5.0
    """
    shares, figures = zip(*sorted(measured), strict=True)
    return float(np.interp(share, shares, figures))


def interval(drops: Mapping[float, float], bound: float | None) -> tuple[float, float]:
    """Returns the largest share at which too much score was lost, and the smallest at which it was not.

    Args:
        drops: The loss of score by the share of the multiply-adds.
        bound: The largest loss allowed. Without one, the interval is everything.
    Example:
        >>> interval({0.2: 0.03, 0.3: 0.01, 0.5: 0.0}, bound=0.005)
        (0.3, 0.5)
    """
    if bound is None:
        return 0.0, 1.0
    high = min((share for share, drop in drops.items() if drop <= bound), default=1.0)
    return max((share for share, drop in drops.items() if drop > bound and share < high), default=0.0), high


def why_leave_out(
    share: float,
    too_small: float,
    measured: Iterable[tuple[float, Mapping[str, float]]],
    budget: Mapping[str, float],
) -> str:
    """Returns why a candidate needs no training; nothing if it does.

    Args:
        share: Its share of the multiply-adds.
        too_small: The largest share at which too much score was lost.
        measured: Shares with their figures of size and speed.
        budget: The bounds of these figures.
    Example:
        >>> why_leave_out(0.5, 0.0, [(0.0, {"bytes": 0.0}), (1.0, {"bytes": 80_000.0})], {"bytes": 30_000})
        'bytes would be about 40.0 kB'
    """
    if share < TOO_SMALL * too_small:
        return f"a model with {too_small:.1%} of the multiply-adds loses too much"
    known = list(measured)
    for name, bound in budget.items():
        value = predicted(share, [(other, figures[name]) for other, figures in known])
        if value > MARGIN * bound:
            return f"{name} would be about {show_figure(name, value)}"
    return ""


def why_give_up(losses: Sequence[float], smaller: Iterable[Sequence[float]], epochs: int) -> str:
    """Returns why a training need not go on; nothing if it should.

    It will hardly lead to the front where smaller models do better: where its least loss so far exceeds the median of
    what they had reached after as many epochs. That is the median stopping rule, among models that are no larger.

    Args:
        losses: Its loss after each epoch.
        smaller: The losses of models with as many multiply-adds or fewer.
        epochs: The length of the training.
    Example:
        >>> why_give_up([0.9, 0.8], [[0.7, 0.6, 0.5], [0.8, 0.7, 0.6]], epochs=3)
        'after 2 of 3 epochs its loss is 0.8, and the median of smaller models was 0.65'
        >>> why_give_up([0.9, 0.6], [[0.7, 0.6, 0.5], [0.8, 0.7, 0.6]], epochs=3)
        ''

    Reference:
        Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017.
    """
    done = len(losses)
    if done < WARM_UP * epochs or done in (0, epochs):
        return ""
    reached = [min(each[:done]) for each in smaller if len(each) >= done]
    if len(reached) < FEWEST:
        return ""
    median = statistics.median(reached)
    if min(losses) <= median:
        return ""
    reason = f"its loss is {min(losses):.3g}, and the median of smaller models was {median:.3g}"
    return f"after {done} of {epochs} epochs {reason}"


def farthest(shares: Mapping[int, float], known: Sequence[float], low: float, high: float) -> int | None:
    """Returns the number of the candidate whose share is, as a ratio, farthest from all known ones.

    Candidates between `low`, known to be too small, and `high`, known to be large enough, come first: there a search
    halves the interval. None is returned if every candidate is next to a known one.

    Args:
        shares: The share of the multiply-adds of each candidate, by its number.
        known: Shares that need not be tried again.
        low, high: The interval.
    Example:
        >>> farthest({1: 0.9, 2: 0.3, 3: 0.12}, [1.0, 0.1], 0.1, 1.0)
        2
        >>> farthest({1: 0.9, 3: 0.12}, [1.0, 0.3, 0.1], 0.3, 1.0)
        1
    """
    distances = {number: _distance(share, known) for number, share in shares.items()}
    apart = {number: distance for number, distance in distances.items() if distance > NEAR}
    between = {number: distance for number, distance in apart.items() if low < shares[number] < high}
    return max(between or apart, key=lambda number: (between or apart)[number], default=None)


def is_near(share: float, known: Sequence[float]) -> bool:
    """Returns whether a share of the multiply-adds is, as a ratio, next to a known one: the same model.

    Example:
        >>> is_near(0.501, [1.0, 0.5]), is_near(0.6, [1.0, 0.5])
        (True, False)
    """
    return _distance(share, known) <= NEAR


def _distance(share: float, known: Sequence[float]) -> float:
    return min((abs(math.log(share / other)) for other in known), default=math.inf)
