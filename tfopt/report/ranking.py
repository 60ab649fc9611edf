"""Which of several measured models is the fastest, and which is the smallest.

A model is named the fastest only if it beats every other one in `is_faster`; where the rounds do not agree on the
difference to one of them, there is no winner. Each model counts with its best number of threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from tfopt.report.benchmark import BenchmarkedModel, BenchmarkReport, Fastest
from tfopt.report.formatting import CLEAR, speed_verdict
from tfopt.timing import estimate

Side = TypeVar("Side", bound=Hashable)


def judged(
    models: Sequence[BenchmarkedModel],
    *,
    device: str,
    cores: int,
    batch_sizes: Sequence[int],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
    baseline: str | None = None,
    higher_is_better: bool = True,
    gate: float | None = None,
    warnings: Sequence[str] = (),
) -> BenchmarkReport:
    """Returns the report of measured models: it names the fastest and the smallest of those that reach the gate.

    The arguments are the fields of the report. `warnings` are what was noted before.
    """
    named = [each for each in models if not each.failure and each.reaches(gate)]
    fastest = [found for size in batch_sizes if (found := _fastest(named, size)) is not None]
    smallest = min(named, key=lambda each: each.bytes_on_disk or 0, default=None)
    return BenchmarkReport(
        device=device,
        cores=cores,
        batch_sizes=tuple(batch_sizes),
        threads=tuple(threads),
        rounds=rounds,
        seconds=seconds,
        models=tuple(models),
        baseline=baseline,
        higher_is_better=higher_is_better,
        gate=gate,
        fastest=tuple(fastest),
        smallest=None if smallest is None else smallest.name,
        warnings=(*warnings, *(() if smallest is None else _slower(smallest, named, batch_sizes))),
    )


def is_faster(one: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether one of two sides is clearly faster. Both have a time for each round, taken in turns.

    Only a difference of over 5% counts that the interval of the rounds' ratios confirms. Rounds that only one of them
    had do not count.

    Example:
        >>> is_faster([1.0, 1.1, 1.0], [2.0, 2.1, 1.9]), is_faster([1.0, 1.2, 1.0], [1.1, 1.1, 1.3])
        (True, False)
    """
    ratio = estimate([slow / fast for fast, slow in zip(one, other, strict=False)])
    return speed_verdict(ratio.median, ratio.least, ratio.most) == "faster"


def undecided(round_ms: Mapping[Side, Sequence[float]]) -> list[Side]:
    """Returns the sides between which more rounds may decide which is the fastest; none if they would tell no more.

    These are the side with the least median, and those that it does not clearly beat, if one of their medians is over
    5% longer. Sides within 5% of each other are about as fast, however long they are timed.

    Args:
        round_ms: For each side, a time for each round.
    Example:
        >>> undecided({"a": [2.0] * 9, "b": [1.8, 1.8, 2.1] * 3, "c": [3.0] * 9})
        ['b', 'a']
        >>> undecided({"a": [2.0] * 9, "b": [1.95] * 9}), undecided({"a": [2.0] * 9, "b": [1.5] * 9})
        ([], [])
    """
    medians = {side: statistics.median(each) for side, each in round_ms.items()}
    best = min(medians, key=medians.__getitem__)
    rivals = [side for side in round_ms if side != best and not is_faster(round_ms[best], round_ms[side])]
    return [best, *rivals] if any(medians[side] >= (1 + CLEAR) * medians[best] for side in rivals) else []


def share_of(score: float, baseline: float, higher_is_better: bool) -> float | None:
    """Returns a score as a share of the baseline's, above 1 if it is better; None if that means nothing.

    Example:
        >>> share_of(0.9, 1.0, True), share_of(2.0, 1.9, False), share_of(0.5, 0.0, True)
        (0.9, 0.95, None)
    """
    good, whole = (score, baseline) if higher_is_better else (baseline, score)
    return good / whole if whole > 0 else None


def _fastest(models: Sequence[BenchmarkedModel], batch_size: int) -> Fastest | None:
    """Returns the fastest model, or those among which there is no winner; None if none has calls of this size."""
    found = sorted(
        ((each.name, best, each) for each in models if (best := each.best(batch_size)) is not None),
        key=lambda each: each[1].latency_ms_median,
    )
    if not found:
        return None
    name, best, model = found[0]
    rivals = [other for other, its, _ in found[1:] if not is_faster(best.round_ms, its.round_ms)]
    if rivals:
        return Fastest(
            batch_size=batch_size,
            model=None,
            threads=None,
            latency_ms_median=best.latency_ms_median,
            about_even=(name, *rivals),
        )
    others = [each for each in model.times if each.batch_size == batch_size and each is not best]
    alone = all(is_faster(best.round_ms, each.round_ms) for each in others)
    return Fastest(
        batch_size=batch_size,
        model=name,
        threads=best.threads if alone else None,
        latency_ms_median=best.latency_ms_median,
    )


def _slower(smallest: BenchmarkedModel, named: Sequence[BenchmarkedModel], batch_sizes: Sequence[int]) -> Iterator[str]:
    """Yields a warning for each batch size at which another model is clearly faster than the smallest one."""
    for size in batch_sizes:
        own, least = smallest.best(size), None
        for each in named:
            its = each.best(size)
            if its is not None and own is not None and is_faster(its.round_ms, own.round_ms):
                least = min(filter(None, (least, (its.latency_ms_median, each.name))))
        if own is not None and least is not None:
            ratio = own.latency_ms_median / least[0]
            yield f"batch {size}: {smallest.name} is the smallest, but takes {ratio:.3g}x the time of {least[1]}"
