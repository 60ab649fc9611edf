"""Keeps the accuracy that int8 costs within a bound, by leaving as few nodes float as that takes.

Every choice of nodes is tried in one graph, whose quantization is switched on and off tensor by tensor: so a trial
costs a run of the evaluation data and no new graph. The search measures how much each node costs alone, all others
being float; finds by bisection how many of the costliest must be float; and then gives back to int8, the least costly
first, what is not needed after all, since costs do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tfopt.report import Change


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a choice of nodes was measured to give.

    Attributes:
        value: The metric; more is better.
        error: Distance of the outputs from those of the float graph, relative to these.
    """

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the search found.

    Attributes:
        kept_float: The nodes that must be float, each with the reason.
        steps: The way there.
        metrics: The metric in float, in int8 throughout, and as it is now.
    """

    kept_float: Mapping[str, str]
    steps: Sequence[Change]
    metrics: Mapping[str, float]


def keep_budget(names: Sequence[str], evaluate: Callable[[Collection[str]], Score], largest_drop: float) -> Budget:
    """Finds few nodes that must be float for the metric to drop by no more than `largest_drop`.

    Args:
        names: The nodes that could be int8.
        evaluate: Measures the model with some of them float.
        largest_drop: What may be lost of the metric.
    Example:
        >>> costs = {"a": 0.01, "b": 0.2, "c": 0.001}
        >>> def evaluate(kept_float):
        ...     drop = sum(cost for name, cost in costs.items() if name not in kept_float)
        ...     return Score(value=1 - drop, error=drop)
        >>> list(keep_budget(list(costs), evaluate, 0.02).kept_float)
        ['b']
    """
    exact, plain = evaluate(names), evaluate(())
    floor = exact.value - largest_drop - 1e-9
    steps = [Change(name="model", kind="budget", detail=f"float {exact.value:.4g}, int8 {plain.value:.4g}")]
    found: dict[str, Score] = {}
    last = plain
    if plain.value < floor:
        alone = {name: evaluate([other for other in names if other != name]) for name in names}
        ranked = sorted(names, key=lambda name: (alone[name].value, -alone[name].error))
        count, last = _fewest(ranked, evaluate, floor)
        chosen = ranked[:count]
        steps.append(Change(name=", ".join(chosen), kind="budget", detail=f"costliest {count} float: {last.value:.4g}"))
        for name in reversed(chosen):
            trial = evaluate([other for other in chosen if other != name])
            holds = trial.value >= floor
            detail = f"{'back to int8' if holds else 'must be float'}: {trial.value:.4g} with it in int8"
            steps.append(Change(name=name, kind="budget", detail=detail))
            if holds:
                chosen, last = [other for other in chosen if other != name], trial
        found = {name: alone[name] for name in chosen}
    reasons = {
        name: f"accuracy budget: {exact.value - score.value:.4g} lost with it alone in int8"
        for name, score in found.items()
    }
    metrics = {"float": exact.value, "int8": plain.value, "kept": last.value}
    return Budget(kept_float=reasons, steps=steps, metrics=metrics)


def _fewest(ranked: Sequence[str], evaluate: Callable[[Collection[str]], Score], floor: float) -> tuple[int, Score]:
    """Returns how many of the first names must be float, and what that gives, by bisection."""
    too_few, enough = 0, len(ranked)
    score = evaluate(ranked)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        trial = evaluate(ranked[:middle])
        if trial.value >= floor:
            enough, score = middle, trial
        else:
            too_few = middle
    return enough, score
