"""Measures each stage of a pipeline alone, with a sample of its inputs in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfopt.data.measurement.report import StageSpeed
from tfopt.data.measurement.stages import Stage

# A sample of a stage's inputs: at most this number of elements, and of bytes, but one at least.
SAMPLE, SAMPLE_BYTES = 512, 2**26
# Inputs that are counted to learn how many a stage reads for one output.
COUNTED = 64
# Stages with one output for each input.
ONE_TO_ONE = ("map", "shuffle", "zip", "scan")
# Copying so many bytes into a batch takes no noticeable time.
SMALL_BATCH = 2**16
BATCHES = ("batch", "padded batch", "map and batch")


def stage_speeds(pipeline: list[Stage], examples: float, seconds: float) -> list[StageSpeed]:
    """Returns the speed of each stage alone, without those that only hand elements on.

    Args:
        pipeline: The stages of a pipeline, the sources first.
        examples: Mean number of examples of an element of the last stage.
        seconds: About how long to measure all stages.
    """
    stages = [stage for stage in pipeline if not stage.is_passive]
    share = max(seconds / len(stages), 0.1)
    samples: dict[int, tf.data.Dataset] = {}
    rates: dict[int, float] = {}
    for stage in stages:
        feeds = [samples[id(each)] for each in active_inputs(stage)]
        rates[id(stage)], size = _rate(stage, feeds, share)
        samples[id(stage)] = _sample(stage, feeds, rates[id(stage)], size, share)
    per_batch = {id(stages[-1]): 1.0}  # elements of each stage for one batch
    for stage in reversed(stages):
        inputs = active_inputs(stage)
        reads = _inputs_per_output(stage, [samples[id(each)] for each in inputs], share) if inputs else 1.0
        for each in inputs:
            per_batch[id(each)] = per_batch[id(stage)] * reads
    kept = {id(inner) for stage in pipeline if stage.kind == "cache" for inner in stage.walk()}
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


def active_inputs(stage: Stage) -> list[Stage]:
    """Returns the stages that a stage reads, without those between that only hand elements on."""
    return [inner for each in stage.inputs for inner in (active_inputs(each) if each.is_passive else [each])]


def _rate(stage: Stage, feeds: list[tf.data.Dataset], seconds: float) -> tuple[float, int]:
    """Returns the outputs per second of a stage, and the bytes of one output."""
    outputs = stage.alone([feed.repeat() for feed in feeds])
    if not stage.inputs:
        outputs = outputs.repeat()
    size = _bytes(next(iter(outputs), ()))
    if stage.kind in BATCHES and (size > SMALL_BATCH or stage.kind == "map and batch"):
        # `skip` right behind a batch skips its inputs, and makes no batch. The filter prevents that. It takes 20 us.
        outputs = outputs.filter(lambda *element: True)
    count, start = 1, 0.0
    while True:
        begin = time.perf_counter()
        element = next(iter(outputs.skip(count - 1)), None)  # in TensorFlow: a loop in Python would be slower than most
        elapsed = time.perf_counter() - begin
        if element is None:
            return float("inf"), 0
        if count == 1 and stage.kind == "shuffle":
            start = elapsed  # its buffer has been filled
        if elapsed - start >= seconds or count > 10_000_000:
            return count / max(elapsed - start, 1e-9), size
        count = max(2 * count, min(8 * count, int(1.2 * count * seconds / max(elapsed - start, 1e-4))))


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
