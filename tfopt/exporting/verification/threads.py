"""Measures an artifact on several numbers of intra-op threads, and with several calls at the same time.

A kernel that is split over threads waits for the slowest of them. In small kernels that costs more than the split
saves, so calls with one example are often fastest on one thread, and the other cores are free for other requests. One
process can compute these at the same time: each caller has a thread of its own, and no kernel is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from tfopt.exporting.formats import format_of
from tfopt.exporting.manifest import CheckRecord, SignatureRecord
from tfopt.exporting.parity import draw_batch
from tfopt.exporting.verification.process import ROUNDS, alternate, runs
from tfopt.hardware import detect
from tfopt.report import ServingTimes, ThreadTimes
from tfopt.report.ranking import is_faster
from tfopt.timing import estimate, in_turns

ThreadCounts = tuple[Annotated[int, Ge(1)], ...]


def measure_threads(
    path: Path,
    signature: SignatureRecord,
    check: CheckRecord,
    threads: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    seconds: float,
    called: str = "serving_default",
    trusted: bool = False,
) -> tuple[ServingTimes | None, str]:
    """Times an artifact in a fresh process for each number of threads, in turns.

    Args:
        path: Its directory, which may lack the manifest.
        signature, check: As in the manifest. They give the inputs.
        threads: The numbers of intra-op threads. One above the number of cores means all cores.
        batch_sizes: Examples per call. An artifact with a fixed batch size has only that.
        seconds: How long each is timed in one round.
        called: The name of the signature that is called.
        trusted: As in `tfopt.verify`.
    Returns: The times, and "". Or None and the reason, if there are not two numbers of threads to compare.
    """
    machine = detect()
    counts = tuple(sorted({min(count, machine.logical_cores) for count in threads}))
    if len(counts) < 2:
        return None, (
            f"nothing to compare: on this machine's cores, {machine.logical_cores}, threads={tuple(threads)} are "
            f"{len(counts)} number of threads"
        )
    batches = {}
    for size in batch_sizes:
        batch = draw_batch(signature.inputs, check, size)
        batches[len(next(iter(batch.values())))] = batch
    sizes = sorted(batches)
    with ExitStack() as stack:
        processes = [stack.enter_context(runs(path)(path, called, trusted=trusted, threads=count)) for count in counts]
        calls = [thread_times(size, counts, alternate(processes, batches[size], seconds)) for size in sizes]
        callers = counts[-1] // counts[0]
        sides = [
            partial(processes[0].calls_per_second, batches[sizes[0]], seconds, callers),
            partial(processes[-1].calls_per_second, batches[sizes[-1]], seconds),
        ]
        parallel, batched = (
            [size * rate for rate in rates]
            for size, rates in zip((sizes[0], sizes[-1]), in_turns(sides, ROUNDS), strict=True)
        )
    speedup = estimate([ours / theirs for ours, theirs in zip(parallel, batched, strict=True)])
    return (
        ServingTimes(
            device=machine.device(),
            cores=machine.logical_cores,
            calls=tuple(calls),
            parallel_calls=callers,
            parallel_threads=counts[0],
            parallel_examples_per_s=float(np.median(parallel)),
            batch_examples_per_s=float(np.median(batched)),
            parallel_speedup=speedup.median,
            parallel_speedup_range=(speedup.least, speedup.most),
            format=format_of(path).name,
        ),
        "",
    )


def thread_times(batch_size: int, threads: tuple[int, ...], times: Sequence[Sequence[Sequence[float]]]) -> ThreadTimes:
    """Returns the record of the milliseconds of each call, for each number of threads and each round."""
    medians = [float(np.median(np.concatenate(rounds))) for rounds in times]
    best = int(np.argmin(medians))
    rounds = [[float(np.median(calls)) for calls in each] for each in times]
    beaten = [is_faster(rounds[best], other) for place, other in enumerate(rounds) if place != best]
    return ThreadTimes(
        batch_size=batch_size,
        threads=threads,
        latency_ms_median=tuple(medians),
        best_threads=threads[best] if all(beaten) else None,
    )
