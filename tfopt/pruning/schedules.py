"""Schedules of sparsity: functions from a training step, which counts from 0, to the share of zeros at that step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tfopt.errors import ConfigError, warn

Schedule: TypeAlias = Callable[[int], float]

CYCLES = 4


def polynomial(initial_sparsity: float, target_sparsity: float, begin_step: int, end_step: int) -> Schedule:
    """Returns a schedule that rises from the initial to the target sparsity, fast at first, then more and more slowly.

        target + (initial - target) * (1 - (step - begin) / (end - begin)) ** 3

    The sparsity is 0 before `begin_step`, and the target from `end_step` on.

    Example:
        >>> schedule = polynomial(0.0, 0.8, begin_step=0, end_step=100)
        >>> [round(schedule(step), 3) for step in (0, 25, 50, 100, 150)]
        [0.0, 0.463, 0.7, 0.8, 0.8]

    Reference:
        Zhu & Gupta, "To prune, or not to prune", arXiv:1710.01878.
    """
    lift = initial_sparsity - target_sparsity
    return _between(begin_step, end_step, target_sparsity, lambda done: target_sparsity + lift * (1 - done) ** 3)


def constant(initial_sparsity: float, target_sparsity: float, begin_step: int, end_step: int) -> Schedule:
    """Returns a schedule that is at the target from `begin_step` on. It does not use the other two arguments.

    Example:
        >>> schedule = constant(0.0, 0.8, begin_step=10, end_step=100)
        >>> schedule(9), schedule(10)
        (0.0, 0.8)
    """
    return lambda step: target_sparsity if step >= begin_step else 0.0


def exponential(initial_sparsity: float, target_sparsity: float, begin_step: int, end_step: int) -> Schedule:
    """Returns a schedule in which the kept share falls by the same factor in every step.

        1 - (1 - initial) * ((1 - target) / (1 - initial)) ** ((step - begin) / (end - begin))

    The sparsity is 0 before `begin_step`, and the target from `end_step` on.

    Example:
        >>> schedule = exponential(0.0, 0.75, begin_step=0, end_step=100)
        >>> [round(schedule(step), 3) for step in (0, 50, 100, 150)]
        [0.0, 0.5, 0.75, 0.75]
    """
    kept = 1 - initial_sparsity
    factor = (1 - target_sparsity) / kept
    return _between(begin_step, end_step, target_sparsity, lambda done: float(1 - kept * factor**done))


def one_cycle(initial_sparsity: float, target_sparsity: float, begin_step: int, end_step: int) -> Schedule:
    """Returns a schedule that rises slowly, then fast in the middle, then slowly again: a logistic curve.

        initial + (target - initial) * (1 + e ** (b - a)) / (1 + e ** (b - a * t)), t = (step - begin) / (end - begin)

    with a = 14 and b = 5. The sparsity is 0 before `begin_step`, and the target from `end_step` on.

    Example:
        >>> schedule = one_cycle(0.0, 0.8, begin_step=0, end_step=100)
        >>> [round(schedule(step), 3) for step in (0, 20, 40, 60, 100)]
        [0.005, 0.08, 0.517, 0.774, 0.8]

    Reference:
        Hubens et al., "One-Cycle Pruning", ICIP 2022, arXiv:2107.02086.
    """
    a, b = 14, 5

    def sparsity(done: float) -> float:
        share = (1 + math.exp(b - a)) / (1 + math.exp(b - a * done))
        return initial_sparsity + (target_sparsity - initial_sparsity) * share

    return _between(begin_step, end_step, target_sparsity, sparsity)


def cyclic(initial_sparsity: float, target_sparsity: float, begin_step: int, end_step: int) -> Schedule:
    """Returns a schedule of four equal cycles. Each rises from the initial to the target sparsity as `polynomial` does.

    When a new cycle begins, the masks release weights, which then train again from zero. A weight that was pruned by
    mistake can so come back. The sparsity is 0 before `begin_step`, and the target from `end_step` on.

    Example:
        >>> schedule = cyclic(0.0, 0.8, begin_step=0, end_step=100)
        >>> [round(schedule(step), 3) for step in (0, 20, 25, 45, 50, 100)]
        [0.0, 0.794, 0.0, 0.794, 0.0, 0.8]

    Reference:
        Srinivas et al., "Cyclical Pruning for Sparse Neural Networks", CVPR Workshops 2022, arXiv:2202.01290.
    """
    lift = initial_sparsity - target_sparsity
    return _between(
        begin_step, end_step, target_sparsity, lambda done: target_sparsity + lift * (1 - done * CYCLES % 1) ** 3
    )


def _between(begin_step: int, end_step: int, target_sparsity: float, curve: Callable[[float], float]) -> Schedule:
    """Returns a schedule that follows a curve over the share of the steps that are done, from begin to end."""

    def sparsity(step: int) -> float:
        if step < begin_step:
            return 0.0
        return target_sparsity if step >= end_step else curve((step - begin_step) / (end_step - begin_step))

    return sparsity


def from_callable(schedule: Callable[[int], Any]) -> Schedule:
    """Returns a schedule for a user's own function of the step, or for a schedule of tensorflow-model-optimization.

    The latter returns (should_prune, sparsity). Here `frequency` of the config decides in which steps masks change, so
    only its `begin_step` is used.

    Raises:
        ConfigError: The schedule returns a value outside [0, 1) for a step.

    Example:
        >>> from_callable(lambda step: min(step / 100, 0.5))(20)
        0.2
    """
    begin_step = getattr(schedule, "begin_step", 0)

    def sparsity(step: int) -> float:
        if step < begin_step:
            return 0.0
        result = schedule(step)
        value = float(result[1] if isinstance(result, tuple) else result)
        if not 0 <= value < 1:
            raise ConfigError(
                f"schedule must return a sparsity in [0, 1). Received: schedule({step})={value:g}. "
                "Sparsity is a fraction of zeros, not a percentage."
            )
        return value

    return sparsity


SCHEDULES: dict[str, Callable[[float, float, int, int], Schedule]] = {
    "polynomial": polynomial,
    "exponential": exponential,
    "one_cycle": one_cycle,
    "cyclic": cyclic,
    "constant": constant,
}


def last_step(end_step: int | None, fit: Mapping[str, Any], what: str) -> int:
    """Returns the step at which pruning ends in a fit with these `params`: `end_step`, or else after two thirds."""
    total = fit["steps"] * fit["epochs"] if fit.get("steps") else None
    if end_step is not None:
        warn_if_beyond(end_step, total, what)
        return end_step
    if total is None:
        raise ConfigError(
            "end_step must be given when the number of steps is unknown. Received: end_step=None and a data set of "
            "unknown size. Give end_step, or give steps_per_epoch to fit."
        )
    return max(1, 2 * total // 3)


def warn_if_beyond(end_step: int | None, total: int | None, what: str) -> None:
    """Warns that pruning would end after the fit does."""
    if end_step is not None and total is not None and end_step > total:
        warn(
            f"end_step={end_step} lies beyond the {total} steps of this fit. {what} at its end, with no step to "
            f"recover. Set end_step to {total} or less."
        )
