"""Calibration: runs a frozen graph on example data and measures the ranges of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.batches import iterate_batches
from tfopt.errors import ConfigError
from tfopt.graph.frozen import FrozenGraph, reason_of
from tfopt.quantization.annotation.range import Range
from tfopt.quantization.calibration.observers import make_observer
from tfopt.quantization.config import QuantizationConfig

# Examples per run. All observed tensors are in memory at once: 0.4 GB for a ResNet-50 at 224x224.
PIECE = 8


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Batches of examples in memory.

    Attributes:
        inputs: The batches of inputs, in the dtypes of the graph.
        labels: Their labels.
        rest: The inputs of some examples behind these.
    """

    inputs: list[dict[str, Any]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    rest: list[dict[str, Any]] = field(default_factory=list)


def collect(graph: FrozenGraph, data: Any, limit: int | None = None, rest: int = 0) -> Collected:
    """Reads up to `limit` examples, and up to `rest` further ones.

    Raises:
        ConfigError: The data is missing or does not fit the model's inputs.
    """
    _check_given(data)
    found = Collected()
    whole = None if limit is None else limit + rest
    taken = 0
    for values, labels in iterate_batches(data, whole, inputs=len(graph.inputs)):
        fed = graph.feed(values)
        size = length(fed)
        kept = size if limit is None else min(size, limit - taken)
        if kept:
            found.inputs.append({name: value[:kept] for name, value in fed.items()})
            found.labels.append(
                tf.nest.map_structure(lambda part, end=kept: None if part is None else part[:end], labels)
            )
        if kept < size:
            found.rest.append({name: value[kept:] for name, value in fed.items()})
        taken += kept
    return found


def join_labels(labels: Sequence[Any]) -> Any:
    """Returns the labels of all batches in one array, or in one structure of arrays.

    Raises:
        ConfigError: There are no examples, or no labels.
    """
    if not labels or any(each is None for each in labels):
        raise ConfigError(
            f"max_accuracy_drop needs labelled examples. Received: {'no labels' if labels else 'no examples'}. Pass "
            "evaluation_data=(inputs, labels), preferably of examples that the model was not trained on, or "
            "calibration data with labels."
        )
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *labels)


def calibrate(graph: FrozenGraph, tensors: Sequence[str], data: Any, config: QuantizationConfig) -> dict[str, Range]:
    """Returns the range of each tensor over the calibration data.

    Raises:
        ConfigError: The data is missing, empty, does not fit the model's inputs, or drives a tensor to NaN or infinity.
    """
    _check_given(data)
    observers = {tensor: make_observer(config) for tensor in tensors}
    function = graph.as_function(fetch=tensors)
    batches = iterate_batches(data, config.calibration_examples, inputs=len(graph.inputs))
    examples = 0
    for piece in in_pieces(graph.feed(inputs) for inputs, _ in batches):
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
    if not examples:
        raise ConfigError("calibration_data must hold at least one example. Received: none (or an iterator used up).")
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


def in_pieces(batches: Iterable[Mapping[str, Any]], size: int = PIECE) -> Iterator[dict[str, Any]]:
    """Yields the batches in pieces of at most `size` examples."""
    for batch in batches:
        for start in range(0, length(batch), size):
            yield {name: value[start : start + size] for name, value in batch.items()}


def length(batch: Mapping[str, Any]) -> int:
    """Returns the number of examples in a batch of inputs by name."""
    return len(next(iter(batch.values())))


def _check_given(data: Any) -> None:
    if data is None:
        raise ConfigError(
            "calibration_data must be given for static int8 quantization. Received: None. "
            "Pass 100 to 500 examples of real inputs, for example calibration_data=x_train[:256]."
        )
