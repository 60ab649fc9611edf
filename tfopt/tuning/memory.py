"""Finds the largest batch that a training has memory for. Each batch is trained in a process of its own.

TensorFlow keeps the memory that it has taken once, so two batches in one process say nothing about the smaller one.
The memory of a step grows in a straight line with the batch. The first trial, of one example, gives a point of the line
and the estimate of the step its slope; later trials give further points. The search goes where the line meets the
limit, then a twentieth further. Where the line has been wrong, it halves the interval instead. It ends when the
smallest batch that did not fit is within a twentieth of the largest that did, or the next one: batches above 64 are
multiples of 8. So what is returned has been trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tfopt.errors import ConfigError, TrainingError
from tfopt.report import Record
from tfopt.report.formatting import memory_size
from tfopt.trials.process import Outcome, raise_own
from tfopt.tuning.limit import Limit

NEAR = 1.05  # two batches whose ratio is less than this need not be told apart
FINE, STEP = 64, 8  # batches above the first are multiples of the second
FIRST_STEP = 16  # from one example, where nothing estimates the slope
# What a process says whose memory was too small, in the words of TensorFlow, C++, Python and the kernel.
OF_MEMORY = re.compile(
    r"ResourceExhausted|OOM|[Oo]ut of memory|MemoryError|bad_alloc|[Cc]annot allocate memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|SIGKILL|exit code (-?6|-?11|134|139)|can't start new thread|Resource temporarily unavailable|was too large"
    r"|[Ff]ailed to allocate|ALLOC_FAILED|NOT_INITIALIZED"
)
# Errors that want of memory does not become. Others may be of it whatever they say: oneDNN's "could not execute a
# primitive" is an AbortedError.
OF_THE_PROGRAM = re.compile(
    r"(Value|Type|Key|Index|Attribute|NotImplemented|InvalidArgument|FailedPrecondition|Unimplemented|Config|Training)Error"
)
MOST_WORDS = 300  # letters of an error: those of TensorFlow hold whole tracebacks
RunTrial = Callable[[int, bool], Outcome]


@dataclass(frozen=True, kw_only=True)
class MemoryTrial(Record):
    """A trial of one batch.

    Attributes:
        per_replica_batch_size: Number of examples on each replica.
        fits: Whether it was trained within the limit.
        peak_bytes: The largest memory that it took; None if it did not end.
        seconds: How long the process ran.
        reason: Why it does not fit; empty if it does.
    """

    per_replica_batch_size: int
    fits: bool
    peak_bytes: int | None
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryReport(Record):
    """The largest batch that fits.

    Attributes:
        per_replica_batch_size: The largest number of examples on each replica that was trained within the limit.
        replicas: Number of replicas, of all workers.
        limit: The limit.
        estimated: What the estimate of the step said the largest number would be; None if there was no estimate.
        trials: The trials, in their order.
        ended_by: Why the search ended.
        unavailable: Why there was no estimate.
        workers: What each of several workers found, in their order. The least is the batch above.
    """

    per_replica_batch_size: int
    replicas: int
    limit: Limit
    estimated: int | None
    trials: tuple[MemoryTrial, ...]
    ended_by: str
    unavailable: Mapping[str, str] = field(default_factory=dict)
    workers: tuple[int, ...] = ()

    @property
    def global_batch_size(self) -> int:
        return self.per_replica_batch_size * self.replicas


def on_grid(size: float) -> int:
    """Returns the largest batch up to a number of examples that is tried: a multiple of 8 above 64.

    Example:
        >>> on_grid(63.7), on_grid(107.0), on_grid(0.2)
        (63, 104, 1)
    """
    whole = max(int(size), 1)
    return whole if whole <= FINE else max(whole // STEP * STEP, FINE)


def next_size(fits: int, too_large: int | None, predicted: int | None, most: int | None) -> int | None:
    """Returns the batch to try next; None if the search is over.

    Args:
        fits: The largest batch that fits.
        too_large: The smallest that does not; None if there is none.
        predicted: The largest that should fit; None if that is unknown.
        most: The largest that may be tried.
    Example:
        >>> next_size(1, None, 200, None), next_size(200, None, 200, None), next_size(200, 208, 200, None)
        (200, 208, None)
        >>> next_size(1, 200, 200, None), next_size(64, None, 900, 100)
        (14, 100)
    """
    top = most if too_large is None else too_large
    if too_large is not None and (too_large <= NEAR * fits or on_grid(too_large - 1) <= fits):
        return None
    if most is not None and fits >= most:
        return None
    above = max(on_grid(NEAR * fits), fits + (1 if fits < FINE else STEP))
    if predicted is None:
        wanted = FIRST_STEP * fits if too_large is None else on_grid(math.sqrt(fits * too_large))
    elif too_large is not None and predicted >= too_large:  # the line was wrong
        wanted = on_grid(math.sqrt(fits * too_large))
    else:
        wanted = max(predicted, above)
    wanted = max(wanted, fits + 1)
    if top is None:
        return wanted
    if too_large is None:
        return min(wanted, top)
    return min(wanted, max(on_grid(too_large - 1), fits + 1))


def find_largest(run: RunTrial, limit: Limit, examples: int | None, most: int | None, most_trials: int) -> MemoryReport:
    """Finds the largest batch that fits.

    Args:
        run: Trains a batch, given the examples on each replica and whether to estimate the memory of a step too.
        limit: The limit.
        examples: Number of training examples; None if it is unknown.
        most: The largest number on each replica that is tried; None means all examples.
        most_trials: The largest number of trials.
    Raises:
        ConfigError: One example on each replica does not fit.
        TrainingError: The training fails with one example, for another reason than memory.
    """
    outcome = run(1, True)
    trials = [_trial(1, outcome, limit)]
    _check_first(trials[0], outcome.failure, limit)
    replicas = int(outcome.result["replicas"])
    examples = outcome.result.get("examples", examples)  # only a script's fit knows them
    _check_enough(examples, replicas)
    if examples is not None:
        most = min(most or examples, max(examples // replicas, 1))
    estimates = outcome.result["estimates"]
    slope = _slope(estimates)
    estimated = None if slope is None else _meets([(1, trials[0].peak_bytes or 0)], limit, slope, most)
    while (size := _next(trials, limit, slope, most)) is not None and len(trials) < most_trials:
        outcome = run(size, False)
        if OF_THE_PROGRAM.match(outcome.failure) and not OF_MEMORY.search(outcome.failure):
            _raise(
                outcome.failure, f"{size} examples on each replica, though fewer trained. Set max_batch_size below it."
            )
        trials.append(_trial(size, outcome, limit))
    largest = max(each.per_replica_batch_size for each in trials if each.fits)
    ended = "the next larger batch does not fit"
    if size is not None:
        ended = f"max_trials={most_trials}; a larger batch may fit"
    elif all(each.fits for each in trials):
        ended = "all training examples fit" if most == (examples or 0) // replicas else f"max_batch_size={most}"
    return MemoryReport(
        per_replica_batch_size=largest,
        replicas=replicas,
        limit=limit,
        estimated=estimated,
        trials=tuple(trials),
        ended_by=ended,
        unavailable={} if estimated is not None else {"estimated": str(estimates.get("unavailable", "it is flat"))},
    )


def _trial(size: int, outcome: Outcome, limit: Limit) -> MemoryTrial:
    trial = MemoryTrial(
        per_replica_batch_size=size,
        fits=False,
        peak_bytes=None,
        seconds=outcome.seconds,
        reason=_in_a_line(outcome.failure),
    )
    if outcome.failure:
        return trial
    peak = int(outcome.result["peak_bytes"])
    fits = limit.hard or peak <= limit.usable
    reason = "" if fits else f"it took {memory_size(peak)} of {memory_size(limit.usable)}"
    return replace(trial, fits=fits, peak_bytes=peak, reason=reason)


def _check_first(first: MemoryTrial, failure: str, limit: Limit) -> None:
    if first.fits:
        return
    if first.peak_bytes is not None or OF_MEMORY.search(failure):
        raise ConfigError(
            f"One example on each replica must fit into the memory. Received: {limit}; {first.reason}. Raise the "
            "limit, or make the model smaller."
        )
    _raise(
        failure,
        "one example in a step. Layers of your own need keras.saving.register_keras_serializable, and a module that "
        "another process can import.",
    )


def _raise(failure: str, remedy: str) -> NoReturn:
    """Raises what ended a trial that had memory enough."""
    raise_own(failure)
    raise TrainingError(
        f"The training must run in a process of its own. Received: {_in_a_line(failure)}, with {remedy}"
    )


def _in_a_line(failure: str) -> str:
    words = " ".join(failure.split())
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} ..."


def _check_enough(examples: int | None, replicas: int) -> None:
    if examples is not None and examples < replicas:
        raise ConfigError(
            f"data must have an example for each replica. Received: {examples} examples, {replicas} replicas. Use "
            "fewer devices, or more data."
        )


def _next(trials: Sequence[MemoryTrial], limit: Limit, slope: float | None, most: int | None) -> int | None:
    fits = max(each.per_replica_batch_size for each in trials if each.fits)
    larger = [each.per_replica_batch_size for each in trials if not each.fits and each.per_replica_batch_size > fits]
    points = sorted((each.per_replica_batch_size, each.peak_bytes) for each in trials if each.peak_bytes is not None)
    return next_size(fits, min(larger, default=None), _meets(points, limit, slope, most), most)


def _meets(points: Sequence[tuple[int, int]], limit: Limit, slope: float | None, most: int | None) -> int | None:
    """Returns the batch at which the line through the last two points, or with a slope, meets the limit."""
    size, peak = points[-1]
    if len(points) > 1 and size > points[-2][0]:
        measured = (peak - points[-2][1]) / (size - points[-2][0])
        slope = measured if measured > 0 else slope
    if slope is None or slope <= 0:
        return None
    found = size + (limit.usable - peak) / slope
    return most if most is not None and found >= most else on_grid(found)


def _slope(estimates: Mapping[str, Any]) -> float | None:
    if len(estimates) < 2:
        return None
    (first, one), (last, other) = sorted((int(size), float(found)) for size, found in estimates.items())
    return max((other - one) / (last - first), 0.0) or None


def trial_folder(folder: Path, size: int) -> Path:
    """Returns the directory of a trial.

    Example:
        >>> trial_folder(Path("runs"), 64).as_posix()
        'runs/memory/64'
    """
    return folder / "memory" / str(size)
