"""Says what to change in a pipeline that makes the training wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tfopt.data.measurement.report import InputReport
from tfopt.data.measurement.stages import Stage

# Waiting below this share of a step's time is not worth a change.
WORTH_A_CHANGE = 0.05
# Taking a batch that is ready costs a loop in Python up to this. Keras' fit takes batches inside TensorFlow.
CALL_MS = 1.0
FASTER = 3
READING = ("TFRecord files", "text files", "record files", "interleave", "cache on disk")


def advise(report: InputReport, slowest: Stage | None, stages: list[Stage]) -> InputReport:
    """Returns the report with advice."""
    share = report.wait_share
    if share is not None and share < WORTH_A_CHANGE and not _starts_slowly(report):
        return replace(report, advice=(f"none: a step waits for its batch for {share:.1%} of the time",))
    if _is_ready_in_time(report):
        words = "none: the pipeline is much faster than the step; the wait is what taking a batch in Python costs"
        return replace(report, advice=(words,))
    if slowest is None:
        return report
    return replace(report, advice=tuple(_changes(report, slowest, stages)))


def _is_ready_in_time(report: InputReport) -> bool:
    """Whether a wait comes from the call that takes a batch, and not from the pipeline, which is much faster."""
    if report.wait_ms is None or report.step_time_ms is None or _starts_slowly(report):
        return False
    return report.wait_ms < CALL_MS and FASTER * report.batch_ms < report.step_time_ms


def _starts_slowly(report: InputReport) -> bool:
    """Whether the first batch of an epoch takes a good part of it."""
    if report.wait_of_first_ms is None or report.step_time_ms is None or not report.batches_per_epoch:
        return False
    return report.wait_of_first_ms > WORTH_A_CHANGE * report.step_time_ms * report.batches_per_epoch


def _changes(report: InputReport, slowest: Stage, stages: list[Stage]) -> Iterator[str]:
    name = slowest.name
    if slowest.kind == "shuffle":
        yield (
            f"{name}: an epoch begins when this buffer is full, after {report.first_batch_ms:,.0f} ms. Shuffle before "
            "the examples are decoded, when they are file names or encoded images, or make the buffer smaller"
        )
        return
    if slowest.calls_python or slowest.kind == "generator":
        yield (
            f"{name} runs Python, one call at a time. Write it in TensorFlow, or convert the examples once to TFRecord "
            "files: tfopt data convert"
        )
    elif slowest.is_serial and slowest.kind == "map":
        yield f"{name} runs one call at a time: map(..., num_parallel_calls=tf.data.AUTOTUNE)"
    elif slowest.is_serial and slowest.kind in ("interleave", "flat_map"):
        yield f"{name} reads one input at a time: interleave(..., num_parallel_calls=tf.data.AUTOTUNE)"
    elif slowest.is_serial and slowest.kind == "filter":
        yield f"{name} runs one call at a time: compute its condition in a parallel map before it"
    elif slowest.kind in READING:
        yield f"{name} reads slowly: put the files on a faster disk, or read several at a time"
    elif slowest.kind in ("batch", "padded batch"):
        yield f"{name} copies examples: make them smaller, with uint8 images that are cast after batching"
    if any(inner.kind == "Random" for inner in slowest.walk()):
        yield f"{name} changes examples at random: if there is a GPU, augment there, where='device'"
    elif not any(stage.kind in ("cache", "cache on disk", "arrays in memory") for stage in stages):
        yield "keep the decoded examples after the first epoch: cache='memory', or cache='disk' with a cache_dir"
    if not any(stage.node.op.startswith("Prefetch") for stage in stages[-3:]):
        yield "prepare batches while a step runs: end the pipeline with prefetch(2)"
    if not (slowest.calls_python or slowest.kind == "generator"):
        yield f"use more than these {report.cores} processor cores, on this machine or through a tf.data service"
