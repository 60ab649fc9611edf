"""Calibration: runs a frozen graph on example data and measures the ranges of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.graph.frozen import FrozenGraph, reason_of
from tfopt.quantization.annotation.grids import Range
from tfopt.quantization.calibration.data import in_pieces, length
from tfopt.quantization.calibration.observers import make_observer
from tfopt.quantization.config import QuantizationConfig


def calibrate(
    graph: FrozenGraph, tensors: Sequence[str], batches: Sequence[Mapping[str, Any]], config: QuantizationConfig
) -> dict[str, Range]:
    """Returns the range of each tensor over the data. Raises ConfigError if the data drives one to NaN or infinity."""
    observers = {tensor: make_observer(config) for tensor in tensors}
    function = graph.as_function(fetch=tensors)
    examples = 0
    for piece in in_pieces(batches):
        values = function(**piece)
        for (tensor, observer), value in zip(observers.items(), values, strict=True):
            array = value.numpy()
            if not np.isfinite(array).all():
                raise ConfigError(
                    "calibration_data must keep every activation finite. "
                    f"Received: NaN or infinity in tensor {tensor!r}, shape {array.shape}, among examples "
                    f"{examples} to {examples + length(piece) - 1}. Remove these examples or normalise the inputs."
                )
            observer.update(array)
        examples += length(piece)
    return {tensor: observer.range() for tensor, observer in observers.items()}


@contextmanager
def computable() -> Iterator[None]:
    """Raises ConfigError where the model cannot compute with examples, for example with ids beyond its table."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        raise ConfigError(
            "calibration_data and evaluation_data must be examples that the model can compute with. Received: "
            f"{reason_of(str(error))}. Remove such examples, or encode them as for the training: ids must be below the "
            "number of rows of their table."
        ) from error
