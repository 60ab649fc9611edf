"""Finds a small set of nodes that must stay float, so that int8 loses no more accuracy than allowed.

All sets of nodes are evaluated in one graph, whose quantization can be switched on and off for each tensor. So an
evaluation costs one run over the evaluation data. It needs no new graph. The search has three steps:

1. It measures the loss of each node alone in int8, with all other nodes in float.
2. It finds by bisection how many of the nodes with the largest losses must be float.
3. Losses do not add up, so some of these nodes may not need to be float. It tries each of them in int8 again, the node
   with the smallest loss first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tfopt.report import Change


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of the model with some of its nodes in float.

    Attributes:
        value: The metric.
        error: Distance of the outputs from the float outputs, relative to the float outputs.
    """

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class FloatNodes:
    """The result of the search.

    Attributes:
        kept_float: The nodes that must be float, each with the reason.
        steps: The steps of the search, for the report.
        metrics: The metric with all nodes in float, with all nodes in int8, and with the nodes found.
    """

    kept_float: Mapping[str, str]
    steps: Sequence[Change]
    metrics: Mapping[str, float]


def search_float_nodes(
    names: Sequence[str],
    evaluate: Callable[[Collection[str]], Score],
    largest_drop: float,
    *,
    higher_is_better: bool = True,
) -> FloatNodes:
    """Returns a small set of nodes that must be float, so that the metric worsens by at most `largest_drop`.

    Args:
        names: The nodes that could be int8.
        evaluate: Measures the model with the given nodes in float.
        largest_drop: The largest allowed loss of the metric.
        higher_is_better: Whether a higher value of the metric is better.
    Example:
        >>> costs = {"a": 0.01, "b": 0.2, "c": 0.001}
        >>> def evaluate(kept_float):
        ...     drop = sum(cost for name, cost in costs.items() if name not in kept_float)
        ...     return Score(value=1 - drop, error=drop)
        >>> list(search_float_nodes(list(costs), evaluate, 0.02).kept_float)
        ['b']
    """
    exact, plain = evaluate(names), evaluate(())

    def loss(score: Score) -> float:
        return exact.value - score.value if higher_is_better else score.value - exact.value

    def holds(score: Score) -> bool:
        return loss(score) <= largest_drop + 1e-9

    steps = [Change(name="model", kind="budget", detail=f"float {exact.value:.4g}, int8 {plain.value:.4g}")]
    found: dict[str, Score] = {}
    last = plain
    if not holds(plain):
        alone = {name: evaluate([other for other in names if other != name]) for name in names}
        ranked = sorted(names, key=lambda name: (-loss(alone[name]), -alone[name].error))
        count, last = _fewest(ranked, evaluate, holds)
        chosen = ranked[:count]
        steps.append(Change(name=", ".join(chosen), kind="budget", detail=f"costliest {count} float: {last.value:.4g}"))
        for name in reversed(chosen):
            trial = evaluate([other for other in chosen if other != name])
            detail = f"{'back to int8' if holds(trial) else 'must be float'}: {trial.value:.4g} with it in int8"
            steps.append(Change(name=name, kind="budget", detail=detail))
            if holds(trial):
                chosen, last = [other for other in chosen if other != name], trial
        found = {name: alone[name] for name in chosen}
    reasons = {name: f"accuracy budget: {loss(score):.4g} lost with it alone in int8" for name, score in found.items()}
    metrics = {"float": exact.value, "int8": plain.value, "kept": last.value}
    return FloatNodes(kept_float=reasons, steps=steps, metrics=metrics)


def _fewest(
    ranked: Sequence[str], evaluate: Callable[[Collection[str]], Score], holds: Callable[[Score], bool]
) -> tuple[int, Score]:
    """Returns how many of the first names must be float, and the score with these in float, by bisection."""
    too_few, enough = 0, len(ranked)
    score = evaluate(ranked)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        trial = evaluate(ranked[:middle])
        if holds(trial):
            enough, score = middle, trial
        else:
            too_few = middle
    return enough, score
