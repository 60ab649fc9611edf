"""Finds by measurement what a server should set for a model: the batch size, the calls at the same time, the threads.

A runtime can use all cores in two ways: one call whose kernels are split over all threads, or several calls at the same
time on fewer threads each. Which of them computes more examples in a second depends on the model and on the batch. So
every batch size is measured on every number of threads, with as many calls at the same time as give all cores work.

Each number of threads has a process of its own, and all of them take turns. The knee of the curve decides, as it does
for the batch of a training (tfopt/report/knee.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt

from tfopt.atomic.directories import check_target
from tfopt.atomic.scratch import scratch_directory
from tfopt.errors import ArtifactError, ExportError
from tfopt.exporting.formats import SAVED_MODEL
from tfopt.exporting.publishing import tensorflow_serving, triton
from tfopt.exporting.serving_settings import write_tuned
from tfopt.exporting.verification.bench import (
    PAUSE_S,
    ROUNDS,
    BatchSizes,
    OpenSize,
    Seconds,
    candidates,
    cautions,
    given_inputs,
    running,
)
from tfopt.exporting.verification.candidate import Candidate
from tfopt.exporting.verification.process import RuntimeProcess
from tfopt.exporting.verification.threads import thread_times
from tfopt.exporting.verification.verify import OnStep
from tfopt.hardware import Hardware, detect
from tfopt.report import FastestServed, ServedModel, ServingReport, ThreadTimes, TunedServing
from tfopt.report.knee import is_decided, knee
from tfopt.report.serving import flags
from tfopt.report.serving_report import fastest_of
from tfopt.report.tuned_serving import by_batch_size, calls_on, tuned
from tfopt.settings.validation import check_value
from tfopt.timing import in_turns

TURNS = 15
FEWEST = 3  # turns, however long they take
Threads = tuple[Annotated[int, Ge(1)], ...]
Limit = Annotated[float, Gt(0)]


def tune_serving(
    models: str | Path | Sequence[str | Path],
    *,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    threads: Sequence[int] = (),
    inputs: Any = None,
    open_size: int | None = None,
    seconds: float = 0.1,
    limit_s: float = 300.0,
    write: bool = True,
    trusted: bool = False,
    on_step: OnStep = lambda words: None,
) -> ServingReport:
    """Finds the batch size, the calls at the same time and the threads that a server should set for a model.

    They are written into the manifest of an artifact, with the name of the processor, and `tfopt.publish` tells servers
    of them. Of several models it also finds the fastest: each is timed with its own settings, in turns. Their scores
    are not compared; `tfopt.benchmark` does that.

    Args:
        models: An artifact of `tfopt.export` in any format, or another model that `tfopt.benchmark` takes; or several
            of them, such as the float32, int8 and ONNX forms of one model.
        batch_sizes: Numbers of examples in a call. A model with a fixed batch size has only calls of that size.
        threads: Numbers of intra-op threads. Empty means 1, 2, 4 and so on up to the number of cores.
        inputs, open_size, trusted: As in `tfopt.benchmark`.
        seconds: How long each batch size is timed on each number of threads in one turn.
        limit_s: The seconds after which no further turn of a model begins, once there were three. Turns end earlier if
            they tell the batch sizes apart, and after 15.
        write: Whether to write the settings into the manifests. A model without a manifest stays as it is.
        on_step: Is called with a few words when a step begins.
    Returns: A report. `report.models[0].tuned` has the settings of the first model.
    Raises:
        ConfigError: A setting is out of range, or the inputs do not fit.
        ArtifactError: A path does not exist, or no model could be measured. The message has the reasons.
        ExportError: The manifest of an artifact cannot be written. Nothing was measured then.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.export import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> artifact = export(model, tempfile.mkdtemp() + "/tiny")
        >>> report = tune_serving(artifact.path, batch_sizes=(1, 8), threads=(1,), seconds=0, limit_s=0.01)
        >>> report.models[0].written, [each.batch_size for each in report.models[0].tuned.curve]
        (True, [1, 8])
    """
    start = time.monotonic()
    machine = detect()
    sizes = tuple(sorted(set(check_value("batch_sizes", batch_sizes, BatchSizes))))
    asked = check_value("threads", threads, Threads) or _powers(machine.logical_cores)
    counts = tuple(sorted({min(count, machine.logical_cores) for count in asked}))
    check_value("open_size", open_size, OpenSize)
    check_value("seconds", seconds, Seconds)
    check_value("limit_s", limit_s, Limit)
    found, given = candidates(models, trusted), given_inputs(inputs)
    results: dict[Candidate, TunedServing] = {}
    with scratch_directory() as directory:
        for number, each in enumerate(found):
            with each.noting_failure():
                each.open(directory / str(number))
            if write and each.manifest is not None:
                check_target(each.path.resolve())
        for each in sorted(running(found), key=lambda each: each.manifest is None):  # artifacts know their inputs
            on_step(f"timing {each.path}")
            with each.noting_failure(), ExitStack() as stack:
                each.start(stack, counts)
                each.choose_inputs([other for other in results if other is not each], given, open_size)
                each.make_batches(sizes if each.fixed_batch_size is None else (each.fixed_batch_size,))
                results[each] = _tune(each, machine, seconds, limit_s)
        if not results:
            reasons = " ".join(f"{each.name}: {each.failure}" for each in found)
            raise ArtifactError(
                f"At least one model must run. Received: {len(found)} that cannot be measured. {reasons}"
            )
        fastest: tuple[FastestServed, ...] = ()
        if len(results) > 1:
            on_step(f"timing {', '.join(str(each.path) for each in results)} in turns")
            fastest = _compare(results, seconds)
    rows = tuple(_row(each, results.get(each), write) for each in found)
    return ServingReport(
        device=next(each.device for each in results.values()),
        cores=machine.logical_cores,
        models=rows,
        fastest=fastest,
        warnings=tuple(cautions(running(found))) if running(found) else (),
        seconds=time.monotonic() - start,
    )


def _powers(cores: int) -> tuple[int, ...]:
    return (*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores)


def _tune(each: Candidate, machine: Hardware, seconds: float, limit_s: float) -> TunedServing:
    """Measures a model whose processes wait, and returns what a server should set for it."""
    cores, start = machine.logical_cores, time.monotonic()
    sides = {
        (size, count): partial(_examples_per_s, process, batch, seconds, calls_on(count, cores))
        for size, batch in each.batches.items()
        for count, process in each.processes.items()
    }

    def is_enough(turns: Sequence[Sequence[float]]) -> bool:
        late = time.monotonic() - start > limit_s and len(turns) >= FEWEST
        so_far = dict(zip(sides, zip(*turns, strict=True), strict=True))
        return late or is_decided(by_batch_size(so_far))

    rates = dict(zip(sides, in_turns(list(sides.values()), TURNS, is_enough), strict=True))
    on_gpu = "GPU" in each.loaded["devices"]
    found = tuned(
        rates,
        [_alone(each, size, seconds) for size in sorted({min(each.batches), knee(by_batch_size(rates))})],
        device=machine.device(on_gpu),
        on_gpu=on_gpu,
        cores=cores,
        format=_format(each),
        runtime=each.loaded["runtime"],
    )
    return replace(found, settings=_settings(found))


def _examples_per_s(process: RuntimeProcess, batch: dict[str, np.ndarray], seconds: float, calls: int) -> float:
    time.sleep(PAUSE_S)
    return len(next(iter(batch.values()))) * process.calls_per_second(batch, seconds, calls)


def _alone(each: Candidate, size: int, seconds: float) -> ThreadTimes:
    """Times calls one after the other on each number of threads."""
    sides = [partial(each.time, size, count, seconds, PAUSE_S) for count in each.processes]
    rounds = in_turns(sides, ROUNDS)
    if each.failure:  # which `time` has noted
        raise ArtifactError(each.failure)
    return thread_times(size, tuple(each.processes), rounds)


def _format(each: Candidate) -> str:
    """Returns the format of what its processes load. A .keras file has become a SavedModel."""
    return next(iter(each.processes.values())).format.name


def _settings(found: TunedServing) -> dict[str, tuple[str, ...]]:
    """Returns the lines for the runtime and for the servers that read its format."""
    best = found.many_requests
    lines: dict[str, tuple[str, ...]] = {"runtime": (flags(found.format, best),)}
    if found.format == SAVED_MODEL and best.batches_pay:
        lines["TensorFlow Serving"] = tuple(tensorflow_serving.batching(best, best.batch_size))
    if found.format in triton.BACKENDS:
        lines["Triton"] = (triton.batching(best), *triton.instances(best, found.format))
    return lines


def _compare(results: Mapping[Candidate, TunedServing], seconds: float) -> tuple[FastestServed, ...]:
    """Times several models in turns, each with its own settings, and each alone with the fewest examples."""
    with ExitStack() as stack:
        many, one = {}, {}
        for each, its in results.items():
            with each.noting_failure():
                single = its.alone[0]
                alone = single.best_threads or single.threads[int(np.argmin(single.latency_ms_median))]
                each.processes.clear()
                each.start(stack, sorted({its.threads, alone}))
                batch, least = each.batches[its.batch_size], each.batches[single.batch_size]
                many[each] = partial(_rate, each, each.processes[its.threads], batch, seconds, its.calls)
                one[each] = partial(_rate, each, each.processes[alone], least, seconds, 1)
        rates = {
            requests: dict(zip(sides, in_turns(list(sides.values()), ROUNDS), strict=True))
            for requests, sides in (("many requests", many), ("one request", one))
            if sides
        }
    return tuple(
        fastest_of(requests, {each.name: found for each, found in of.items() if not each.failure})
        for requests, of in rates.items()
        if len(running(list(of))) > 1
    )


def _rate(each: Candidate, process: RuntimeProcess, batch: dict[str, np.ndarray], seconds: float, calls: int) -> float:
    """Returns the examples in a second of one turn; NaN after a failure, which is noted."""
    found = math.nan
    if not each.failure:
        with each.noting_failure():
            found = _examples_per_s(process, batch, seconds, calls)
    return found


def _row(each: Candidate, found: TunedServing | None, write: bool) -> ServedModel:
    """Returns the record of a model. Writes its settings into its manifest, if there is one."""
    written, reason = False, ""
    if found is not None and each.manifest is None:
        reason = "it has no manifest, which only artifacts of tfopt.export have"
    elif not write:
        reason = "as asked"
    elif found is not None and each.manifest is not None and not each.failure:
        try:
            write_tuned(each.path, each.manifest, found)
            written = True
        except (ArtifactError, ExportError) as error:
            each.failure = " ".join(str(error).split())
    return ServedModel(
        name=each.name,
        path=str(each.path),
        format=each.format,
        precision=None if each.manifest is None else each.manifest.precision,
        tuned=found,
        written=written,
        not_written=reason or each.failure,
        failure=each.failure,
    )
