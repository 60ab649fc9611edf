"""Measures an input pipeline: each stage alone, all stages together, and how long a training step waits.

A stage alone reads a sample of its inputs from memory, again and again, so its own work limits its speed. The slowest
stage alone limits the whole pipeline, apart from the processor cores that the stages share. The wait is not computed
from this: a loop takes batches and stays idle for the time of a step, as it is while a GPU works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfopt.data.epoch_order import PerEpoch
from tfopt.data.measurement.report import InputReport, StageSpeed, advise
from tfopt.data.measurement.stages import Stage, stages_of
from tfopt.data.user_data import readable
from tfopt.errors import ConfigError
from tfopt.hardware import logical_cores

# The share of the time that the stages alone, the pipeline at full speed, and the loop with steps take.
SHARES = (0.4, 0.3, 0.3)
FEWEST_STEPS = 12
# A shuffle is the slowest stage if its first batch makes up most of an epoch's waits, and takes longer than this.
SLOW_START_S = 0.1
# A sample of a stage's inputs: at most this number of elements, and of bytes, but one at least.
SAMPLE, SAMPLE_BYTES = 512, 2**26
# A stage is measured for this time at most, apart from its first output.
LONGEST_S = 2.0
LEAST_S = 0.1  # of each stage
STARTS = 4  # times the first output, which includes the start of an iterator, and must not count much
# Inputs that are counted to learn how many a stage reads for one output.
COUNTED = 64
# Stages with one output for each input.
ONE_TO_ONE = ("map", "shuffle", "zip", "scan")
# Copying so many bytes into a batch takes no noticeable time.
SMALL_BATCH = 2**16
BATCHES = ("batch", "padded batch", "map and batch")


class _Run(NamedTuple):
    """The waits for batches, in seconds, of some epochs or parts of epochs."""

    first: float  # median wait for the first batch of an epoch
    wait: float  # mean wait in the second half of an epoch, after the batches that were prepared in advance
    waits: int  # number of the waits of this mean
    examples: float  # mean number of a batch
    batches: int | None  # of an epoch; None if no epoch ended


@readable()
def measure(
    dataset: tf.data.Dataset,
    *,
    step_time_ms: float | None = None,
    step: Callable[[Any], Any] | None = None,
    seconds: float = 10.0,
) -> InputReport:
    """Measures how fast a data set of batches is, which stage limits it, and how long a training step would wait.

    Args:
        dataset: Any tf.data.Dataset of batches, such as the one given to `fit`.
        step_time_ms: Time of a training step. The processor is taken to be idle meanwhile, as it is while a GPU works.
        step: Function that is called with each batch instead, for example `model.train_on_batch`. It may compete with
            the pipeline for the processor.
        seconds: About how long to measure. A slow start of an epoch is waited for in addition.
    Raises:
        ConfigError: `dataset` is no data set, holds no batch, or comes from a tf.data service.
    Example:
        >>> batches = tf.data.Dataset.range(10_000).map(lambda n: n * n).batch(100).prefetch(2)
        >>> report = measure(batches, step_time_ms=2.0, seconds=0.5)
        >>> [stage.name for stage in report.stages], report.batches_per_epoch
        (['Range', 'map lambda', 'batch 100'], 100)
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"dataset must be a tf.data.Dataset of batches. Received: a {type(dataset).__name__}. "
            "tfopt.data.pipeline makes one of arrays and of examples."
        )
    if getattr(dataset, "runs_elsewhere", False):
        raise ConfigError(
            "measure needs a pipeline of this process. Received: the batches of a tf.data service, whose stages run in "
            "its workers. Measure the pipeline without service, on a host of the service."
        )
    for_stages, full_speed, with_steps = (share * seconds for share in SHARES)
    # `dataset` keeps its name: TensorFlow frees the functions of a data set together with it, and the stages call them.
    epoch = dataset.of_epoch(0) if isinstance(dataset, PerEpoch) else dataset
    stages: list[Stage] = []
    why_none = ""
    try:
        stages = list(stages_of(epoch).walk())
    except (tf.errors.OpError, ValueError) as error:  # ValueError: the graph is larger than 2 GiB
        why_none = " ".join(str(error).split())[:200]
    measured = [stage for stage in stages if not stage.is_passive]
    if any(stage.kind == "cache" for stage in stages):
        for _ in _for(epoch, 3 * seconds):  # a cache gives its elements after one epoch; a long one is left
            pass
    free = _run(epoch, full_speed, lambda batch: None)
    cardinality = int(epoch.cardinality())
    batches = cardinality if cardinality >= 0 else free.batches
    waiting = None
    if step is not None or step_time_ms is not None:
        idle = (step_time_ms or 0.0) / 1e3
        waiting = _run(epoch, with_steps, step if step is not None else lambda batch: time.sleep(idle))
    speeds = _stage_speeds(stages, free.examples, for_stages) if measured else []
    slowest = _slowest(measured, speeds, free if waiting is None else waiting, batches)
    unavailable = {} if speeds else {"stages": why_none}
    if waiting is None:
        unavailable["wait_ms"] = "step_time_ms was not given"
    report = InputReport(
        stages=speeds,
        examples_per_second=free.examples / max(free.wait, 1e-9),
        batch_ms=free.wait * 1e3,
        first_batch_ms=free.first * 1e3,
        batches_per_epoch=batches,
        slowest=slowest.name if slowest is not None else "unknown",
        step_time_ms=step_time_ms,
        wait_ms=None if waiting is None else waiting.wait * 1e3,
        wait_of_first_ms=None if waiting is None else waiting.first * 1e3,
        unavailable=unavailable,
        cores=logical_cores(),
    )
    return advise(report, slowest, stages)


def _run(dataset: tf.data.Dataset, seconds: float, step: Callable[[Any], Any]) -> _Run:
    """Takes batches for some seconds, epoch after epoch, with a step after each, and notes the waits."""
    first: list[float] = []
    steady: list[float] = []
    examples = count = 0
    ended: int | None = None
    end = None
    while end is None or time.perf_counter() < end:
        waits: list[float] = []
        start = time.perf_counter()
        iterator = iter(dataset)
        while True:
            batch = next(iterator, None)
            now = time.perf_counter()
            if batch is None:
                ended = len(waits)
                break
            waits.append(now - start)
            end = now + seconds if end is None else end  # the start of the first epoch is not counted
            examples += _length(batch)
            count += 1
            step(batch)
            start = time.perf_counter()
            if start > end and len(waits) > FEWEST_STEPS:
                break
        if not waits:
            raise ConfigError(
                "dataset must hold at least one batch. Received: a data set without any. Check its files and filters."
            )
        first.append(waits[0])
        steady += waits[max(1, len(waits) // 2) :] or waits
    median = sorted(first)[len(first) // 2]
    return _Run(median, sum(steady) / len(steady), len(steady), examples / count, ended)


def _slowest(stages: list[Stage], speeds: list[StageSpeed], run: _Run, batches: int | None) -> Stage | None:
    """Returns the stage that limits the speed. A shuffle does if its buffer takes most of the waiting to fill."""
    known = [pair for pair in zip(stages, speeds, strict=True) if not pair[1].only_first_epoch]
    by_stage = dict(known)
    later = run.wait * ((batches if batches is not None else run.waits) - 1)
    for stage, speed in known:
        before = [by_stage[inner] for inner in stage.walk() if inner is not stage and inner in by_stage]
        if stage.kind == "shuffle" and stage.size and before:
            fill = stage.size / speed.outputs_per_batch * max(each.batch_ms for each in before) / 1e3
            if run.first > max(SLOW_START_S, later) and fill > run.first / 2:
                return stage
    return max(known, key=lambda pair: pair[1].batch_ms)[0] if known else None


def _length(batch: Any) -> int:
    """Returns the number of examples of a batch; 1 if its elements have no axes."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return int(first.nrows())
    return int(first.shape[0]) if first.shape.rank else 1


def _stage_speeds(every: list[Stage], examples: float, seconds: float) -> list[StageSpeed]:
    """Returns the speed of each stage alone, without those that only hand elements on.

    Args:
        every: All stages, the sources first.
        examples: Mean number of examples of an element of the last stage.
        seconds: About how long to measure all stages.
    """
    stages = [stage for stage in every if not stage.is_passive]
    share = max(seconds / len(stages), LEAST_S)
    samples: dict[int, tf.data.Dataset] = {}
    rates: dict[int, float] = {}
    for stage in stages:
        feeds = [samples[id(each)] for each in _active_inputs(stage)]
        rates[id(stage)], size = _rate(stage, feeds, share)
        samples[id(stage)] = _sample(stage, feeds, rates[id(stage)], size, share)
    per_batch = {id(stages[-1]): 1.0}  # elements of each stage for one batch
    for stage in reversed(stages):
        inputs = _active_inputs(stage)
        reads = _inputs_per_output(stage, [samples[id(each)] for each in inputs], share) if inputs else 1.0
        for each in inputs:
            per_batch[id(each)] = per_batch[id(stage)] * reads
    kept = {id(inner) for stage in every if stage.kind == "cache" for inner in stage.walk()}
    return [
        StageSpeed(
            name=stage.name,
            examples_per_second=rates[id(stage)] / per_batch[id(stage)] * examples,
            batch_ms=1e3 * per_batch[id(stage)] / rates[id(stage)],
            outputs_per_batch=per_batch[id(stage)],
            only_first_epoch=id(stage) in kept,
        )
        for stage in stages
    ]


def _active_inputs(stage: Stage) -> list[Stage]:
    """Returns the stages that a stage reads, without those between that only hand elements on."""
    return [inner for each in stage.inputs for inner in (_active_inputs(each) if each.is_passive else [each])]


def _rate(stage: Stage, feeds: list[tf.data.Dataset], seconds: float) -> tuple[float, int]:
    """Returns the outputs per second of a stage, and the bytes of one output."""
    outputs = stage.alone([feed.repeat() for feed in feeds])
    if not stage.inputs:
        outputs = outputs.repeat()
    size = _bytes(next(iter(outputs), ()))
    if stage.kind in BATCHES and (size > SMALL_BATCH or stage.kind == "map and batch"):
        # `skip` right behind a batch skips its inputs, and makes no batch. The filter prevents that. It takes 20 us.
        outputs = outputs.filter(lambda *element: True)
    count, start, first = 1, 0.0, 0.0
    while True:
        begin = time.perf_counter()
        element = next(iter(outputs.skip(count - 1)), None)  # in TensorFlow: a loop in Python would be slower than most
        elapsed = time.perf_counter() - begin
        if element is None:
            return float("inf"), 0
        if count == 1:
            first = elapsed
            start = elapsed if stage.kind == "shuffle" else 0.0  # its buffer has been filled
        enough = min(max(seconds, STARTS * first), LONGEST_S)
        if ((count > 1 or first > LONGEST_S) and elapsed - start >= enough) or count > 10_000_000:
            return count / max(elapsed - start, 1e-9), size
        count = max(2 * count, min(8 * count, int(1.2 * count * enough / max(elapsed - start, 1e-4))))


def _bytes(element: Sequence[tf.Tensor]) -> int:
    return sum(each.dtype.size * int(tf.size(each)) for each in element if each.dtype != tf.variant)


def _sample(stage: Stage, feeds: list[tf.data.Dataset], rate: float, size: int, seconds: float) -> tf.data.Dataset:
    """Returns some outputs of a stage, in memory."""
    if stage.kind == "shuffle":
        return feeds[0]
    count = int(max(1, min(SAMPLE, rate * seconds, SAMPLE_BYTES / max(size, 1))))
    sample = stage.alone([feed.repeat() for feed in feeds]).take(count).cache()
    for _ in sample:  # a cache is only there after a whole pass
        pass
    return sample


def _inputs_per_output(stage: Stage, samples: list[tf.data.Dataset], seconds: float) -> float:
    """Returns the number of inputs that a stage reads for one output."""
    if stage.kind in ONE_TO_ONE:
        return 1.0
    if stage.kind in BATCHES and stage.size is not None:
        return float(stage.size)
    read = len(list(samples[0].take(COUNTED)))
    outputs = sum(1 for _ in _for(stage.alone([sample.take(COUNTED) for sample in samples]), 4 * seconds))
    return read / max(outputs, 1)


def _for(dataset: tf.data.Dataset, seconds: float) -> Iterator[object]:
    end = time.perf_counter() + seconds
    for element in dataset:
        yield element
        if time.perf_counter() > end:
            return
