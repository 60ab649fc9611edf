"""Times the data set of a training alone, and builds it again without the work of a stage."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.data.epoch_order import PerEpoch
from tfopt.data.measurement.measure import measure
from tfopt.data.measurement.report import InputReport
from tfopt.data.measurement.stages import Stage, continued, stages_of, up_to
from tfopt.diagnosis.experiments import CannotMeasureError, measurable
from tfopt.timing import in_turns, seconds_of

SECONDS = 1.0
FEWEST = 4
# So many batches fit in memory beside everything else.
SAMPLE = 16


@dataclass(kw_only=True)
class InputTime:
    """What a data set costs without a training."""

    # The data set. While it lives, TensorFlow keeps the functions of its stages.
    dataset: tf.data.Dataset
    batch_ms: float  # milliseconds for a batch
    batch_cpu_ms: float  # those of the processor in all threads
    report: InputReport  # the speed of each stage
    stages: list[Stage]  # the stages, the sources first

    def slowest(self) -> Stage | None:
        """Returns the stage that limits the speed."""
        return next((stage for stage in self.stages if stage.name == self.report.slowest), None)

    def alone_ms(self, stage: Stage) -> float:
        """Returns the milliseconds per batch of a stage alone."""
        return next((each.batch_ms for each in self.report.stages if each.name == stage.name), 0.0)

    @property
    def has_cache(self) -> bool:
        """Whether a stage keeps its elements from the first epoch."""
        return any(each.kind.startswith("cache") for each in self.stages)

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def without_work(self, stage: Stage) -> tf.data.Dataset:
        """Returns the pipeline without the work of a stage and of all before it: a sample of its outputs is in memory.

        The pipeline has no end.
        """
        per_batch = next((each.outputs_per_batch for each in self.report.stages if each.name == stage.name), 1.0)
        batches = min(max(1e3 * SECONDS / max(self.batch_ms, 1e-3), FEWEST), SAMPLE)
        sample = up_to(stage).take(math.ceil(batches * per_batch)).cache()
        for _ in sample:  # a cache is only there after a whole pass
            pass
        return continued(stage, self.last, sample.repeat())


def smaller_buffer(found: InputTime, smaller: int) -> tf.data.Dataset:
    """Returns a pipeline whose shuffle has a smaller buffer: 16 is a sixteenth."""
    shuffle = next(each for each in found.stages if each.kind == "shuffle")
    buffer = max((shuffle.size or 1) // smaller, 1)
    with measurable():
        return continued(shuffle, found.last, up_to(shuffle.inputs[0]).shuffle(buffer))


def start_saved(before: tf.data.Dataset, after: tf.data.Dataset, fill: int = 0) -> float:
    """Returns the share of the wait for the first batch that another pipeline saves.

    Before that, `fill` batches of each are read, so that caches are full.
    """
    pipelines = (before, after)
    with measurable():
        for each in pipelines if fill else ():
            _fill(each, fill)
        starts = in_turns([partial(seconds_of, partial(_first_batch, each)) for each in pipelines], FEWEST)
    first, other = map(statistics.median, starts)
    return max(1 - other / first, 0.0)


def _first_batch(dataset: tf.data.Dataset) -> Any:
    return next(iter(dataset))


def _fill(dataset: tf.data.Dataset, batches: int) -> None:
    """Reads an epoch, which fills a cache, as far as that takes no more than some seconds."""
    begin = time.perf_counter()
    for number, _ in enumerate(dataset):
        if number + 1 >= batches or time.perf_counter() - begin > 3 * SECONDS:
            return


def input_time(data: Any) -> InputTime:
    """Times a tf.data.Dataset of batches alone. Raises CannotMeasureError for other data."""
    if not isinstance(data, tf.data.Dataset):
        raise CannotMeasureError(f"the data is a {type(data).__name__}, whose stages cannot be seen")
    dataset = data.of_epoch(0) if isinstance(data, PerEpoch) else data
    with measurable():
        batch_ms, batch_cpu_ms = _read(dataset)
        report = measure(dataset, seconds=2 * SECONDS)
        stages = list(stages_of(dataset).walk())
        return InputTime(dataset=dataset, batch_ms=batch_ms, batch_cpu_ms=batch_cpu_ms, report=report, stages=stages)


def _read(dataset: tf.data.Dataset) -> tuple[float, float]:
    """Reads batches for about a second, after the first ones, which fill buffers and caches.

    Returns the milliseconds for a batch, and those of the processor in all threads.
    """
    iterator = iter(dataset.repeat())
    for _ in range(SAMPLE if dataset.cardinality() == tf.data.INFINITE_CARDINALITY else 2):
        next(iterator)
    begin, cpu, count = time.perf_counter(), time.process_time(), 0
    while count < FEWEST or time.perf_counter() - begin < SECONDS:
        next(iterator)
        count += 1
        if time.perf_counter() - begin > 10 * SECONDS:
            break
    elapsed, used = time.perf_counter() - begin, time.process_time() - cpu
    return 1e3 * elapsed / count, 1e3 * used / count
