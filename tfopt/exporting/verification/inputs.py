"""Which of a model's inputs is which, and inputs for a model that has no manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ArtifactError
from tfopt.exporting.manifest import CheckRecord, TensorRecord

OPEN_SIZE = 64  # of an axis, other than the batch, whose size a model leaves open
Fits = Callable[[TensorRecord, TensorRecord], bool]


def matched_names(
    wanted: Mapping[str, TensorRecord], own: Mapping[str, TensorRecord], fits: Fits = TensorRecord.fits
) -> dict[str, str] | None:
    """Returns a model's name for each of the wanted inputs; None if they are not the same inputs.

    Names can differ, because Keras numbers unnamed inputs anew in every process. Then shapes and types decide.

    Example:
        >>> image, ids = TensorRecord(shape=(None, 8), dtype="float32"), TensorRecord(shape=(None, 4), dtype="int32")
        >>> matched_names({"image": image, "ids": ids}, {"input_1": ids, "input_2": image})
        {'image': 'input_2', 'ids': 'input_1'}
    """
    if wanted.keys() == own.keys():
        names = {name: name for name in wanted}
    else:
        candidates = {name: [other for other, its in own.items() if fits(its, spec)] for name, spec in wanted.items()}
        names = {name: found[0] for name, found in candidates.items() if len(found) == 1}
    paired = len(wanted) == len(own) == len({*names.values()})
    return names if paired and all(fits(own[names[name]], spec) for name, spec in wanted.items()) else None


def alike(one: TensorRecord, other: TensorRecord) -> bool:
    """Returns whether the values of one input can be converted for another: whole numbers of any size, or floats."""
    kinds = {each.numpy_dtype.kind.replace("u", "i") for each in (one, other)}
    return len(kinds) == 1 and bool(tf.TensorShape(one.shape).is_compatible_with(other.shape))


def with_sizes(specs: Mapping[str, TensorRecord], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorRecord]:
    """Returns the specs of inputs whose sizes are known, of any number of examples."""
    return {name: replace(spec, shape=(None, *shapes[name][1:])) for name, spec in specs.items()}


def drawn_from(specs: Mapping[str, TensorRecord], open_size: int = OPEN_SIZE) -> CheckRecord:
    """Returns how to draw one example for a model: numbers from 0 to 1, and bytes of any value, as pixels are.

    Raises:
        ArtifactError: An input takes strings, leaves its rank open, or has no axis for the examples.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for name, spec in specs.items():
        kind = spec.numpy_dtype.kind
        if not spec.shape or kind not in "fiub":
            remedy = (
                "Give it an axis for the examples."
                if spec.shape == ()
                else "Pass inputs (of tfopt bench and verify: --inputs)."
            )
            raise ArtifactError(
                f"Inputs can be drawn of numbers in a known rank of at least 1. Received: input {name!r}, {spec}. "
                f"{remedy}"
            )
        shapes[name] = (1, *(open_size if size is None else size for size in spec.shape[1:]))
        is_byte = kind in "iu" and spec.numpy_dtype.itemsize == 1
        ranges[name] = _limits(spec.numpy_dtype) if is_byte else (0.0, 1.0)
    return CheckRecord(ranges=ranges, shapes=shapes, outputs={})


def renamed(check: CheckRecord, names: Mapping[str, str]) -> CheckRecord:
    """Returns how to draw the same examples for a model with other names, by the names in the check."""
    return replace(
        check,
        ranges={names[name]: value for name, value in check.ranges.items()},
        shapes={names[name]: value for name, value in check.shapes.items()},
        words={names[name]: value for name, value in check.words.items()},
    )


def with_open_size(check: CheckRecord, specs: Mapping[str, TensorRecord], open_size: int) -> CheckRecord:
    """Returns how to draw the same examples with another size of every open axis but the first."""
    shapes = {}
    for name, drawn in check.shapes.items():
        sizes = specs[name].shape or drawn
        shapes[name] = drawn[:1] + tuple(
            open_size if size is None else had for size, had in zip(sizes[1:], drawn[1:], strict=True)
        )
    return replace(check, shapes=shapes)


def batch_of(arrays: Mapping[str, np.ndarray], specs: Mapping[str, TensorRecord], batch_size: int) -> dict[str, Any]:
    """Returns a batch of given examples, which are repeated where they are too few, in the model's types."""
    places = np.arange(batch_size)
    return {
        name: np.take(value, places, axis=0, mode="wrap").astype(specs[name].numpy_dtype, copy=False)
        for name, value in arrays.items()
    }


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
