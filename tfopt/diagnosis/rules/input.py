"""Rules for the input: the step waits for its batch, or shares the processor with what makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt.data.epoch_order import PerEpoch
from tfopt.data.measurement.stages import Stage, in_float32, in_parallel
from tfopt.diagnosis.experiments import CannotMeasureError
from tfopt.diagnosis.input_time import InputTime, smaller_buffer, start_saved
from tfopt.diagnosis.measured import AbsentError, Measured, comes_from_python, is_worth, share
from tfopt.report import Diagnosis

# Waiting for less than this share of the step is not worth a change.
WAITS = 0.1
# A first batch that takes less is the start of an iterator.
SLOW_START_MS = 30.0
# A shorter wait may be what taking a batch in Python costs.
LEAST_MS = 0.5
# A buffer of this part of its size still mixes well, and fills sooner.
SMALLER_BUFFER = 16
# A buffer that fills in more than the rest of this share of the time is not what the first batch waits for.
SOONER = 0.3
# tfopt augments batches at least so many times as fast as Keras' layers on a processor (docs/pipeline.md).
BATCHED = 3
# A stage that takes less of the time of a batch is not what makes it slow.
COMPUTING = 0.2
COMPUTES = ("map", "map and batch", "filter", "interleave", "flat_map", "TFRecord files", "text files", "record files")
IMAGES = (3, 4)  # axes of an image, and of a batch of images
MIXES = ("shuffle", "batch", "padded batch")
AUTOTUNE = tf.data.AUTOTUNE
KEEPS = ("cache", "cache on disk", "arrays in memory")


def slow_generator(measured: Measured) -> Diagnosis | str:
    """The batches come from Python, one at a time."""
    data = measured.observation.data
    source = _python_source(data, measured)
    if source is None:
        return "the data does not come from Python code"
    workers = int(getattr(data, "workers", 1) or 1)
    how = "one at a time" if workers == 1 else f"with {workers} workers"
    advice = (
        "Write the examples once to TFRecord files (tfopt data convert), or keep them in arrays and use "
        "tf.data.Dataset.from_tensor_slices"
    )
    if isinstance(data, keras.utils.PyDataset) and not data.use_multiprocessing:
        advice += f". Or give the PyDataset workers={max(4, 2 * workers)}, use_multiprocessing=True"
    title = f"{source} makes the batches in Python, {how}"
    if comes_from_python(data):
        return _of_input(measured, "python_generator", title, measured.gain_of_arrays, advice)
    return _of_input(measured, "python_generator", title, _without(measured, _limiting(measured)[0]), advice)


def full_shuffle(measured: Measured) -> Diagnosis | str:
    """Each epoch begins with filling a large shuffle buffer."""
    wait = measured.start_ms
    per_epoch = wait * measured.batches_per_epoch
    if share(wait, measured.breakdown.whole_ms) < WAITS or per_epoch < SLOW_START_MS:
        return f"the first batch of an epoch costs {wait:.3g} ms per step"
    found = _input(measured)
    stage = next((each for each in found.stages if each.kind == "shuffle"), None)
    if stage is None:
        return "there is no shuffle"
    size, parts = stage.size or 0, measured.breakdown
    one, other = smaller_buffer(found, 1), smaller_buffer(found, SMALLER_BUFFER)
    saved = start_saved(one, other, measured.batches_per_epoch if found.has_cache else 0)
    if saved < SOONER:
        return f"a buffer of a {SMALLER_BUFFER}th of its size would fill in {1 - saved:.0%} of the time"
    gain = measured.gain_of_input("smaller buffer", lambda found: other)
    new = max(parts.step_ms - parts.input_ms, found.batch_ms)  # a smaller buffer does not make batches sooner
    return Diagnosis(
        cause="shuffle_buffer",
        title=f"every epoch begins with filling a shuffle buffer of {size:,} elements",
        evidence=f"the first batch of an epoch takes {per_epoch:,.0f} ms longer than the others",
        gain=min(gain, share(parts.step_ms - new, parts.step_ms)),
        advice="shuffle file names or encoded examples before they are decoded, or "
        f"shuffle(buffer_size={max(size // SMALLER_BUFFER, 1)}), which mixes less",
        settings={"data.shuffle_buffer": max(size // SMALLER_BUFFER, 1)},
        changes_training=True,
    )


def short_epochs(measured: Measured) -> Diagnosis | str:
    """Each epoch begins with a new iterator, and is too short for that."""
    parts, batches, data = measured.breakdown, measured.batches_per_epoch, measured.observation.data
    # A step of an epoch of one batch begins with the iterator too.
    start = measured.start_ms if batches > 1 else parts.step_ms - measured.call_ms - parts.build_ms - parts.callbacks_ms
    used = share(start, parts.whole_ms)
    if used < WAITS:
        return f"the starts of epochs take {used:.1%} of the time"
    if isinstance(data, tf.data.Dataset) and _finds(full_shuffle, measured):
        return "the first batch waits for the buffer of the shuffle; see shuffle_buffer"
    if comes_from_python(data):
        advice = "more batches in an epoch: Python starts its threads or its generator again in each"
    else:
        advice = (
            f"one iterator for all epochs: fit(data.repeat(), steps_per_epoch={batches}), with data a tf.data.Dataset"
        )
    return Diagnosis(
        cause="short_epochs",
        title=f"the epochs are short, of {batches:,} batches, and each begins with a new iterator",
        evidence=f"the start of an epoch takes {start * batches:,.3g} ms, {used:.0%} of the time "
        f"(threshold {WAITS:.0%})",
        gain=used,
        advice=advice,
    )


def wide_dtype(measured: Measured) -> Diagnosis | str:
    """The pipeline computes in 64 bits what the model takes in 32."""
    stage, _ = _limiting(measured)
    if not _is_wide(stage):
        return f"{stage.name} does not compute in float64"
    return _of_input(
        measured, "float64", f"{stage.name} computes in float64 on the host",
        lambda: measured.gain_of_input("float32", lambda found: in_float32(found.last)),
        "cast to tf.float32 before computing: tf.cast(image, tf.float32). The model computes in float32",
    )  # fmt: skip


def slow_map(measured: Measured) -> Diagnosis | str:
    stage, _ = _limiting(measured)
    if stage.kind == "generator":
        return f"{stage.name} makes the batches in Python; see python_generator"
    gain = _without(measured, stage)
    if stage.calls_python:
        words = f"{stage.name} runs Python code, one call at a time"
        advice = "write it in TensorFlow, or convert the examples once"
    elif not stage.is_serial:
        return f"{stage.name} runs in parallel"
    elif stage.changes_state:
        words = f"{stage.name} changes state, one call at a time"
        advice = "keep state out of the map: several calls at a time would change it in any order"
    else:
        cores = measured.hardware.logical_cores
        words = f"{stage.name} handles one element at a time on a machine with {cores} cores"
        advice = f"{stage.kind}(..., num_parallel_calls=tf.data.AUTOTUNE)"
        if not _ends_with_prefetch(_input(measured)):
            advice += " and .prefetch(tf.data.AUTOTUNE) at the end"
        gain = _without(measured, stage, 1 - 1 / cores)
        if stage.kind == "map":
            gain = partial(
                measured.gain_of_input, "parallel", lambda found: in_parallel(stage, found.last).prefetch(AUTOTUNE)
            )
    return _of_input(measured, "slow_map", words, gain, advice)


def host_augmentation(measured: Measured) -> Diagnosis | str:
    """The processor changes examples at random, which the GPU could do."""
    stage, _ = _limiting(measured)
    if not stage.is_random:
        return f"{stage.name} draws no random numbers"
    on_gpu = bool(measured.hardware.gpus)
    on_device = (
        "augment on the device: tfopt.compile(..., augment=tfopt.data.AugmentConfig(...)), or a Keras layer such as "
        "RandomFlip at the start of the model"
    )
    in_batches = (
        "augment whole batches instead of single images: call tfopt.data.Augmentation(tfopt.data.AugmentConfig(...), "
        "outputs=CLASSES) in a map after batch"
    )
    advice = on_device if on_gpu else in_batches
    if not any(spec.shape.rank in IMAGES for spec in stage.element_spec):
        advice = "draw the random numbers for whole batches: call the function in a map after batch"
    gain = _without(measured, stage, 1.0 if on_gpu else 1 - 1 / BATCHED)
    return _of_input(measured, "host_augmentation", f"{stage.name} augments on the processor", gain, advice)


def no_cache(measured: Measured) -> Diagnosis | str:
    stage, found = _limiting(measured)
    if any(each.kind.lower() in KEEPS and each.kind != "arrays in memory" for each in found.stages):
        return "there is a cache"
    if stage.kind not in COMPUTES:
        stage = _slowest_computation(found) or stage
    if stage.calls_python:
        return f"{stage.name} calls Python; see slow_map"
    if _is_wide(stage) and _finds(wide_dtype, measured):
        return f"{stage.name} computes in float64; see float64"
    if stage.kind not in COMPUTES:
        return f"{stage.name} computes nothing"
    data = measured.observation.data
    read = [stage] if isinstance(data, PerEpoch) else stage.walk()  # before it, tfopt draws only the order
    if other := next((each for each in read if _may_differ(each)), None):
        return f"{other.name} may give other elements in each epoch, which a cache would not"
    if measured.observation.epochs < 2:
        return "the training reads every example once"
    advice = _cache_behind(stage, data)
    if any(each.kind == "Repeat" for each in stage.walk()):
        advice += ". Move repeat() behind the cache, which would otherwise grow without end"
    return _of_input(
        measured,
        "no_cache",
        f"{stage.name} computes the same examples in every epoch",
        _without(measured, stage),
        advice,
        {"data.cache": "memory"},
    )


def _cache_behind(stage: Stage, data: Any) -> str:
    """Returns how to cache what a stage gives. A cache keeps the order that it has seen, so the shuffle follows it."""
    if isinstance(data, PerEpoch):  # tfopt puts its cache before the shuffle
        return "plan.pipeline(..., cache='memory'), or cache='disk' if the examples do not fit in memory"
    on_disk = "; .cache(FILE) if the examples do not fit in memory"
    before = list(stage.walk())
    shuffle = next((each for each in before if each.kind == "shuffle"), None)
    if shuffle is None:
        return f".cache() after the map, before shuffle and augmentation{on_disk}"
    buffer = shuffle.size or "BUFFER"
    batched = any(each.kind in ("batch", "padded batch") for each in before)
    return (
        f"{stage.name} comes after a shuffle: .cache() alone would repeat the order of the first epoch. Put "
        f".cache().shuffle({buffer}) behind the map{', and batch behind both' if batched else ', before batch'}. "
        "A function that shuffles and batches by itself, such as image_dataset_from_directory, is called with "
        f"batch_size=None, then .cache().shuffle({buffer}).batch(SIZE).prefetch(tf.data.AUTOTUNE){on_disk}"
    )


def _may_differ(stage: Stage) -> bool:
    """Returns whether a stage may give other elements in each epoch, not only another order."""
    draws = stage.is_random or stage.node.op.startswith("Random")
    return draws or stage.changes_state or stage.calls_python or stage.kind == "generator"


def no_prefetch(measured: Measured) -> Diagnosis | str:
    stage, found = _limiting(measured)
    if _ends_with_prefetch(found):
        return "the pipeline ends with prefetch"
    if stage.is_serial or stage.calls_python or stage.kind == "generator":
        return f"{stage.name} is serial; see slow_map"
    return _of_input(
        measured, "no_prefetch", "a batch is made only when the step asks for it",
        lambda: measured.gain_of_input("prefetch", lambda found: found.dataset.prefetch(AUTOTUNE)),
        ".prefetch(tf.data.AUTOTUNE) at the end of the pipeline",
    )  # fmt: skip


def input_bound(measured: Measured) -> Diagnosis | str:
    """The input is too slow, and no other rule says why."""
    if any(_finds(rule, measured) for rule in SPECIFIC):
        return "another rule says why the step waits"
    if not isinstance(measured.observation.data, tf.data.Dataset) and not comes_from_python(measured.observation.data):
        return "the data is in memory"
    parts = measured.breakdown
    if parts.input_ms < LEAST_MS:
        return f"the step waits {parts.input_ms:.2g} ms for its batch"
    alone = measured.input
    slowest = "" if isinstance(alone, CannotMeasureError) else f"; the slowest stage is {alone.report.slowest}"
    return _of_input(
        measured, "input_bound", f"the step waits for its batch{slowest}",
        lambda: measured.gain_of_input("from memory", lambda found: found.without_work(found.last)),
        "use more processor cores or a tf.data service (tfopt data serve), smaller images, or examples converted once "
        f"to TFRecord files; a batch takes {parts.input_alone_ms or 0:.3g} ms alone",
    )  # fmt: skip


def _finds(rule: Callable[[Measured], Diagnosis | str], measured: Measured) -> bool:
    """Returns whether a rule finds a cause that is worth a change."""
    try:
        found = rule(measured)
    except (AbsentError, CannotMeasureError):
        return False
    return isinstance(found, Diagnosis) and is_worth(found)


SPECIFIC = (full_shuffle, short_epochs, slow_generator, wide_dtype, slow_map, host_augmentation, no_cache, no_prefetch)


def _without(measured: Measured, stage: Stage, part: float = 1.0) -> Callable[[], float]:
    """Returns a function that measures what the step gains if a stage takes no time, or loses this part of it."""

    def gain() -> float:
        found = _input(measured)
        own = [found.alone_ms(each) for each in stage.walk() if each.kind not in MIXES]
        mixing = [found.alone_ms(each) for each in stage.walk() if each.kind in MIXES]  # these are still to be done
        of_all = share(sum(own), sum(own) + sum(mixing))
        return part * of_all * measured.gain_of_input(stage.name, lambda found: found.without_work(stage))

    return gain


def _of_input(
    measured: Measured,
    cause: str,
    title: str,
    gain: Callable[[], float],
    advice: str,
    settings: dict[str, int | bool | str] | None = None,
) -> Diagnosis | str:
    parts = measured.breakdown
    waits = share(parts.input_ms, parts.whole_ms)
    if waits < WAITS:
        return f"the step waits for its batch for {waits:.1%} of its time"
    evidence = f"the step waits for {waits:.0%} of its time, {parts.input_ms:.3g} of {parts.whole_ms:.3g} ms"
    try:
        saved = gain()
    except CannotMeasureError:  # such a pipeline cannot be built again: the waits are what can be saved
        saved = waits
        evidence += "; the change could not be measured, and saves the whole wait at most"
    return Diagnosis(
        cause=cause,
        title=title,
        evidence=f"{evidence} (threshold {WAITS:.0%})",
        gain=share(saved, 1.0),
        advice=advice,
        settings=settings or {},
    )


def _input(measured: Measured) -> InputTime:
    waits = share(measured.breakdown.input_ms, measured.breakdown.whole_ms)
    if waits < WAITS:
        raise AbsentError(f"the step waits for its batch for {waits:.1%} of its time")
    if isinstance(measured.input, CannotMeasureError):
        raise measured.input
    return measured.input


def _limiting(measured: Measured) -> tuple[Stage, InputTime]:
    """Returns the stage that limits the input."""
    found = _input(measured)
    stage = found.slowest()
    if stage is None:
        raise CannotMeasureError("the slowest stage of the input is unknown")
    return stage, found


def _slowest_computation(found: InputTime) -> Stage | None:
    """Returns the stage with a function that takes the longest, if that is a good part of a batch."""
    computing = [each for each in found.stages if each.kind in COMPUTES]
    slowest = max(computing, key=found.alone_ms, default=None)
    return slowest if slowest is not None and found.alone_ms(slowest) >= COMPUTING * found.batch_ms else None


def _ends_with_prefetch(found: InputTime) -> bool:
    return any(each.node.op.startswith("Prefetch") for each in found.stages[-3:])


def _is_wide(stage: Stage) -> bool:
    return stage.kind == "map" and any(spec.dtype == tf.float64 for spec in stage.element_spec)


def _python_source(data: Any, measured: Measured) -> str | None:
    if comes_from_python(data):
        return type(data).__name__
    if isinstance(data, tf.data.Dataset):
        stage, _ = _limiting(measured)
        return "tf.data.Dataset.from_generator" if stage.kind == "generator" else None
    return None
