"""Rules for the memory of the process."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import tensorflow as tf

from tfopt.diagnosis.experiments import CannotMeasureError
from tfopt.diagnosis.measured import Measured
from tfopt.report import Diagnosis

QUARTERS, GROWTH_BYTES = 4, 10**6
FEWEST = 3  # readings of a quarter


def growing_memory(measured: Measured) -> Diagnosis | str:
    """The process takes more memory from step to step.

    The resident memory is read after some of the watched steps. In each quarter of them its median must rise: a buffer
    that fills, or an allocator that takes a large piece once, does not do that.
    """
    seen = measured.observation
    readings = [each.resident_bytes for each in seen.settled if each.resident_bytes is not None]
    if len(readings) < QUARTERS * FEWEST:
        raise CannotMeasureError(f"the memory was read {len(readings)} times, and {QUARTERS * FEWEST} times are needed")
    if seen.settled is seen.calls and isinstance(seen.data, tf.data.Dataset):
        raise CannotMeasureError("caches and buffers of the input fill in the first epoch, and no other was watched")
    figures, grows = _growth(readings, "watched steps")
    if not grows:
        return figures
    traces = sum(call.traces for call in seen.settled)
    causes = filter(None, (_most_kept(), f"the step was traced {traces} times" if traces > 1 else ""))
    return Diagnosis(
        cause="growing_memory",
        title="the memory of the process grows from step to step",
        evidence="; ".join([figures, *causes]),
        gain=None,
        advice="keep float(loss) or .numpy() of what is needed, not tensors, in lists and histories; give batches one "
        "shape, and tf.function tensors in place of Python numbers, which trace it anew; build and compile a model "
        "once, not in a loop, or call keras.backend.clear_session() between two",
    )


def growing_predictions(measured: Measured) -> Diagnosis | str:
    """The process takes more memory from call to call of `predict`, by the same rule as from step to step."""
    seen = measured.observation.predictions
    calls = len(seen.resident_bytes)
    if not calls:
        return "predict was not called"
    if calls < QUARTERS * FEWEST:
        raise CannotMeasureError(f"predict was called {calls} times, and {QUARTERS * FEWEST} times are needed")
    figures, grows = _growth(seen.resident_bytes, f"{calls} calls of predict")
    if not grows:
        return figures
    made = f"{seen.functions} of the calls were of a model that was new or newly compiled" if seen.functions > 1 else ""
    traced = f"the model was traced {seen.traces} times" if seen.traces > seen.functions else ""
    return Diagnosis(
        cause="growing_predictions",
        title="the memory of the process grows from predict to predict",
        evidence="; ".join(filter(None, [figures, _most_kept(), made, traced])),
        gain=None,
        advice="in a loop call model(x), or predict_on_batch with one shape, and predict once on many examples; build, "
        "load and compile a model once, or call keras.backend.clear_session() between two; keep the outputs that are "
        "needed, not all",
    )


def _growth(readings: Sequence[int], what: str) -> tuple[str, bool]:
    """Returns the memory at the beginning and at the end in words, and whether it rises in each quarter."""
    each = len(readings) // QUARTERS
    readings = readings[-QUARTERS * each :]
    medians = [statistics.median(readings[place * each : (place + 1) * each]) for place in range(QUARTERS)]
    least = min(later - before for before, later in pairwise(medians))
    first, last = (f"{value / 1e6:,.0f} MB" for value in (medians[0], medians[-1]))
    return f"{first} in the first quarter of the {what}, {last} in the last", least >= GROWTH_BYTES


def _most_kept() -> str:
    """Returns in words which tensors of one shape the program holds most bytes of; empty if there are few."""
    sizes: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for found in gc.get_objects():
        if isinstance(found, tf.Tensor) and hasattr(found, "numpy"):
            kind = str(found.dtype.name), str(tuple(found.shape))
            sizes[kind] += found.dtype.size * (found.shape.num_elements() or 0)
            count[kind] += 1
    for kind, size in sizes.most_common(1):
        if count[kind] > FEWEST and size >= QUARTERS * GROWTH_BYTES:
            return f"{count[kind]} tensors of {kind[0]} {kind[1]} are held, {size / 1e6:,.0f} MB"
    return ""
